use super::*;
use crate::telemetry::nvml::fake::{Answer, FakeDevice, FakeNvml};
use crate::telemetry::nvml::{LIST_TRIES_MAX, ProcessBusy};
use crate::telemetry::test_tree::Tree;

const MEMINFO_128_GIB: &str = "MemTotal: 134217728 kB\nMemAvailable: 100000000 kB\n";

fn at(second: u64) -> Moment {
    Moment(second * 1_000_000)
}

/// Finds the devices of a scripted library on a board.
fn find(fake: &Arc<FakeNvml>, tree: &Tree) -> Vec<GpuSampler> {
    let search = LibrarySearch {
        found: Some((
            Arc::clone(fake) as Arc<dyn GpuLibrary>,
            "libnvidia-ml.so.1".into(),
        )),
        failures: Vec::new(),
    };
    discover(&search, &tree.root()).devices
}

fn only(fake: &Arc<FakeNvml>, tree: &Tree) -> GpuSampler {
    let mut devices = find(fake, tree);
    assert_eq!(devices.len(), 1);
    devices.remove(0)
}

fn coverage_percent(device: &DeviceTelemetry, metric: &str) -> Option<f64> {
    device
        .coverage
        .iter()
        .find(|coverage| coverage.metric == metric)
        .and_then(MetricCoverage::percent)
}

fn row(pid: u32, timestamp_us: u64) -> ProcessBusy {
    ProcessBusy {
        pid,
        timestamp_us,
        busy_percent: 10.0,
    }
}

#[test]
fn a_card_answers_everything_with_its_source() {
    let fake = Arc::new(FakeNvml::new([FakeDevice::card("NVIDIA A100")]));
    let device = only(&fake, &Tree::new()).sample(at(1)).device;
    assert_eq!(device.busy_percent, Reading::new(35.0, Source::Nvml));
    assert_eq!(
        device.memory,
        MemoryPool::Separate {
            total_bytes: 80 << 30
        }
    );
    assert_eq!(
        device.memory_used_bytes,
        Reading::new(10 << 30, Source::Nvml)
    );
    assert_eq!(device.power_mw, Reading::new(250_000, Source::Nvml));
    assert_eq!(device.state, DeviceState::Ok);
    assert_eq!(coverage_percent(&device, "power"), Some(100.0));
}

#[test]
fn field_001_an_orin_that_supports_nothing_is_read_from_sysfs() {
    let fake = Arc::new(FakeNvml::new([FakeDevice::new("Orin (nvgpu)")]));
    let tree = Tree::new()
        .file("/sys/devices/platform/gpu.0/load", "437\n")
        .file("/proc/meminfo", MEMINFO_128_GIB);
    let mut sampler = only(&fake, &tree);
    let device = (1..=3)
        .map(|second| sampler.sample(at(second)).device)
        .last()
        .unwrap();
    assert_eq!(device.busy_percent, Reading::new(43.7, Source::Sysfs));
    assert_eq!(
        device.memory,
        MemoryPool::Unified {
            total_bytes: 128 << 30
        }
    );
    assert_eq!(device.power_mw.value, None);
    assert_eq!(coverage_percent(&device, "power"), Some(0.0));
    assert_eq!(coverage_percent(&device, "utilisation"), Some(100.0));
}

#[test]
fn field_001_without_a_load_file_the_share_is_unknown_and_not_zero() {
    let fake = Arc::new(FakeNvml::new([FakeDevice::new("Orin (nvgpu)")]));
    let device = only(&fake, &Tree::new()).sample(at(1)).device;
    assert_eq!(device.busy_percent.value, None);
    assert_eq!(coverage_percent(&device, "utilisation"), Some(0.0));
}

#[test]
fn field_003_thor_without_a_load_file_answers_through_the_library() {
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::new("NVIDIA Thor").answer("busy", [Answer::Number(97.0)])
    ]));
    let tree = Tree::new()
        .file("/sys/class/devfreq/gpu-gpc-0/cur_freq", "1575000000\n")
        .file("/sys/class/devfreq/gpu-nvd-0/cur_freq", "900000000\n")
        .file("/proc/meminfo", MEMINFO_128_GIB);
    let device = only(&fake, &tree).sample(at(1)).device;
    assert_eq!(device.busy_percent, Reading::new(97.0, Source::Nvml));
    assert_eq!(device.clock_mhz, Reading::new(1575, Source::Sysfs));
    assert_eq!(
        device.memory,
        MemoryPool::Unified {
            total_bytes: 128 << 30
        }
    );
}

