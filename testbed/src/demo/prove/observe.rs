//! What every configuration of a pipeline answers, how large its intermediate outputs are and how long its operators take, on a film.
//!
//! Start at [`observe`]. The operators are the ones that agents run, in this process. What configurations have in common is computed once:
//! a picture is prepared once per setting of the operator that prepares it, and detectors look at each prepared picture once, whatever the
//! sampling rates are. Times are taken on a few frames with nothing else running here, as CPU time of the whole process, because the
//! inference engine computes on threads of its own.

use std::time::Duration;

use anyhow::{Context, ensure};
use compass_agent::operators::InProcess;
use compass_planning::space::is_filter;
use compass_shared::evaluate::HeldAnswer;
use compass_shared::model::catalogue::{Catalogue, CatalogueEntry, Evaluator, StateKind};
use compass_shared::model::pipeline::{Configuration, Operator, Pipeline, PipelineConfiguration};
use rustix::time::{ClockId, clock_gettime};

use super::super::app::boxes_of;
use super::super::film::{Shot, on_all_cores};
use super::super::networks::Networks;

/// Frames on which times are taken.
const TIMED: usize = 4;

/// Film to look at: some frames to get going, then those that are judged.
pub(super) struct Footage {
    pub(super) shots: Vec<Shot>,
    /// How many frames come before in the app's count, in which samplers begin.
    pub(super) before: usize,
    /// How many of `shots` are not judged.
    pub(super) lead_in: usize,
}

/// What is known of one configuration.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) configuration: PipelineConfiguration,
    /// Which frames its filters let through.
    pub(super) kept: Vec<bool>,
    /// Per operator and frame: bytes of its output; 0 where there is none.
    pub(super) bytes: Vec<Vec<f64>>,
    /// Per operator: milliseconds on one core of this host, of the timed frames.
    pub(super) cpu_ms: Vec<Vec<f64>>,
    /// How many operators see every frame: the filters.
    pub(super) filters: usize,
    /// Mean F1 of the judged frames; `None` where it was not worth finding out (see `is_hopeless`).
    pub(super) accuracy: Option<f64>,
}

/// What operators are loaded from.
pub(super) struct Kitchen<'a> {
    pub(super) pipeline: &'a Pipeline,
    pub(super) catalogue: &'a Catalogue,
    pub(super) networks: &'a Networks,
}

/// An operator with the configurations it may have.
struct Level<'a> {
    operator: &'a Operator,
    entry: &'a CatalogueEntry,
    choices: Vec<Configuration>,
}

impl Level<'_> {
    fn keeps_state(&self) -> bool {
        self.entry.state != StateKind::None
    }
}

/// A picture or what became of it.
type Passed = (String, Vec<u8>);

impl<'a> Kitchen<'a> {
    /// The operators in order, the filters apart.
    fn levels(&self) -> anyhow::Result<(Vec<Level<'a>>, Vec<Level<'a>>)> {
        let mut levels = Vec::new();
        for (position, operator) in self.pipeline.operators.iter().enumerate() {
            let before = position
                .checked_sub(1)
                .map(|i| &self.pipeline.operators[i].id);
            ensure!(
                operator.inputs.iter().eq(before),
                "only a chain of operators can be looked at, and {} is not in one",
                operator.id
            );
            let entry = self.catalogue.0.get(&operator.kind);
            let entry = entry.with_context(|| format!("no operator {}", operator.kind))?;
            levels.push(Level {
                operator,
                entry,
                choices: choices(operator),
            });
        }
        let filters = levels.iter().take_while(|level| is_filter(level.entry));
        let rest = levels.split_off(filters.count());
        ensure!(
            !rest.is_empty() && !rest.iter().any(|level| is_filter(level.entry)),
            "samplers must come first, and something after them"
        );
        Ok((levels, rest))
    }

    fn load(&self, level: &Level<'_>, configuration: &Configuration) -> anyhow::Result<InProcess> {
        self.networks.load(level.entry, configuration)
    }
}

/// All combinations of an operator's knobs, the first knob changing slowest.
fn choices(operator: &Operator) -> Vec<Configuration> {
    let mut all = vec![Configuration::default()];
    for knob in &operator.knobs {
        all = all
            .into_iter()
            .flat_map(|before| {
                knob.values.iter().map(move |value| {
                    let mut own = before.clone();
                    own.0.insert(knob.name.clone(), value.clone());
                    own
                })
            })
            .collect();
    }
    all
}

