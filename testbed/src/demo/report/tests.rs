use super::super::record::RunRecord;
use super::{fixture, render};

/// Tags of the page in order, with the names of those that are open where `check` is called; panics where they do not match.
fn assert_well_formed(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let body = page
        .strip_prefix("<!DOCTYPE html>\n")
        .expect("a page begins with its type");
    let mut rest = body;
    while let Some(start) = rest.find('<') {
        let text = &rest[..start];
        let in_style = open.last() == Some(&"style");
        assert!(in_style || !text.contains('>'), "stray > in {text:?}");
        let end = start + rest[start..].find('>').expect("every tag ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        let name = tag
            .trim_start_matches('/')
            .split([' ', '/'])
            .next()
            .unwrap_or_default();
        assert!(
            tag.matches('"').count().is_multiple_of(2),
            "quotes in <{tag}>"
        );
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "</{name}> closes something else");
        } else if !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "still open: {open:?}");
}

fn assert_self_contained(page: &str) {
    for word in [
        "http:", "https:", "src=", "href=", "<script", "<link", "@import", "<iframe", "<img",
        "NaN", "inf\"", "url(\"",
    ] {
        assert!(!page.contains(word), "the page holds {word}");
    }
    for (index, _) in page.match_indices("url(") {
        assert!(page[index..].starts_with("url(#"), "a reference outside");
    }
}

#[test]
fn a_report_is_well_formed_complete_and_self_contained() {
    let run = fixture::good(7);
    let page = render(&run);
    assert_well_formed(&page);
    assert_self_contained(&page);
    for wanted in [
        "Every SLO met in all 3 phases; a new plan answered within 2.3\u{a0}s of each event",
        "2026-11-30 19:15:02 UTC",
        "SLO p95 ≤ 300\u{a0}ms",
        "SLO mean ≥ 0.72",
        "plan 2 answers after 1.42\u{a0}s",
        "uplink cut to 1/20",
        "detector: cloud-1 → near-1",
        "content drifted: luma mean 11.2, was 108.4",
        "detector (moved)",
        "emulated ×0.15",
        "plan left alone",
        "every frame is accounted for",
        "Example CPU",
        "cargo demo --seed 7 --loss 2%",
        "prefers-color-scheme: dark",
    ] {
        assert!(page.contains(wanted), "the page lacks {wanted:?}");
    }
    let charts = page.matches("<svg class=\"chart").count();
    assert_eq!(charts, 6, "three charts, for wide and narrow screens");
    assert!(page.len() < 600_000, "{} bytes", page.len());
    keep_for_a_look(&page, &run);
}

/// Set COMPASS_KEEP_REPORT=FILE to look at the page, and at the run beside it.
fn keep_for_a_look(page: &str, run: &RunRecord) {
    if let Some(path) = std::env::var_os("COMPASS_KEEP_REPORT") {
        let path = std::path::PathBuf::from(path);
        std::fs::write(&path, page).unwrap();
        let json = serde_json::to_vec(run).unwrap();
        std::fs::write(path.with_extension("json"), json).unwrap();
    }
}

#[test]
fn a_failed_run_says_so_first_and_why() {
    let mut run = fixture::good(8);
    run.passed = false;
    run.failures = vec!["lights out: F1 0.41 < 0.72".to_owned(), "two".to_owned()];
    let page = render(&run);
    assert_well_formed(&page);
    assert!(page.contains("Failed: lights out: F1 0.41 &lt; 0.72 (and 1 more)"));
    assert!(page.contains("What went wrong"));

    run.valid = false;
    run.invalid_reasons = vec!["host busy 97 %".to_owned()];
    let page = render(&run);
    assert!(page.contains("Not valid: host busy 97 %"));
    assert!(page.contains("Why this run is not valid"));
}

#[test]
fn a_run_that_broke_off_early_still_has_a_report() {
    let mut run = fixture::good(9);
    run.passed = false;
    run.first_plan_s = None;
    run.points.clear();
    run.static_points.clear();
    run.phases.clear();
    run.replans.clear();
    run.plans.clear();
    run.trials.clear();
    run.nodes.clear();
    run.frames = Default::default();
    let page = render(&run);
    assert_well_formed(&page);
    assert_self_contained(&page);
}

#[test]
fn nothing_a_run_says_becomes_markup() {
    let mut run = fixture::good(10);
    let nasty = "<script>alert(\"1\")</script>&amp";
    run.source = nasty.to_owned();
    run.flags = vec![nasty.to_owned()];
    run.phases[0].name = nasty.to_owned();
    run.events[0].what = nasty.to_owned();
    run.replans[0].reason = nasty.to_owned();
    run.replans[0].trigger = nasty.to_owned();
    run.replans[0].changed = vec![nasty.to_owned()];
    run.plans[0].operators[0].operator = nasty.to_owned();
    run.plans[0].status = nasty.to_owned();
    run.nodes[0].name = nasty.to_owned();
    run.nodes[0].tier = Some(nasty.to_owned());
    run.trials[0].plan = nasty.to_owned();
    run.checks[0].detail = nasty.to_owned();
    run.host.processor = nasty.to_owned();
    let page = render(&run);
    assert_well_formed(&page);
    assert_self_contained(&page);
}

#[test]
fn a_run_survives_its_json() {
    let run = fixture::good(11);
    let text = serde_json::to_string(&run).unwrap();
    let back: RunRecord = serde_json::from_str(&text).unwrap();
    assert_eq!(render(&back), render(&run));
}
