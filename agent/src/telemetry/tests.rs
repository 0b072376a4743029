use std::path::Path;
use std::process::Command;

use super::nvml::GpuLibrary;
use super::nvml::fake::{Answer, FakeDevice, FakeNvml};
use super::test_tree::Tree;
use super::*;

/// Hit only when something is broken.
const PATIENCE: Duration = Duration::from_secs(30);

fn at(second: u64) -> Moment {
    Moment(second * 1_000_000)
}

fn settings(tree: &Tree) -> TelemetrySettings {
    TelemetrySettings {
        root: tree.root(),
        ..TelemetrySettings::default()
    }
}

fn collector(fake: &Arc<FakeNvml>, tree: &Tree) -> TelemetryCollector {
    let library = Arc::clone(fake) as Arc<dyn GpuLibrary>;
    let opener = move || LibrarySearch {
        found: Some((Arc::clone(&library), "libnvidia-ml.so.1".into())),
        failures: Vec::new(),
    };
    TelemetryCollector::with_opener(settings(tree), Box::new(opener))
}

#[test]
fn a_report_has_the_host_and_every_device_in_a_stable_order() {
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("NVIDIA A100"),
        FakeDevice::card("NVIDIA T4"),
    ]));
    let tree = Tree::new().file(
        "/proc/meminfo",
        "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n",
    );
    let mut collector = collector(&fake, &tree);
    let report = collector.collect_settled(at(1), PATIENCE);
    let ids: Vec<&str> = report
        .devices
        .iter()
        .map(|device| device.id.as_str())
        .collect();
    assert_eq!(ids, ["gpu-0", "gpu-1"]);
    assert_eq!(
        report.devices[1].busy_percent,
        Reading::new(35.0, Source::Nvml)
    );
    assert_eq!(
        report.host.memory_total_bytes,
        Reading::new(1 << 30, Source::Procfs)
    );
    let memory = node_memory(&report).unwrap();
    assert_eq!(
        memory.devices,
        [MemoryPool::Separate {
            total_bytes: 80 << 30
        }; 2]
    );
    assert!(
        (3..=4).contains(&collector.thread_count()),
        "the host, two devices, and the search until it has noticed that it is done"
    );
    assert!(collector.shutdown(PATIENCE));
}

#[test]
fn field_017_a_shutdown_ends_every_thread_and_closes_the_library() {
    let fake = Arc::new(FakeNvml::new([FakeDevice::card("NVIDIA A100")]));
    let mut collector = collector(&fake, &Tree::new());
    assert_eq!(collector.collect_settled(at(1), PATIENCE).devices.len(), 1);
    assert!(collector.shutdown(PATIENCE));
    assert_eq!(
        Arc::strong_count(&fake),
        1,
        "nobody holds the library open any more"
    );
}

#[test]
fn before_the_first_answer_nothing_is_zero() {
    let fake = Arc::new(FakeNvml::new([FakeDevice::card("NVIDIA A100")]));
    let report = collector(&fake, &Tree::new()).collect(at(1));
    assert_eq!(report.host, Default::default());
    assert_eq!(report.host.cpu_busy_percent.value, None);
}

