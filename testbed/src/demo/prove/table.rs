//! What `demo --prove` says on standard output.

use super::super::record::PlanOperator;
use super::super::report::text::{hourly, milliseconds};
use super::super::summary::table;
use super::{PlanProof, Proof};

/// The tables and the verdict.
pub(super) fn text(proof: &Proof) -> String {
    let slo = &proof.slo;
    let p95 = format!(
        "P{:.0} ≤ {}",
        slo.latency_percentile,
        milliseconds(slo.latency_ms)
    );
    let f1 = format!("F1 ≥ {:.2}", slo.accuracy_min);
    let cost = format!("COST ≤ {}", hourly(slo.cost_max_usd_per_h));
    let mut parts = Vec::new();
    let rows = proof.phases.iter().map(|phase| {
        let mut row = vec![
            phase.name.clone(),
            format!(
                "{} ({} × {})",
                phase.plans, phase.configurations, phase.placements
            ),
            phase.compliant.to_string(),
            phase.compliant_with_room.to_string(),
            accuracy(phase.best_accuracy),
        ];
        let best = phase.cheapest.as_ref();
        row.push(
            if best.is_some() {
                "cheapest"
            } else {
                "nearest miss"
            }
            .to_owned(),
        );
        row.extend(figures(best.or(phase.nearest_miss.as_ref())));
        row
    });
    let head = [
        "PHASE",
        "PLANS",
        "COMPLIANT",
        "WITH 10 % ROOM",
        "BEST F1",
        "",
        &p95,
        &f1,
        &cost,
    ];
    parts.push(table(&head, rows.collect()));
    let mut lines = Vec::new();
    for phase in &proof.phases {
        let kinds = [
            ("cheapest", &phase.cheapest),
            ("cheapest with room", &phase.cheapest_with_room),
            ("nearest miss", &phase.nearest_miss),
        ];
        let shown = kinds.into_iter().filter(|(kind, plan)| {
            plan.is_some() && (*kind != "nearest miss" || phase.compliant == 0)
        });
        for (kind, plan) in shown {
            let Some(plan) = plan else { continue };
            lines.push(format!(
                "{}, {kind}: {}{}",
                phase.name,
                summary(&plan.operators),
                missed(plan)
            ));
        }
    }
    parts.push(lines.join("\n"));
    let facts = proof.left_alone.iter().map(|fact| {
        let fails = if fact.fails {
            format!("fails{}", missed(&fact.plan))
        } else {
            "does NOT fail".to_owned()
        };
        let figures = figures(Some(&fact.plan)).join(", ");
        format!(
            "the cheapest plan of \"{}\", left alone in \"{}\", {fails}: {figures}",
            fact.cheapest_of, fact.in_phase
        )
    });
    parts.push(facts.collect::<Vec<_>>().join("\n"));
    parts.push(if proof.proved {
        format!(
            "PROVED  every phase has a plan that meets all SLOs (seed {}, the last {:.0} s of each phase, {:.0} s)",
            proof.seed, proof.judged_s, proof.took_s
        )
    } else {
        let mut without = proof.phases.iter().filter(|phase| phase.compliant == 0);
        let first = without.next().map_or("a phase", |phase| &phase.name);
        format!("NOT PROVED  \"{first}\" has no plan that meets all SLOs")
    });
    parts.retain(|part| !part.is_empty());
    format!("\n{}", parts.join("\n\n"))
}

fn figures(plan: Option<&PlanProof>) -> [String; 3] {
    let Some(plan) = plan else {
        return ["–", "–", "–"].map(str::to_owned);
    };
    [
        plan.latency_ms
            .map_or_else(|| "does not keep up".to_owned(), milliseconds),
        accuracy(plan.accuracy),
        hourly(plan.cost_usd_per_h),
    ]
}

fn accuracy(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.3}"))
}

fn missed(plan: &PlanProof) -> String {
    if plan.misses.is_empty() {
        String::new()
    } else {
        format!(" ({})", plan.misses.join(", "))
    }
}

/// `prepare{quality=75 resolution=224}@edge-1 ×0.30 …`
fn summary(operators: &[PlanOperator]) -> String {
    let all = operators.iter().map(|own| {
        let knobs = own.configuration.iter();
        let knobs: Vec<_> = knobs
            .map(|(knob, value)| format!("{knob}={value}"))
            .collect();
        let knobs = if knobs.is_empty() {
            String::new()
        } else {
            format!("{{{}}}", knobs.join(" "))
        };
        format!(
            "{}{knobs}@{} ×{:.2}",
            own.operator,
            own.node,
            f64::from(own.cpu_millicores) / 1e3
        )
    });
    all.collect::<Vec<_>>().join("  ")
}
