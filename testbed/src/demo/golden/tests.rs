//! The real detector on the real video. Both come with `compass-testbed fetch`; without them these tests say that they were not run.

use std::io::Write;

use compass_shared::evaluate::{HeldAnswer, decode_detections, encode_detections};
use compass_shared::ids::{KnobName, OperatorId};
use compass_shared::model::catalogue::Evaluator;
use compass_shared::model::pipeline::{KnobValue, PipelineConfiguration};
use compass_shared::vision::overlap;

use super::super::real;
use super::*;

/// Set where the fetched files must be there, so that nothing is left out in silence.
const REQUIRED: &str = "COMPASS_FETCHED";

fn fetched() -> Option<Fetched> {
    match Fetched::find() {
        Ok(fetched) => Some(fetched),
        Err(error) if std::env::var_os(REQUIRED).is_some() => panic!("{error:#}"),
        Err(error) => {
            // Not through the macros, which a test's output is captured from.
            let _ = writeln!(std::io::stderr(), "NOT RUN: {error:#}");
            None
        }
    }
}

/// A configuration with these values and golden ones elsewhere.
fn configuration(pipeline: &Pipeline, values: &[(&str, &str, i64)]) -> PipelineConfiguration {
    let mut configuration = pipeline.golden();
    for (operator, knob, value) in values {
        let own = configuration
            .0
            .get_mut(&OperatorId::new(*operator).unwrap());
        let knob = KnobName::new(*knob).unwrap();
        own.unwrap().0.insert(knob, KnobValue::Integer(*value));
    }
    configuration
}

struct World {
    fetched: Fetched,
    pipeline: Pipeline,
    catalogue: std::sync::Arc<Catalogue>,
    pictures: Vec<Arc<[u8]>>,
}

fn world() -> Option<World> {
    let fetched = fetched()?;
    let configs = real::configs().unwrap();
    let pipeline = configs.pipelines.values().next().unwrap().clone();
    let pictures = footage::read(&fetched.video().0, 10.0).unwrap();
    Some(World {
        fetched,
        pipeline,
        catalogue: configs.catalogue,
        pictures,
    })
}

impl World {
    fn chain(&self, values: &[(&str, &str, i64)]) -> Chain {
        let configuration = configuration(&self.pipeline, values);
        Chain::load(
            &self.pipeline,
            &self.catalogue,
            &configuration,
            &self.fetched,
        )
        .unwrap()
    }
}

/// Three people of the first frame, looked up by eye: left, top, right, bottom in pixels of 768 × 576.
const PEOPLE: [[f32; 4]; 3] = [
    [495.0, 151.0, 528.0, 230.0],
    [639.0, 235.0, 682.0, 321.0],
    [248.0, 216.0, 279.0, 307.0],
];

#[test]
fn every_fetched_network_runs_and_the_largest_find_the_people_of_the_first_frame() {
    let Some(world) = world() else { return };
    for (input, least) in [(160, 0), (224, 1), (300, 2), (416, 2), (512, 3), (640, 3)] {
        let mut chain = world.chain(&[("detector", "input", input)]);
        let found = chain.run(&world.pictures[0]).unwrap().unwrap();
        let found = decode_detections(&found).unwrap();
        let hits = PEOPLE.iter().filter(|[left, top, right, bottom]| {
            let person = [
                left / 768.0,
                top / 576.0,
                (right - left) / 768.0,
                (bottom - top) / 576.0,
            ];
            found
                .iter()
                .any(|d| overlap([d.x, d.y, d.w, d.h], person) >= 0.5)
        });
        let hits = hits.count();
        assert!(hits >= least, "{input} px: {hits} of 3 in {found:?}");
        assert!(found.iter().all(|d| d.class == 3), "{found:?}");
    }
}

/// Confidences from which boxes count.
const SCORES: [f32; 3] = [0.3, 0.4, 0.5];
/// Every so many-th frame is answered: 10, 5 and 2 Hz.
const EVERY: [usize; 3] = [1, 2, 5];

/// Prints agreement with the golden configuration and CPU time: the figures behind `configs/real`.
#[test]
#[ignore = "prints figures for people; takes minutes"]
fn measure() {
    let Some(world) = world() else { return };
    let numbers = |name: &str, default: &str| -> Vec<f32> {
        let text = std::env::var(name).unwrap_or_else(|_| default.to_owned());
        text.split(',').map(|n| n.parse().unwrap()).collect()
    };
    let step = numbers("STEP", "40")[0] as usize;
    let mut golden = world.chain(&[]);
    // Runs of frames, so that held answers can be judged, too.
    let starts = (0..world.pictures.len() - EVERY[2]).step_by(step);
    let runs: Vec<Run> = starts
        .map(|start| {
            let pictures = world.pictures[start..start + EVERY[2]].to_vec();
            let truth = pictures.iter().map(|p| golden.run(p).unwrap().unwrap());
            let truth = truth.collect();
            Run { pictures, truth }
        })
        .collect();
    println!("F1 at 10, 5, 2 Hz with boxes from a score of {SCORES:?} on");
    for light in numbers("LIGHT", "1,0.3,0.08") {
        let seen: Vec<Run> = runs.iter().map(|run| run.in_light(light)).collect();
        for input in numbers("INPUT", "160,224,300,416,512,640") {
            for width in numbers("WIDTH", "640") {
                for quality in numbers("QUALITY", "75") {
                    let chain = world.chain(&[
                        ("detector", "input", input as i64),
                        ("detector", "score", 15),
                        ("prepare", "resolution", width as i64),
                        ("prepare", "quality", quality as i64),
                    ]);
                    let (ms, scores) = measured(chain, &seen);
                    println!(
                        "light {light:4} input {input:3} width {width:3} quality {quality:2} {ms:6.1} ms/frame  {scores:.2?}"
                    );
                }
            }
        }
    }
}

struct Run {
    pictures: Vec<Arc<[u8]>>,
    truth: Vec<Vec<u8>>,
}

impl Run {
    fn in_light(&self, light: f32) -> Self {
        let dark = self.pictures.iter();
        let dark = dark.map(|p| footage::darkened(p, light).unwrap().into());
        Self {
            pictures: dark.collect(),
            truth: self.truth.clone(),
        }
    }
}

/// Wall milliseconds per frame, and the mean F1 by score and by how many frames are answered.
fn measured(mut chain: Chain, runs: &[Run]) -> (f64, [[f64; 3]; 3]) {
    let mut ms = 0.0;
    let (mut sums, mut frames) = ([[0.0; 3]; 3], 0);
    for run in runs {
        let mut held = [(); 3].map(|()| EVERY.map(|_| HeldAnswer::new(Evaluator::DetectionF1)));
        for (index, (picture, truth)) in run.pictures.iter().zip(&run.truth).enumerate() {
            let began = std::time::Instant::now();
            let found = chain.run(picture).unwrap().unwrap();
            ms += began.elapsed().as_secs_f64() * 1e3;
            frames += 1;
            let found = decode_detections(&found).unwrap();
            for (score, least) in SCORES.into_iter().enumerate() {
                let sure: Vec<_> = found.iter().copied().filter(|d| d.score >= least).collect();
                let sure = encode_detections(&sure);
                for (rate, every) in EVERY.into_iter().enumerate() {
                    let own = (index % every == 0).then_some(&sure[..]);
                    let value = held[score][rate].score(truth, own).unwrap();
                    sums[score][rate] += value.unwrap_or_default();
                }
            }
        }
    }
    let mean = |sum: f64| sum / f64::from(frames);
    (ms / f64::from(frames), sums.map(|row| row.map(mean)))
}
