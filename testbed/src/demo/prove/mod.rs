//! `demo --prove`: that the story can be told. For each phase, every configuration on every placement is looked at, without a fleet.
//!
//! Start at [`run`]. What configurations answer, and in what time, comes from running their operators on the film that the phase shows
//! ([`mod@observe`]); latency and cost are composed from that ([`compose`], which says what it leaves out); which plans meet all SLOs is counted
//! in [`choose`]. As the demo itself does, a phase is judged by its last seconds. Deliberately absent: the planner. Whether it finds what is
//! there to be found is for the demo to show.

mod choose;
mod compose;
mod observe;
mod table;

#[cfg(test)]
mod tests;

use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use anyhow::Context;
use serde::Serialize;

use super::arguments::DemoArguments;
use super::collect::PHASES;
use super::film::{Film, Shot, frames};
use super::networks::Networks;
use super::record::{PlanOperator, SloRecord};
use super::scenario::{MEASURED, Scenario};
use super::story::film_config;
use super::view::{View, for_this_terminal};
use choose::{Figures, Input, Plan, Tally, figures, is_hopeless, survey};
use compose::Ground;
use observe::{Candidate, Footage, Kitchen, observe};

/// From the app's first frame to its first answer, about, in seconds: so long the film has run when the day begins.
const FIRST_ANSWER_S: f64 = 2.0;
/// Film before the judged part, in seconds, so that trackers and held answers are what they would be.
const LEAD_IN_S: f64 = 1.0;
/// Room that is asked for beside mere compliance: this part of each bound.
const ROOM: f64 = 0.1;

/// What was found.
#[derive(Debug, Serialize)]
struct Proof {
    seed: u64,
    source: String,
    slo: SloRecord,
    /// Seconds of each phase that are judged.
    judged_s: f64,
    phases: Vec<PhaseProof>,
    left_alone: Vec<LeftAlone>,
    /// Whether every phase has a compliant plan.
    proved: bool,
    took_s: f64,
}

#[derive(Debug, Serialize)]
struct PhaseProof {
    name: String,
    configurations: usize,
    placements: u64,
    plans: u64,
    compliant: u64,
    /// Compliant with a tenth of each bound to spare.
    compliant_with_room: u64,
    /// The highest accuracy of a compliant plan.
    best_accuracy: Option<f64>,
    cheapest: Option<PlanProof>,
    cheapest_with_room: Option<PlanProof>,
    nearest_miss: Option<PlanProof>,
}

/// A phase's cheapest plan after an event.
#[derive(Debug, Serialize)]
struct LeftAlone {
    cheapest_of: String,
    in_phase: String,
    plan: PlanProof,
    /// Whether it fails there, which is what the story is about.
    fails: bool,
}

#[derive(Debug, Clone, Serialize)]
struct PlanProof {
    operators: Vec<PlanOperator>,
    /// At the SLO's percentile; absent when an operator or a link does not keep up.
    latency_ms: Option<f64>,
    accuracy: Option<f64>,
    cost_usd_per_h: f64,
    /// The SLOs it does not meet.
    misses: Vec<&'static str>,
}

