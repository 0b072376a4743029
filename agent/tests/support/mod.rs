//! Real workers for tests: the built `compass-agent` in a folder of its own.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use compass_agent::workers::{Payload, SelfCommand, WorkerSettings};
use compass_shared::ids::{InstanceId, KnobName, OperatorKind, QueryId};
use compass_shared::model::catalogue::{Fault, Runtime, StateKind, Synthetic};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::{Configuration, KnobValue};
use compass_shared::model::plan::InstanceTarget;
use compass_shared::units::Millicores;

/// Only hit when something hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn settings(folder: &Path, emulated_speed: Option<f64>) -> WorkerSettings {
    let command = SelfCommand {
        program: PathBuf::from(env!("CARGO_BIN_EXE_compass-agent")),
        leading_arguments: vec![],
    };
    WorkerSettings::new(command, folder.to_owned(), emulated_speed)
}

pub(crate) fn target(number: u64, runtime: Runtime) -> InstanceTarget {
    InstanceTarget {
        instance: InstanceId(number << 16),
        kind: OperatorKind::new("test").unwrap(),
        runtime,
        configuration: Configuration(BTreeMap::new()),
        artifact: None,
        share: Resources {
            cpu: Millicores(1000),
            memory_mib: 64,
            gpu_percent: 0,
        },
        state: StateKind::None,
    }
}

pub(crate) fn native(number: u64, name: &str, knobs: &[(&str, KnobValue)]) -> InstanceTarget {
    let mut target = target(number, Runtime::Native(name.to_owned()));
    target.configuration = Configuration(
        knobs
            .iter()
            .map(|(name, value)| (KnobName::new(*name).unwrap(), value.clone()))
            .collect(),
    );
    target
}

pub(crate) fn synthetic(number: u64, cpu_us: u64, fault: Option<Fault>) -> InstanceTarget {
    target(
        number,
        Runtime::Synthetic(Synthetic {
            cpu_us,
            spread_percent: 0,
            output_bytes: None,
            fault,
        }),
    )
}

pub(crate) fn query() -> QueryId {
    QueryId::new("q").unwrap()
}

pub(crate) fn payload(content: &str, bytes: impl Into<Bytes>) -> Payload {
    Payload {
        content: content.to_owned(),
        bytes: bytes.into(),
    }
}
