use super::*;

/// A report in which everything has a plausible value.
fn full_report() -> NodeTelemetry {
    NodeTelemetry {
        taken: Moment(5_000_000),
        host: HostTelemetry {
            cores: Reading::new(16, Source::Sysinfo),
            cpu_capacity_cores: Reading::new(4.0, Source::Cgroup),
            cpu_busy_percent: Reading::new(37.5, Source::Cgroup),
            memory_total_bytes: Reading::new(64 << 30, Source::Sysinfo),
            memory_available_bytes: Reading::new(20 << 30, Source::Sysinfo),
            disk_free_bytes: Reading::new(1 << 40, Source::Sysinfo),
        },
        devices: vec![DeviceTelemetry {
            id: "GPU-1".into(),
            name: "A100".into(),
            state: DeviceState::Ok,
            memory: MemoryPool::Separate {
                total_bytes: 80 << 30,
            },
            busy_percent: Reading::new(100.0, Source::Nvml),
            memory_used_bytes: Reading::new(10 << 30, Source::Nvml),
            power_mw: Reading::new(250_000, Source::Nvml),
            temperature_c: Reading::new(61.0, Source::Nvml),
            clock_mhz: Reading::new(1410, Source::Nvml),
            processes: Reading::new(
                vec![DeviceProcess {
                    pid: 7,
                    busy_percent: Reading::new(50.0, Source::Nvml),
                    memory_bytes: Reading::new(5 << 30, Source::Nvml),
                }],
                Source::Nvml,
            ),
            shares: vec![ShareTelemetry {
                instance: "a1b2".into(),
                granted_percent: Reading::new(50.0, Source::Measured),
                achieved_percent: Reading::none(),
                enforcement: Enforcement::BestEffort,
            }],
            coverage: vec![MetricCoverage {
                metric: "power".into(),
                samples: 4,
                with_value: 3,
            }],
        }],
        agent: ProcessTelemetry {
            pid: 42,
            resident_bytes: Reading::new(15 << 20, Source::Sysinfo),
            cpu_time_ms: Reading::new(1200, Source::Sysinfo),
            cpu_percent: Reading::new(0.3, Source::Sysinfo),
        },
        children: vec![ProcessTelemetry {
            pid: 43,
            ..ProcessTelemetry::default()
        }],
        emulation: Some(Emulation::new(0.15).unwrap()),
        notes: vec![Note {
            topic: "gpu".into(),
            is_warning: false,
            text: "driver 550".into(),
        }],
        dropped_values: 0,
    }
}

#[test]
fn a_plausible_report_passes_unchanged() {
    let mut report = full_report();
    report.sanitise();
    assert_eq!(report, full_report());
}

#[test]
fn field_007_sentinels_become_no_value_and_the_rest_is_kept() {
    for sentinel in [
        9_223_372_036_854_775_794.0,
        4_294_967_295.0,
        -1.0,
        f64::NAN,
        101.0,
        f64::INFINITY,
    ] {
        let mut report = full_report();
        report.devices[0].busy_percent = Reading::new(sentinel, Source::Nvml);
        report.sanitise();

        let mut expected = full_report();
        expected.devices[0].busy_percent = Reading {
            value: None,
            source: Source::Nvml,
        };
        expected.dropped_values = 1;
        assert_eq!(report, expected, "sentinel {sentinel}");

        report.sanitise();
        assert_eq!(
            report, expected,
            "a second pass, as at the coordinator, drops nothing more"
        );
    }
}

#[test]
fn field_007_every_figure_of_a_report_is_guarded() {
    let mut report = full_report();
    report.host.cpu_capacity_cores.value = Some(f64::NAN);
    report.host.cores.value = Some(0);
    report.host.cpu_busy_percent.value = Some(-1.0);
    report.host.memory_total_bytes.value = Some(u64::MAX);
    report.host.disk_free_bytes.value = Some(u64::MAX);
    report.devices[0].power_mw.value = Some(u64::from(u32::MAX));
    report.devices[0].temperature_c.value = Some(f64::INFINITY);
    report.devices[0].clock_mhz.value = Some(u64::from(u32::MAX));
    report.devices[0].processes.value.as_mut().unwrap()[0]
        .memory_bytes
        .value = Some(u64::MAX);
    report.devices[0].shares[0].granted_percent.value = Some(f64::NAN);
    report.agent.cpu_percent.value = Some(f64::NAN);
    report.agent.resident_bytes.value = Some(u64::MAX);
    report.sanitise();
    assert_eq!(report.dropped_values, 12);
    assert_eq!(report.host.memory_available_bytes.value, Some(20 << 30));
}

#[test]
fn field_078_a_wrapped_counter_is_unknown_and_never_free_memory() {
    let mut report = full_report();
    report.devices[0].memory_used_bytes.value = Some(18_446_744_073_707_737_660);
    report.sanitise();
    assert_eq!(report.devices[0].memory_used_bytes.value, None);
    assert_eq!(report.dropped_values, 1);

    let mut report = full_report();
    report.devices[0].memory = MemoryPool::Separate {
        total_bytes: 18_446_744_073_707_737_660,
    };
    report.sanitise();
    assert_eq!(report.devices[0].memory, MemoryPool::Unknown);
}

#[test]
fn a_flood_of_entries_is_cut_and_counted() {
    let mut report = full_report();
    report.children = vec![ProcessTelemetry::default(); PROCESSES_MAX + 3];
    report.notes[0].text = "é".repeat(TEXT_BYTES_MAX);
    report.sanitise();
    assert_eq!(report.children.len(), PROCESSES_MAX);
    assert!(report.notes[0].text.len() <= TEXT_BYTES_MAX);
    assert_eq!(report.dropped_values, 4);
}

#[test]
fn open_words_travel_as_text_and_unknown_ones_are_kept() {
    let json = serde_json::to_string(&Reading::new(1_u64, Source::Nvml)).unwrap();
    assert_eq!(json, r#"{"value":1,"source":"nvml"}"#);
    let newer: Source = serde_json::from_str(r#""rocm""#).unwrap();
    assert_eq!(newer, Source::Other("rocm".into()));
    assert_eq!(serde_json::to_string(&newer).unwrap(), r#""rocm""#);
    let state: DeviceState = serde_json::from_str(r#""throttled""#).unwrap();
    assert!(!state.is_usable());
}

#[test]
fn a_report_survives_the_wire_format() {
    let config = bincode::config::standard();
    let bytes = bincode::serde::encode_to_vec(full_report(), config).unwrap();
    let (decoded, used): (NodeTelemetry, usize) =
        bincode::serde::decode_from_slice(&bytes, config).unwrap();
    assert_eq!((decoded, used), (full_report(), bytes.len()));
}

#[test]
fn an_emulated_device_is_slower_than_its_host_and_says_so() {
    assert_eq!(Emulation::new(0.15).unwrap().to_string(), "emulated ×0.15");
    for speed in [0.0, -1.0, 1.01, f64::NAN] {
        assert!(Emulation::new(speed).is_err(), "{speed}");
    }
    let mut report = full_report();
    report.emulation = Some(Emulation { speed: f64::NAN });
    report.sanitise();
    assert_eq!((report.emulation, report.dropped_values), (None, 1));
}
