//! What is watched of one node and of one query.

use std::collections::BTreeMap;
use std::sync::Arc;

use compass_shared::detect::{Breach, Descriptor, ModeChange, ModeWatch, Settling};
use compass_shared::ids::{InstanceId, NodeId};
use compass_shared::model::cluster::{NodeDescription, Scheduling};
use compass_shared::model::plan::QueryPlan;
use compass_shared::model::query::Query;
use compass_shared::time::Moment;
use compass_shared::wire::v1::{ContentReport, InstanceReport};

use crate::detect::{DetectSettings, Liveness, LoadWatch, SloWatch};

/// Descriptors of content and how much of each is a change of mode. Agents watch the same ten times as often; this is the net below.
const DESCRIPTORS: [Descriptor; 3] = [
    Descriptor {
        name: "luma mean",
        matters: 25.0,
    },
    Descriptor {
        name: "luma spread",
        matters: 20.0,
    },
    Descriptor {
        name: "chroma",
        matters: 20.0,
    },
];

/// One node.
#[derive(Debug, Clone)]
pub(super) struct NodeWatch {
    pub(super) description: NodeDescription,
    pub(super) scheduling: Scheduling,
    pub(super) liveness: Liveness,
    /// Bytes received from each neighbour when it last reported: growth says that the neighbour lives.
    pub(super) received: BTreeMap<NodeId, u64>,
    /// What it last said of its instances.
    pub(super) instances: BTreeMap<InstanceId, InstanceReport>,
    /// Instances that do not get their share.
    pub(super) starved: BTreeMap<InstanceId, Breach>,
}

impl NodeWatch {
    pub(super) const fn new(now: Moment, description: NodeDescription) -> Self {
        Self {
            description,
            scheduling: Scheduling::Open,
            liveness: Liveness::new(now),
            received: BTreeMap::new(),
            instances: BTreeMap::new(),
            starved: BTreeMap::new(),
        }
    }
}

/// One query.
#[derive(Debug, Clone)]
pub(super) struct QueryWatch {
    pub(super) query: Arc<Query>,
    pub(super) plan: Option<QueryPlan>,
    pub(super) slo: SloWatch,
    pub(super) load: LoadWatch,
    pub(super) content: ModeWatch,
    pub(super) drifted: Option<Moment>,
    pub(super) arrival_hz: Option<f64>,
}

impl QueryWatch {
    pub(super) fn new(query: Arc<Query>, settings: &DetectSettings) -> Self {
        Self {
            slo: SloWatch::new(query.slo, settings),
            load: LoadWatch::new(query.rate_hz(), settings),
            content: ModeWatch::new(DESCRIPTORS.to_vec(), Settling::default()),
            query,
            plan: None,
            drifted: None,
            arrival_hz: None,
        }
    }

    pub(super) fn switched(&mut self, now: Moment, plan: QueryPlan, settings: &DetectSettings) {
        self.slo.switched(now, settings);
        self.plan = Some(plan);
    }

    /// A described window of content; a settled change of mode, if that is what it amounts to.
    pub(super) fn content(&mut self, now: Moment, report: &ContentReport) -> Option<ModeChange> {
        if report.frames == 0 {
            return None;
        }
        self.content
            .observe(now, &[report.luma_mean, report.luma_spread, report.chroma])
    }

    /// Whether a drift reported now is news; several places may see the same one.
    pub(super) fn is_news(&mut self, now: Moment, settings: &DetectSettings) -> bool {
        let is_news = self
            .drifted
            .is_none_or(|at| now.since(at) >= settings.drift_once_within);
        if is_news {
            self.drifted = Some(now);
        }
        is_news
    }
}