#[test]
fn field_012_a_hung_driver_call_delays_no_report_and_starts_no_thread() {
    let hanging = FakeDevice::card("NVIDIA T4").answer("busy", [Answer::Hang]);
    let fake = Arc::new(FakeNvml::new([hanging, FakeDevice::card("NVIDIA A100")]));
    let mut collector = collector(&fake, &Tree::new());
    collector.collect(at(1));
    if let Search::Running(search) = &collector.search {
        assert!(search.wait_idle(PATIENCE));
    }
    collector.collect(at(2));
    fake.wait_for_hanging(1);
    let threads = collector.thread_count();

    let mut states = Vec::new();
    for second in 3..=602 {
        let report = collector.collect(at(second));
        assert_eq!(report.taken, at(second));
        assert_eq!(report.devices.len(), 2);
        assert_eq!(report.devices[0].busy_percent.value, None);
        states.push(report.devices[0].state.clone());
    }
    assert_eq!(states[0], DeviceState::Starting);
    assert!(states[3..].iter().all(|state| *state == DeviceState::Hung));
    assert_eq!(
        fake.calls(0, "busy"),
        1,
        "the hung device is not asked again"
    );
    assert_eq!(fake.hanging(), 1);
    assert!(
        collector.thread_count() <= threads,
        "{} threads, {threads} before",
        collector.thread_count()
    );
    let report = collector.collect_settled(at(603), Duration::ZERO);
    assert_eq!(report.devices[0].state, DeviceState::Hung);

    assert!(
        !collector.shutdown(Duration::from_millis(50)),
        "the stuck thread is left behind, not waited for"
    );
    fake.release();
}

#[test]
fn field_012_a_device_that_returns_is_used_again() {
    let script = [Answer::Hang, Answer::Number(5.0)];
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("NVIDIA T4").answer("busy", script)
    ]));
    let mut collector = collector(&fake, &Tree::new());
    collector.collect(at(1));
    if let Search::Running(search) = &collector.search {
        assert!(search.wait_idle(PATIENCE));
    }
    collector.collect(at(2));
    fake.wait_for_hanging(1);
    assert_eq!(
        collector.collect(at(60)).devices[0].state,
        DeviceState::Hung
    );
    fake.release();
    assert!(collector.devices[0].worker.wait_idle(PATIENCE));
    assert_eq!(
        collector.collect_settled(at(120), PATIENCE).devices[0]
            .busy_percent
            .value,
        Some(5.0)
    );
}

#[test]
fn field_012_a_library_that_hangs_when_opened_leaves_a_cpu_only_node() {
    let gate = Arc::new(Mutex::new(()));
    let held = gate.lock().unwrap();
    let inner = Arc::clone(&gate);
    let opener = move || {
        let _opened = inner.lock();
        LibrarySearch {
            found: None,
            failures: Vec::new(),
        }
    };
    let mut collector = TelemetryCollector::with_opener(settings(&Tree::new()), Box::new(opener));
    collector.collect(at(1));
    let report = collector.collect(at(60));
    assert!(
        report
            .notes
            .iter()
            .any(|note| note.is_warning && note.topic == "gpu"),
        "{:?}",
        report.notes
    );
    assert_eq!(collector.thread_count(), 2);
    drop(held);
}

#[test]
fn field_082_busy_time_and_granted_shares_are_two_fields() {
    use compass_shared::model::telemetry::Enforcement;
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("NVIDIA A100").answer("busy", [Answer::Number(100.0)])
    ]));
    let mut collector = collector(&fake, &Tree::new());
    let share = |instance: &str| ShareTelemetry {
        instance: instance.to_owned(),
        granted_percent: Reading::new(50.0, Source::Measured),
        achieved_percent: Reading::none(),
        enforcement: Enforcement::Advisory,
    };
    collector.set_shares("gpu-0", vec![share("a"), share("b")]);
    let device = collector.collect_settled(at(1), PATIENCE).devices.remove(0);
    assert_eq!(device.busy_percent.value, Some(100.0));
    assert_eq!(
        device
            .shares
            .iter()
            .map(|share| share.granted_percent.value)
            .collect::<Vec<_>>(),
        [Some(50.0), Some(50.0)]
    );
}