/// Looks at the film with every configuration. `is_hopeless` is asked with everything but sizes and accuracy; what it refuses is judged by
/// the timed frames only.
pub(super) fn observe(
    kitchen: &Kitchen<'_>,
    footage: &Footage,
    is_hopeless: &(dyn Fn(&Candidate) -> bool + Sync),
) -> anyhow::Result<Vec<Candidate>> {
    let (filters, levels) = kitchen.levels()?;
    let (filtered, filter_ms) = filtered(kitchen, &filters, footage)?;
    let timed = timed(kitchen, &levels, footage)?;
    let combinations: usize = levels.iter().map(|level| level.choices.len()).product();
    let mut candidates = Vec::new();
    for (own, kept) in &filtered {
        for combination in 0..combinations {
            let mut configuration = own.clone();
            let mut cpu_ms = filter_ms.clone();
            for (depth, level) in levels.iter().enumerate() {
                let prefix = prefix_at(&levels, combination, depth);
                let choice = level.choices[prefix % level.choices.len()].clone();
                configuration.0.insert(level.operator.id.clone(), choice);
                cpu_ms.push(timed[depth][prefix].clone());
            }
            candidates.push(Candidate {
                configuration,
                kept: kept.clone(),
                bytes: Vec::new(),
                cpu_ms,
                filters: filters.len(),
                accuracy: None,
            });
        }
    }
    let hopeless: Vec<bool> = candidates.iter().map(is_hopeless).collect();
    let is_wanted = |combination: usize, frame: usize| {
        (0..filtered.len()).any(|filter| {
            filtered[filter].1[frame] && !hopeless[filter * combinations + combination]
        })
    };
    let alone = levels.iter().take_while(|level| !level.keeps_state());
    let alone = alone.count();
    let seen = seen_alone(kitchen, &levels[..alone], footage, &|prefix, frame| {
        // What the last of them does is all that its combinations differ in, unless operators with a state have knobs, too.
        let width = combinations / combinations_of(&levels[..alone]);
        (0..width).any(|rest| is_wanted(prefix * width + rest, frame))
    })?;
    let jobs: Vec<usize> = (0..candidates.len()).collect();
    let rest = on_all_cores(&jobs, |index| {
        if hopeless[*index] {
            return Ok(None);
        }
        let kept = &candidates[*index].kept;
        in_order(
            kitchen,
            &levels,
            alone,
            index % combinations,
            kept,
            &seen,
            footage,
        )
        .map(Some)
    })?;
    for ((index, candidate), rest) in candidates.iter_mut().enumerate().zip(rest) {
        let input: Vec<f64> = footage.shots.iter().map(|s| s.jpeg.len() as f64).collect();
        candidate.bytes = vec![input; filters.len()];
        let Some((bytes, accuracy)) = rest else {
            continue;
        };
        for depth in 0..alone {
            let prefix = prefix_at(&levels, index % combinations, depth);
            candidate.bytes.push(seen.bytes[depth][prefix].clone());
        }
        candidate.bytes.extend(bytes);
        candidate.accuracy = Some(accuracy);
    }
    Ok(candidates)
}