#[test]
fn field_005_a_board_without_a_memory_answer_is_listed_with_the_hosts_memory() {
    let variants: [(&str, Vec<Answer>); 3] = [
        (
            "some new board",
            vec![Answer::Error(GpuError::NotSupported)],
        ),
        (
            "some new board",
            vec![Answer::Memory(RawMemory {
                total_bytes: 0,
                used_bytes: 0,
            })],
        ),
        (
            "NVIDIA GB10",
            vec![Answer::Memory(RawMemory {
                total_bytes: 12345,
                used_bytes: 6,
            })],
        ),
    ];
    for (name, memory) in variants {
        let fake = Arc::new(FakeNvml::new([
            FakeDevice::new(name).answer("memory", memory.clone())
        ]));
        let tree = Tree::new().file("/proc/meminfo", MEMINFO_128_GIB);
        let device = only(&fake, &tree).sample(at(1)).device;
        assert_eq!(
            device.memory,
            MemoryPool::Unified {
                total_bytes: 128 << 30
            },
            "{name} {memory:?}"
        );
        assert_eq!(device.memory_used_bytes.value, None);
    }
}

#[test]
fn a_card_whose_memory_query_fails_otherwise_is_not_taken_for_a_board() {
    let failing = FakeDevice::card("NVIDIA A100")
        .answer("memory", [Answer::Error(GpuError::Other("busy".into()))]);
    let sliced = FakeDevice::new("NVIDIA H100").answer("sliced", [Answer::Number(1.0)]);
    let fake = Arc::new(FakeNvml::new([failing, sliced]));
    let tree = Tree::new().file("/proc/meminfo", MEMINFO_128_GIB);
    for mut sampler in find(&fake, &tree) {
        assert_eq!(
            sampler.sample(at(1)).device.memory,
            MemoryPool::Unknown,
            "{}",
            sampler.name()
        );
    }
}

#[test]
fn a_board_without_the_library_is_found_in_sysfs() {
    let tree = Tree::new()
        .file("/sys/devices/gpu.0/load", "1003")
        .file("/proc/meminfo", MEMINFO_128_GIB);
    let nothing = LibrarySearch {
        found: None,
        failures: Vec::new(),
    };
    let mut discovery = discover(&nothing, &tree.root());
    let sample = discovery.devices[0].sample(at(1));
    assert_eq!(
        sample.device.busy_percent,
        Reading::new(100.0, Source::Sysfs)
    );
    assert_eq!(sample.dropped_values, 1, "the overshoot is flagged");
    assert_eq!(
        sample.device.memory,
        MemoryPool::Unified {
            total_bytes: 128 << 30
        }
    );
}

#[test]
fn zeros_that_a_board_cannot_mean_are_no_values() {
    let fake = Arc::new(FakeNvml::new([FakeDevice::new("Orin (nvgpu)")
        .answer("power", [Answer::Number(0.0)])
        .answer("clock", [Answer::Number(0.0)])
        .answer("temperature", [Answer::Number(0.0)])]));
    let device = only(&fake, &Tree::new()).sample(at(1)).device;
    assert_eq!(
        (
            device.power_mw.value,
            device.clock_mhz.value,
            device.temperature_c.value
        ),
        (None, None, None)
    );
}

#[test]
fn field_007_a_blank_value_of_the_driver_is_dropped_at_the_agent() {
    let blank = FakeDevice::card("NVIDIA A100").answer("busy", [Answer::Number(4_294_967_295.0)]);
    let fake = Arc::new(FakeNvml::new([blank]));
    let sample = only(&fake, &Tree::new()).sample(at(1));
    assert_eq!(
        (sample.device.busy_percent.value, sample.dropped_values),
        (None, 1)
    );
    assert_eq!(sample.device.power_mw.value, Some(250_000));
    assert_eq!(coverage_percent(&sample.device, "utilisation"), Some(0.0));
}