#[test]
fn an_emulated_node_declares_itself_and_marks_every_figure() {
    let nothing = || LibrarySearch {
        found: None,
        failures: Vec::new(),
    };
    let emulated = EmulatedNode {
        emulation: Emulation::new(0.15).unwrap(),
        cores: Some(4.0),
        memory_bytes: Some(1 << 30),
    };
    let settings = TelemetrySettings {
        emulated: Some(emulated),
        ..TelemetrySettings::default()
    };
    let mut collector = TelemetryCollector::with_opener(settings, Box::new(nothing));
    let report = collector.collect_settled(at(1), PATIENCE);
    assert_eq!(report.emulation.unwrap().to_string(), "emulated ×0.15");
    assert_eq!(
        report.host.cpu_capacity_cores,
        Reading::new(4.0, Source::Emulated)
    );
    assert_eq!(
        report.host.memory_total_bytes,
        Reading::new(1 << 30, Source::Emulated)
    );
    assert_eq!(
        report.host.cpu_busy_percent,
        Reading::new(0.0, Source::Emulated),
        "it has no workers"
    );
}

/// Builds the stand-in library with the C compiler that building Compass needs anyway.
fn build_library(target: &Path, init_result: u32) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/telemetry/fake_nvml.c");
    let status = Command::new("cc")
        .args([
            "-shared",
            "-fPIC",
            &format!("-DNVML_INIT_RESULT={init_result}"),
            "-o",
        ])
        .arg(target)
        .arg(source)
        .status()
        .unwrap();
    assert!(status.success());
}

fn start_with_library_in(folder: &Path) -> NodeTelemetry {
    let library = LibraryPlaces {
        folders: vec![folder.to_owned()],
        configured: None,
    };
    let mut collector = TelemetryCollector::new(TelemetrySettings {
        library,
        ..settings(&Tree::new())
    });
    collector.collect_settled(at(1), PATIENCE)
}

#[test]
fn field_010_the_versioned_library_is_found_and_asked() {
    let folder = tempfile::tempdir().unwrap();
    build_library(&folder.path().join("libnvidia-ml.so.1"), 0);
    let report = start_with_library_in(folder.path());
    let device = &report.devices[0];
    assert_eq!(
        (device.id.as_str(), device.name.as_str()),
        ("GPU-test", "Test Card")
    );
    assert_eq!(device.busy_percent, Reading::new(42.0, Source::Nvml));
    assert_eq!(
        device.memory,
        MemoryPool::Separate {
            total_bytes: 1 << 34
        }
    );
    assert_eq!(device.power_mw.value, None, "not supported");
    assert_eq!(
        device.temperature_c.value, None,
        "a function the library does not have"
    );
    assert!(
        report
            .notes
            .iter()
            .any(|note| note.text.contains("driver 999.1")),
        "{:?}",
        report.notes
    );
}

#[test]
fn field_010_no_library_an_empty_one_and_a_stub_leave_a_cpu_only_node_that_says_so() {
    let nothing = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("libnvidia-ml.so"), b"").unwrap();
    let stub = tempfile::tempdir().unwrap();
    const LIBRARY_NOT_FOUND: u32 = 12;
    build_library(&stub.path().join("libnvidia-ml.so"), LIBRARY_NOT_FOUND);

    for (folder, is_broken) in [(nothing, false), (empty, true), (stub, true)] {
        let report = start_with_library_in(folder.path());
        assert_eq!(report.devices, []);
        let note = report
            .notes
            .iter()
            .find(|note| note.topic == "gpu")
            .unwrap();
        assert!(note.text.ends_with("CPU-only"), "{note:?}");
        assert_eq!(note.is_warning, is_broken, "{note:?}");
    }
}

#[test]
fn field_010_a_broken_candidate_is_passed_over_for_the_configured_path() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("libnvidia-ml.so.1"), b"").unwrap();
    let configured = folder.path().join("elsewhere.so");
    build_library(&configured, 0);
    let library = LibraryPlaces {
        folders: vec![folder.path().to_owned()],
        configured: Some(configured),
    };
    let mut collector = TelemetryCollector::new(TelemetrySettings {
        library,
        ..settings(&Tree::new())
    });
    assert_eq!(collector.collect_settled(at(1), PATIENCE).devices.len(), 1);
}
