//! The hand-over of a frame from the agent to a worker and back, over the worker's standard streams.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use compass_agent::workers::{Instance, Payload, Purpose, SelfCommand, WorkerSettings, Workers};
use compass_shared::ids::{FrameId, InstanceId, OperatorKind, QueryId};
use compass_shared::model::catalogue::{Runtime as OperatorRuntime, StateKind, Synthetic};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::Configuration;
use compass_shared::model::plan::InstanceTarget;
use compass_shared::units::Millicores;
use tokio::runtime::Runtime;

use super::node_runtime;

const PATIENCE: Duration = Duration::from_secs(30);

/// Workers that give back as many bytes as they are given, on a runtime like an agent's.
pub(super) struct HandOver {
    runtime: Runtime,
    workers: Workers,
    instances: Vec<(usize, Arc<Instance>)>,
    query: QueryId,
    next: u64,
}

impl HandOver {
    /// Starts one worker per size of payload.
    pub(super) fn start(folder: &Path, sizes: &[usize]) -> anyhow::Result<Self> {
        let command = SelfCommand {
            program: std::env::current_exe()?,
            leading_arguments: vec!["role".into(), "agent".into()],
        };
        let mut over = Self {
            runtime: node_runtime("agent")?,
            workers: Workers::new(WorkerSettings::new(command, folder.to_owned(), None)),
            instances: Vec::new(),
            query: QueryId::new("bench")?,
            next: 0,
        };
        for (number, size) in sizes.iter().enumerate() {
            let target = target(number, *size)?;
            let start = over.workers.start(&target, None, Purpose::Live);
            let instance = over.runtime.block_on(start)?;
            over.instances.push((*size, instance));
        }
        Ok(over)
    }

    /// One frame there and back.
    pub(super) fn pass(&mut self, size: usize) -> anyhow::Result<Duration> {
        self.next += 1;
        let (frame, query) = (FrameId(self.next), self.query.clone());
        let found = self.instances.iter().find(|(known, _)| *known == size);
        let instance = Arc::clone(&found.context("there is a worker for each size")?.1);
        let passed = self.runtime.spawn(async move {
            let input = Payload {
                content: "bytes".to_owned(),
                bytes: Bytes::from(vec![7; size]),
            };
            let began = Instant::now();
            let done = instance
                .process(&query, frame, vec![input], PATIENCE)
                .await?;
            anyhow::Ok((began.elapsed(), done))
        });
        Ok(self.runtime.block_on(passed)??.0)
    }
}

impl Drop for HandOver {
    fn drop(&mut self) {
        for (_, instance) in self.instances.drain(..) {
            self.runtime.block_on(instance.stop());
        }
    }
}

fn target(number: usize, size: usize) -> anyhow::Result<InstanceTarget> {
    Ok(InstanceTarget {
        instance: InstanceId((number as u64 + 1) << 16),
        kind: OperatorKind::new("pass")?,
        runtime: OperatorRuntime::Synthetic(Synthetic {
            cpu_us: 0,
            spread_percent: 0,
            output_bytes: Some(u32::try_from(size)?),
            fault: None,
        }),
        configuration: Configuration::default(),
        artifact: None,
        share: Resources {
            cpu: Millicores(1000),
            memory_mib: 64,
            gpu_percent: 0,
        },
        state: StateKind::None,
    })
}
