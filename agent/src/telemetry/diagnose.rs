//! Lines for people, as `join` and `check` print them: `[ok]   gpu        NVIDIA A100: …`.

use std::fmt;

use compass_shared::model::capacity::MemoryPool;
use compass_shared::model::telemetry::{
    DeviceState, DeviceTelemetry, HostTelemetry, NodeTelemetry, Reading, Source,
};

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckLevel {
    /// As it should be.
    Ok,
    /// Works, with less than it could.
    Warn,
    /// Does not work.
    Fail,
}

/// One line of a check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckLine {
    /// How it went.
    pub level: CheckLevel,
    /// What was looked at.
    pub topic: String,
    /// What was found, in one line.
    pub text: String,
}

impl CheckLine {
    /// A line.
    pub fn new(level: CheckLevel, topic: &str, text: impl Into<String>) -> Self {
        Self {
            level,
            topic: topic.to_owned(),
            text: text.into(),
        }
    }
}

impl fmt::Display for CheckLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            CheckLevel::Ok => "[ok]",
            CheckLevel::Warn => "[warn]",
            CheckLevel::Fail => "[fail]",
        };
        write!(f, "{level:<7}{:<11}{}", self.topic, self.text)
    }
}

/// What a report says about GPUs, CPU, memory and disk; one line each, and one per thing worth knowing.
pub fn diagnose(report: &NodeTelemetry) -> Vec<CheckLine> {
    let mut lines = vec![cpu_line(report), memory_line(&report.host)];
    if let Some(free_bytes) = report.host.disk_free_bytes.value {
        lines.push(CheckLine::new(
            CheckLevel::Ok,
            "disk",
            format!("{} free", mib(free_bytes)),
        ));
    }
    lines.extend(report.devices.iter().map(device_line));
    for note in &report.notes {
        let level = if note.is_warning {
            CheckLevel::Warn
        } else {
            CheckLevel::Ok
        };
        lines.push(CheckLine::new(level, &note.topic, note.text.clone()));
    }
    if let Some(emulation) = report.emulation {
        lines.push(CheckLine::new(
            CheckLevel::Ok,
            "emulation",
            format!("{emulation}: results are held back, figures are marked"),
        ));
    }
    if report.dropped_values > 0 {
        let text = format!(
            "{} figures were blank or out of range and count as unknown",
            report.dropped_values
        );
        lines.push(CheckLine::new(CheckLevel::Warn, "telemetry", text));
    }
    lines
}

fn cpu_line(report: &NodeTelemetry) -> CheckLine {
    let host = &report.host;
    match (host.cpu_capacity_cores.value, host.cores.value) {
        (Some(capacity), Some(cores)) => {
            let text = format!(
                "{capacity} of {cores} CPUs usable ({})",
                host.cpu_capacity_cores.source
            );
            CheckLine::new(CheckLevel::Ok, "cpu", text)
        }
        _ => CheckLine::new(CheckLevel::Fail, "cpu", "the number of CPUs cannot be read"),
    }
}

fn memory_line(host: &HostTelemetry) -> CheckLine {
    let Some(total_bytes) = host.memory_total_bytes.value else {
        return CheckLine::new(
            CheckLevel::Fail,
            "memory",
            "the size of the memory cannot be read",
        );
    };
    let available = host
        .memory_available_bytes
        .value
        .map_or_else(|| "unknown".to_owned(), mib);
    let text = format!(
        "{available} of {} available ({})",
        mib(total_bytes),
        host.memory_total_bytes.source
    );
    CheckLine::new(CheckLevel::Ok, "memory", text)
}

fn device_line(device: &DeviceTelemetry) -> CheckLine {
    let name = &device.name;
    match &device.state {
        DeviceState::Ok => {}
        DeviceState::Hung => {
            return CheckLine::new(
                CheckLevel::Fail,
                "gpu",
                format!("{name}: hung, the driver does not return from a call"),
            );
        }
        DeviceState::Lost => {
            return CheckLine::new(
                CheckLevel::Fail,
                "gpu",
                format!("{name}: lost, the driver says that it needs a reset"),
            );
        }
        state => {
            return CheckLine::new(
                CheckLevel::Fail,
                "gpu",
                format!("{name}: {state}, no answer"),
            );
        }
    }
    let memory = match device.memory {
        MemoryPool::Unified { .. } => "unified".to_owned(),
        MemoryPool::Separate { total_bytes } => mib(total_bytes),
        MemoryPool::Unknown => "unknown".to_owned(),
    };
    let busy = source(&device.busy_percent);
    let power = source(&device.power_mw);
    let is_whole = [busy, power].iter().all(|&source| *source == Source::Nvml)
        && matches!(device.memory, MemoryPool::Separate { .. });
    let text = format!("{name}: utilisation={busy} power={power} memory={memory}");
    if is_whole {
        CheckLine::new(CheckLevel::Ok, "gpu", text)
    } else {
        CheckLine::new(
            CheckLevel::Warn,
            "gpu",
            format!("{text}; NVML partial -> share limits best-effort"),
        )
    }
}

fn source<T>(reading: &Reading<T>) -> &Source {
    reading.effective_source()
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use compass_shared::model::telemetry::Note;

    #[test]
    fn an_orin_is_described_as_people_know_it() {
        let device = DeviceTelemetry {
            name: "Orin".into(),
            state: DeviceState::Ok,
            memory: MemoryPool::Unified {
                total_bytes: 8 << 30,
            },
            busy_percent: Reading::new(3.0, Source::Sysfs),
            power_mw: Reading::new(900, Source::Sysfs),
            ..DeviceTelemetry::default()
        };
        let line = device_line(&device).to_string();
        assert_eq!(
            line,
            "[warn] gpu        Orin: utilisation=sysfs power=sysfs memory=unified; NVML partial -> share limits best-effort"
        );
    }

    #[test]
    fn what_is_wrong_fails_and_what_is_missing_is_not_zero() {
        let report = NodeTelemetry {
            devices: vec![DeviceTelemetry {
                name: "T4".into(),
                state: DeviceState::Hung,
                ..DeviceTelemetry::default()
            }],
            notes: vec![Note {
                topic: "gpu".into(),
                is_warning: true,
                text: "no usable NVML".into(),
            }],
            ..NodeTelemetry::default()
        };
        let lines = diagnose(&report);
        let failed: Vec<&str> = lines
            .iter()
            .filter(|line| line.level == CheckLevel::Fail)
            .map(|line| line.topic.as_str())
            .collect();
        assert_eq!(failed, ["cpu", "memory", "gpu"]);
        assert!(
            lines
                .iter()
                .any(|line| line.to_string() == "[warn] gpu        no usable NVML")
        );
    }
}