fn combinations_of(levels: &[Level<'_>]) -> usize {
    levels.iter().map(|level| level.choices.len()).product()
}

/// The number, among all configurations of the operators down to `depth`, of the one a combination of all operators begins with.
fn prefix_at(levels: &[Level<'_>], combination: usize, depth: usize) -> usize {
    combination / combinations_of(&levels[depth + 1..])
}

/// Every configuration of the filters with the frames it lets through, and the time each filter takes, in ms.
#[expect(clippy::type_complexity, reason = "two results of one look")]
fn filtered(
    kitchen: &Kitchen<'_>,
    filters: &[Level<'_>],
    footage: &Footage,
) -> anyhow::Result<(Vec<(PipelineConfiguration, Vec<bool>)>, Vec<Vec<f64>>)> {
    let frames = footage.shots.len();
    let mut all = vec![(PipelineConfiguration::default(), vec![true; frames])];
    let mut times = Vec::new();
    for level in filters {
        let mut next = Vec::new();
        let mut own_ms = Vec::new();
        for (before, kept) in &all {
            for own in &level.choices {
                let mut operator = kitchen.load(level, own)?;
                // A sampler decides by the frame's number.
                for _ in 0..footage.before {
                    let passed = operator.process("jpeg", &[]);
                    passed.map_err(anyhow::Error::msg)?;
                }
                let mut configuration = before.clone();
                configuration
                    .0
                    .insert(level.operator.id.clone(), own.clone());
                let mut lets = Vec::with_capacity(frames);
                for kept in kept {
                    let (passed, took) = timing(|| operator.process("jpeg", &[]));
                    own_ms.push(took);
                    lets.push(*kept && passed.map_err(anyhow::Error::msg)?.is_some());
                }
                next.push((configuration, lets));
            }
        }
        all = next;
        times.push(own_ms);
    }
    Ok((all, times))
}

/// CPU time of this process in ms while something is done.
fn timing<R>(work: impl FnOnce() -> R) -> (R, f64) {
    let now = || {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Duration::new(
            time.tv_sec.unsigned_abs(),
            u32::try_from(time.tv_nsec).unwrap_or(0),
        )
    };
    let before = now();
    let result = work();
    (result, (now() - before).as_secs_f64() * 1e3)
}

/// Loaded operators per level: one per choice, and where there is a state, one per configuration of all operators down to it.
struct Loaded(Vec<Vec<InProcess>>);

impl Loaded {
    fn new(kitchen: &Kitchen<'_>, levels: &[Level<'_>]) -> anyhow::Result<Self> {
        let load = |(depth, level): (usize, &Level<'_>)| {
            let copies = if level.keeps_state() {
                combinations_of(&levels[..depth])
            } else {
                1
            };
            let all = (0..copies).flat_map(|_| &level.choices);
            all.map(|own| kitchen.load(level, own)).collect()
        };
        let loaded: anyhow::Result<_> = levels.iter().enumerate().map(load).collect();
        Ok(Self(loaded?))
    }

    /// Gives a frame to the operators in every configuration; tells of each its depth, number, result and time in ms.
    fn give(
        &mut self,
        levels: &[Level<'_>],
        (depth, parent): (usize, usize),
        (content, bytes): (&str, &[u8]),
        is_wanted: &dyn Fn(usize, usize) -> bool,
        tell: &mut dyn FnMut(usize, usize, &Passed, f64),
    ) -> anyhow::Result<()> {
        let Some(level) = levels.get(depth) else {
            return Ok(());
        };
        let own = level.choices.len();
        for prefix in parent * own..(parent + 1) * own {
            if !is_wanted(depth, prefix) {
                continue;
            }
            let instances = &mut self.0[depth];
            let count = instances.len();
            let operator = &mut instances[prefix % count];
            let (passed, took) = timing(|| operator.process(content, bytes));
            let passed = passed
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("operator {}", level.operator.id))?;
            let passed =
                passed.with_context(|| format!("{} left a frame out", level.operator.id))?;
            tell(depth, prefix, &passed, took);
            let next = (passed.0.as_str(), passed.1.as_slice());
            self.give(levels, (depth + 1, prefix), next, is_wanted, tell)?;
        }
        Ok(())
    }
}

/// Per level, configuration and timed frame: milliseconds.
fn timed(
    kitchen: &Kitchen<'_>,
    levels: &[Level<'_>],
    footage: &Footage,
) -> anyhow::Result<Vec<Vec<Vec<f64>>>> {
    let mut loaded = Loaded::new(kitchen, levels)?;
    let number = |depth: usize| combinations_of(&levels[..=depth]);
    let mut times: Vec<Vec<Vec<f64>>> = (0..levels.len())
        .map(|depth| vec![Vec::new(); number(depth)])
        .collect();
    let every = footage.shots.len().div_ceil(TIMED).max(1);
    // The first one only warms up.
    let chosen = footage.shots.iter().step_by(every);
    for (count, shot) in footage.shots.iter().take(1).chain(chosen).enumerate() {
        let picture = ("jpeg", &*shot.jpeg);
        let mut tell = |depth: usize, prefix: usize, _: &Passed, took: f64| {
            if count > 0 {
                times[depth][prefix].push(took);
            }
        };
        loaded.give(levels, (0, 0), picture, &|_, _| true, &mut tell)?;
    }
    Ok(times)
}

/// What the operators without a state make of each frame.
struct Seen {
    /// Per level, configuration and frame: bytes of the output; 0 where nobody wanted it.
    bytes: Vec<Vec<Vec<f64>>>,
    /// Per configuration of all of them and frame: the output of the last one.
    last: Vec<Vec<Option<Passed>>>,
}

fn seen_alone(
    kitchen: &Kitchen<'_>,
    levels: &[Level<'_>],
    footage: &Footage,
    is_wanted: &(dyn Fn(usize, usize) -> bool + Sync),
) -> anyhow::Result<Seen> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let frames = footage.shots.len();
    let parts: Vec<Vec<usize>> = (0..threads)
        .map(|first| (first..frames).step_by(threads).collect())
        .collect();
    let looked = on_all_cores(&parts, |part| {
        let mut loaded = Loaded::new(kitchen, levels)?;
        let mut outputs = Vec::new();
        for frame in part {
            let shot = &footage.shots[*frame];
            let wanted = |depth: usize, prefix: usize| {
                let width = combinations_of(&levels[depth + 1..]);
                (0..width).any(|rest| is_wanted(prefix * width + rest, *frame))
            };
            let mut tell = |depth: usize, prefix: usize, passed: &Passed, _: f64| {
                let kept = (depth + 1 == levels.len()).then(|| passed.clone());
                outputs.push((depth, prefix, *frame, passed.1.len(), kept));
            };
            let picture = ("jpeg", &*shot.jpeg);
            loaded.give(levels, (0, 0), picture, &wanted, &mut tell)?;
        }
        Ok(outputs)
    })?;
    let mut seen = Seen {
        bytes: (0..levels.len())
            .map(|depth| vec![vec![0.0; frames]; combinations_of(&levels[..=depth])])
            .collect(),
        last: vec![vec![None; frames]; combinations_of(levels)],
    };
    for (depth, prefix, frame, size, kept) in looked.into_iter().flatten() {
        seen.bytes[depth][prefix][frame] = size as f64;
        if kept.is_some() {
            seen.last[prefix][frame] = kept;
        }
    }
    Ok(seen)
}

/// Runs the operators from the first one with a state on over the frames that are kept; gives the sizes of their outputs and the accuracy
/// of the last one's, held over the frames without one, as the demo's app counts it.
fn in_order(
    kitchen: &Kitchen<'_>,
    levels: &[Level<'_>],
    alone: usize,
    combination: usize,
    kept: &[bool],
    seen: &Seen,
    footage: &Footage,
) -> anyhow::Result<(Vec<Vec<f64>>, f64)> {
    let mut operators = Vec::new();
    for (depth, level) in levels.iter().enumerate().skip(alone) {
        let own = prefix_at(levels, combination, depth) % level.choices.len();
        operators.push(kitchen.load(level, &level.choices[own])?);
    }
    let begun = alone.checked_sub(1);
    let begun = begun.map(|last| &seen.last[prefix_at(levels, combination, last)]);
    let mut bytes = vec![vec![0.0; footage.shots.len()]; operators.len()];
    let mut held = HeldAnswer::new(Evaluator::DetectionF1);
    let mut scores = Vec::new();
    for (frame, shot) in footage.shots.iter().enumerate() {
        let mut answer = None;
        if kept[frame] {
            let picture = || ("jpeg".to_owned(), shot.jpeg.to_vec());
            let mut passed = match begun {
                Some(begun) => begun[frame].clone().context("a frame was not looked at")?,
                None => picture(),
            };
            for (operator, sizes) in operators.iter_mut().zip(&mut bytes) {
                let next = operator.process(&passed.0, &passed.1);
                let next = next.map_err(anyhow::Error::msg)?;
                passed = next.context("a frame was left out")?;
                sizes[frame] = passed.1.len() as f64;
            }
            answer = Some(boxes_of(&passed.1)?);
        }
        let score = held.score(&shot.truth, answer.as_deref())?;
        if frame >= footage.lead_in {
            scores.extend(score);
        }
    }
    ensure!(!scores.is_empty(), "no frame has an answer");
    Ok((bytes, scores.iter().sum::<f64>() / scores.len() as f64))
}
