//! The core stays free of input, output and clocks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Packages of `Cargo.lock` with what they depend on.
fn lock() -> BTreeMap<String, Vec<String>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock");
    let text = std::fs::read_to_string(path).unwrap();
    let mut packages: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut name = String::new();
    let mut is_in_list = false;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("name = \"") {
            name = rest.trim_end_matches('"').to_owned();
            packages.entry(name.clone()).or_default();
        } else if line == "dependencies = [" {
            is_in_list = true;
        } else if line == "]" {
            is_in_list = false;
        } else if is_in_list {
            let entry = line.trim().trim_matches([',', '"']);
            let dependency = entry.split(' ').next().unwrap_or(entry);
            packages.get_mut(&name).unwrap().push(dependency.to_owned());
        }
    }
    packages
}

#[test]
fn planning_depends_on_no_runtime_transport_or_actor_library() {
    let packages = lock();
    // The lock lists what tests need as well; of those only the ones named here may stand between us and a runtime, and none does.
    let mut seen = BTreeSet::new();
    let mut open = vec!["compass-planning".to_owned()];
    while let Some(name) = open.pop() {
        if seen.insert(name.clone()) {
            open.extend(packages.get(&name).into_iter().flatten().cloned());
        }
    }
    assert!(
        seen.contains("compass-shared"),
        "the lock was not understood"
    );
    for banned in [
        "tokio",
        "actix",
        "quinn",
        "mio",
        "async-std",
        "redb",
        "axum",
        "getrandom-clock",
    ] {
        assert!(
            !seen.contains(banned),
            "compass-planning depends on {banned}"
        );
    }
}

#[test]
fn planning_reads_no_clock_and_draws_no_entropy() {
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let banned = [
        "Instant::now",
        "SystemTime",
        "thread_rng",
        "rand::rng()",
        "from_os_rng",
        "HashMap",
        "HashSet",
    ];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path()));
            continue;
        }
        if path.ends_with("tests/tree.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for word in banned {
            assert!(!text.contains(word), "{} uses {word}", path.display());
        }
    }
}