/// Looks, prints, writes.
pub(crate) fn run(arguments: &DemoArguments) -> ExitCode {
    let mut view = for_this_terminal(arguments.headless);
    let proof = arguments
        .scenario(view.as_mut())
        .and_then(|scenario| prove(&scenario, arguments.seed, view.as_mut()));
    view.end();
    let written = proof.and_then(|proof| {
        if let Some(json) = &arguments.json {
            std::fs::write(json, serde_json::to_vec(&proof)?)
                .with_context(|| format!("cannot write {}", json.display()))?;
        }
        Ok(proof)
    });
    match written {
        Ok(proof) => {
            println!("{}", table::text(&proof));
            if proof.proved {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One phase, looked at.
struct Phase {
    name: &'static str,
    footage: Rc<Footage>,
    ground: Ground,
    candidates: Vec<Candidate>,
    input: Input,
    tally: Tally,
}

fn prove(scenario: &Scenario, seed: u64, view: &mut dyn View) -> anyhow::Result<Proof> {
    let started = Instant::now();
    let configs = scenario.configs()?;
    let networks = Networks::new(&scenario.artifacts)?;
    let kitchen = Kitchen {
        pipeline: &scenario.query.pipeline,
        catalogue: &configs.catalogue,
        networks: &networks,
    };
    view.step("the film is rendered");
    let footage = footage(scenario, seed)?;
    view.done("the film is rendered");
    let slo = &scenario.slo;
    let mut phases: Vec<Phase> = Vec::new();
    let mut proofs = Vec::new();
    for (index, footage) in footage.iter().enumerate() {
        let name = PHASES[index];
        view.step(&format!("{name}: every configuration looks at the film"));
        let uplink = if index == 0 { 1.0 } else { scenario.uplink_cut };
        let ground = Ground::new(scenario, &configs.prices, uplink)?;
        let candidates = match phases.last() {
            Some(last) if Rc::ptr_eq(footage, &last.footage) => last.candidates.clone(),
            _ => observe(&kitchen, footage, &|candidate| {
                is_hopeless(&ground, candidate, slo)
            })?,
        };
        let input = Input {
            bytes: footage.shots.iter().map(|s| s.jpeg.len() as f64).collect(),
            lead_in: footage.lead_in,
        };
        view.step(&format!("{name}: every placement"));
        let tally = survey(&ground, &candidates, &input, slo)?;
        let roomy = survey(&ground, &candidates, &input, &with_room(slo))?;
        view.done(&format!("{name}: {} plans looked at", tally.plans));
        let shown = |plan: &Option<Plan>| {
            let plan = plan.as_ref()?;
            Some(plan_proof(scenario, &ground, &candidates, plan))
        };
        proofs.push(PhaseProof {
            name: name.to_owned(),
            configurations: candidates.len(),
            placements: tally.plans / candidates.len().max(1) as u64,
            plans: tally.plans,
            compliant: tally.compliant,
            compliant_with_room: roomy.compliant,
            best_accuracy: tally.best_accuracy,
            cheapest: shown(&tally.cheapest),
            cheapest_with_room: shown(&roomy.cheapest),
            nearest_miss: shown(&tally.nearest),
        });
        phases.push(Phase {
            name,
            footage: Rc::clone(footage),
            ground,
            candidates,
            input,
            tally,
        });
    }
    Ok(Proof {
        seed,
        source: scenario.source.clone(),
        slo: *slo,
        judged_s: scenario.proved.as_secs_f64(),
        proved: proofs.iter().all(|phase| phase.compliant > 0),
        phases: proofs,
        left_alone: left_alone(scenario, &phases),
        took_s: started.elapsed().as_secs_f64(),
    })
}

/// Bounds that leave some of each SLO unused.
fn with_room(slo: &SloRecord) -> SloRecord {
    SloRecord {
        latency_ms: slo.latency_ms * (1.0 - ROOM),
        accuracy_min: slo.accuracy_min * (1.0 + ROOM),
        cost_max_usd_per_h: slo.cost_max_usd_per_h * (1.0 - ROOM),
        ..*slo
    }
}

/// The day's cheapest plan in the phases after it, and the cut's in the dark.
fn left_alone(scenario: &Scenario, phases: &[Phase]) -> Vec<LeftAlone> {
    let slo = &scenario.slo;
    let mut facts = Vec::new();
    for (of, first) in phases.iter().enumerate() {
        let Some(plan) = &first.tally.cheapest else {
            continue;
        };
        for later in &phases[of + 1..] {
            let candidate = &later.candidates[plan.candidate];
            let Phase { ground, input, .. } = later;
            let plan = Plan {
                figures: figures(ground, candidate, input, slo, &plan.layout),
                ..plan.clone()
            };
            facts.push(LeftAlone {
                cheapest_of: first.name.to_owned(),
                in_phase: later.name.to_owned(),
                fails: plan.figures.shortfall(slo) > 0.0,
                plan: plan_proof(scenario, ground, &later.candidates, &plan),
            });
        }
    }
    facts
}

fn plan_proof(
    scenario: &Scenario,
    ground: &Ground,
    candidates: &[Candidate],
    plan: &Plan,
) -> PlanProof {
    let slo = &scenario.slo;
    let operators = scenario.query.pipeline.operators.iter();
    let Plan {
        candidate,
        layout,
        figures,
    } = plan;
    let configuration = &candidates[*candidate].configuration;
    let Figures {
        latency_ms,
        accuracy,
        cost_usd_per_h,
    } = *figures;
    let misses = [
        ("latency", latency_ms > slo.latency_ms),
        ("accuracy", accuracy.unwrap_or(0.0) < slo.accuracy_min),
        ("cost", cost_usd_per_h > slo.cost_max_usd_per_h),
    ];
    PlanProof {
        operators: operators
            .map(|operator| &operator.id)
            .zip(layout.nodes.iter().zip(&layout.shares))
            .map(|(operator, (node, share))| PlanOperator {
                operator: operator.to_string(),
                node: ground.places[*node].name.clone(),
                configuration: configuration
                    .of(operator)
                    .into_iter()
                    .flat_map(|own| &own.0)
                    .map(|(knob, value)| (knob.to_string(), value.to_string()))
                    .collect(),
                cpu_millicores: *share,
            })
            .collect(),
        latency_ms: latency_ms.is_finite().then_some(latency_ms),
        accuracy,
        cost_usd_per_h,
        misses: misses
            .into_iter()
            .filter_map(|(name, missed)| missed.then_some(name))
            .collect(),
    }
}

/// The film of each phase: what the app would show in its judged part. Looking at a video costs most, and by day it looks the same with a
/// good link and a bad one: one part stands for both.
fn footage(scenario: &Scenario, seed: u64) -> anyhow::Result<Vec<Rc<Footage>>> {
    let rate_hz = scenario.rate_hz();
    let course = scenario.course;
    let config = film_config(scenario, seed, course);
    let judged_s = scenario.proved.min(MEASURED).as_secs_f64();
    let part = |end_s: f64| {
        let begin_s = (end_s - judged_s - LEAD_IN_S).max(0.0);
        frames(begin_s, rate_hz)..frames(end_s, rate_hz)
    };
    let day_end_s = FIRST_ANSWER_S + course.day.as_secs_f64();
    let cut_end_s = day_end_s + course.cut.as_secs_f64();
    let [day, cut, dark] = [day_end_s, cut_end_s, course.dark.as_secs_f64()].map(part);
    let film = Film::cut_out(&config, rate_hz, &[day.clone(), cut.clone()], dark.clone())?;
    let mut by_day = film.day;
    let shots_cut = by_day.split_off(day.len());
    let footage = |shots: Vec<Shot>, before: usize| {
        Rc::new(Footage {
            lead_in: shots.len().saturating_sub(frames(judged_s, rate_hz)),
            shots,
            before,
        })
    };
    let day = footage(by_day, day.start);
    let cut = if scenario.footage.is_some() {
        Rc::clone(&day)
    } else {
        footage(shots_cut, cut.start)
    };
    // Samplers count all frames since the app began.
    let dark = footage(film.dark, frames(cut_end_s, rate_hz) + dark.start);
    Ok(vec![day, cut, dark])
}