#[test]
fn field_009_not_found_is_an_empty_list() {
    let idle = FakeDevice::card("T4").answer("process_busy", [Answer::Error(GpuError::NotFound)]);
    let fake = Arc::new(FakeNvml::new([idle]));
    let device = only(&fake, &Tree::new()).sample(at(1)).device;
    assert_eq!(device.processes, Reading::new(Vec::new(), Source::Nvml));
}

#[test]
fn field_009_a_list_that_grew_is_asked_for_again() {
    let rows = vec![row(1, 10), row(2, 11), row(3, 12)];
    let script = [
        Answer::Error(GpuError::InsufficientSize),
        Answer::Busy(rows),
    ];
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("T4").answer("process_busy", script)
    ]));
    let device = only(&fake, &Tree::new()).sample(at(1)).device;
    assert_eq!(
        device.processes.value.map(|processes| processes.len()),
        Some(3)
    );
}

#[test]
fn field_009_a_list_that_always_grows_is_unknown_after_a_few_tries() {
    let growing =
        FakeDevice::card("T4").answer("process_busy", [Answer::Error(GpuError::InsufficientSize)]);
    let fake = Arc::new(FakeNvml::new([growing]));
    let device = only(&fake, &Tree::new()).sample(at(1)).device;
    assert_eq!(device.processes.value, None);
    assert_eq!(fake.calls(0, "process_busy"), LIST_TRIES_MAX);
    assert_eq!(device.busy_percent.value, Some(35.0));
}

#[test]
fn field_009_rows_that_hold_nothing_are_left_out() {
    let mut rows = vec![row(0, 0); 100];
    rows.push(row(7, 5));
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("T4").answer("process_busy", [Answer::Busy(rows)])
    ]));
    let mut sampler = only(&fake, &Tree::new());
    let first = sampler.sample(at(1)).device.processes.value.unwrap();
    assert_eq!(
        first.iter().map(|process| process.pid).collect::<Vec<_>>(),
        [7]
    );
    assert_eq!(
        sampler.sample(at(2)).device.processes.value,
        Some(Vec::new()),
        "an old row is not news"
    );
}

#[test]
fn field_016_an_unsupported_field_is_asked_for_about_hourly_and_per_device() {
    let mut lacking = FakeDevice::card("GRID A100-4C");
    lacking.answers.remove("power");
    let fake = Arc::new(FakeNvml::new([lacking, FakeDevice::card("NVIDIA A100")]));
    let mut samplers = find(&fake, &Tree::new());
    for second in 1..=600 {
        for sampler in &mut samplers {
            sampler.sample(at(second));
        }
    }
    assert!(fake.calls(0, "power") <= 3, "{}", fake.calls(0, "power"));
    assert_eq!(fake.calls(0, "busy"), 600);
    assert_eq!(fake.calls(1, "power"), 600);
    samplers[0].sample(at(2 * 3600));
    assert_eq!(fake.calls(0, "power"), 2, "asked again after an hour");
}

#[test]
fn a_lost_device_is_said_to_be_lost_and_not_pestered() {
    let script = [Answer::Number(3.0), Answer::Error(GpuError::Lost)];
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("T4").answer("busy", script)
    ]));
    let mut sampler = only(&fake, &Tree::new());
    assert_eq!(sampler.sample(at(1)).device.state, DeviceState::Ok);
    let states: Vec<DeviceState> = (2..=60)
        .map(|second| sampler.sample(at(second)).device.state)
        .collect();
    assert!(
        states.iter().all(|state| *state == DeviceState::Lost),
        "{states:?}"
    );
    assert!(fake.calls(0, "busy") < 12, "{}", fake.calls(0, "busy"));
}

#[test]
fn field_078_more_used_than_there_is_counts_as_unknown() {
    let memory = RawMemory {
        total_bytes: 24 << 30,
        used_bytes: 18_446_744_073_707_737_660,
    };
    let fake = Arc::new(FakeNvml::new([
        FakeDevice::card("HAMi").answer("memory", [Answer::Memory(memory)])
    ]));
    let sample = only(&fake, &Tree::new()).sample(at(1));
    assert_eq!(
        sample.device.memory,
        MemoryPool::Separate {
            total_bytes: 24 << 30
        }
    );
    assert_eq!(
        (sample.device.memory_used_bytes.value, sample.dropped_values),
        (None, 1)
    );
}
