//! A catalogue, a query and a fleet like the demo's, and a synthetic truth of what operators do on it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::{
    ArtifactName, Digest, InstanceId, KnobName, NodeId, OperatorId, OperatorKind, PipelineName,
    QueryId, SiteId,
};
use compass_shared::model::catalogue::{
    ArtifactChoice, Catalogue, CatalogueEntry, Evaluator, Runtime, StateKind,
};
use compass_shared::model::cluster::{
    Cluster, Link, Node, NodeDescription, PriceSheet, Resources, Scheduling, Tier,
};
use compass_shared::model::pipeline::{
    Configuration, Knob, KnobValue, Operator, Pipeline, PipelineConfiguration,
};
use compass_shared::model::query::{CostSlo, LatencySlo, Query, Slo, Stability, Workload};
use compass_shared::units::{Bandwidth, Millicores, Rate};
use compass_shared::wire::v1::{InstanceState, InstanceStatus};

use crate::profile::{ClassTimes, Moments, QueryProfile, Truth, class_of};
use crate::space::Space;

pub(crate) fn node_id(text: &str) -> NodeId {
    NodeId::new(text).unwrap()
}

pub(crate) fn operator_id(text: &str) -> OperatorId {
    OperatorId::new(text).unwrap()
}

pub(crate) fn query_id(text: &str) -> QueryId {
    QueryId::new(text).unwrap()
}

fn knob(name: &str, values: Vec<KnobValue>) -> Knob {
    Knob {
        name: KnobName::new(name).unwrap(),
        values,
        ordinal: true,
    }
}

fn integers(values: &[i64]) -> Vec<KnobValue> {
    values.iter().map(|v| KnobValue::Integer(*v)).collect()
}

fn words(values: &[&str]) -> Vec<KnobValue> {
    values
        .iter()
        .map(|v| KnobValue::Text((*v).to_owned()))
        .collect()
}

/// Kinds of the live-video pipeline with their knobs.
fn kinds() -> Vec<(&'static str, Vec<Knob>)> {
    vec![
        ("sampler", vec![knob("rate", integers(&[1, 2, 5, 10]))]),
        (
            "prepare",
            vec![
                knob("resolution", integers(&[160, 224, 320, 448])),
                knob("quality", integers(&[50, 75, 90])),
            ],
        ),
        ("detector", vec![knob("model", words(&["s", "m", "l"]))]),
        ("tracker", vec![]),
        ("responder", vec![]),
    ]
}

/// What a node says of an instance.
pub(crate) fn status(instance: InstanceId, state: InstanceState) -> InstanceStatus {
    InstanceStatus {
        instance,
        state,
        pid: None,
        restarts: 0,
    }
}

pub(crate) fn catalogue() -> Arc<Catalogue> {
    let entries = kinds().into_iter().map(|(name, knobs)| {
        let kind = OperatorKind::new(name).unwrap();
        let artifacts = if name == "detector" {
            ["s", "m", "l"]
                .iter()
                .map(|size| ArtifactChoice {
                    when: [(
                        KnobName::new("model").unwrap(),
                        KnobValue::Text((*size).to_owned()),
                    )]
                    .into(),
                    name: ArtifactName::new(format!("detector-{size}")).unwrap(),
                    digest: Digest::of(size.as_bytes()),
                    bytes: 1_000_000,
                })
                .collect()
        } else {
            Vec::new()
        };
        let entry = CatalogueEntry {
            kind: kind.clone(),
            runtime: Runtime::Native(name.to_owned()),
            knobs,
            deterministic: true,
            state: StateKind::None,
            evaluator: (name == "detector").then_some(Evaluator::DetectionF1),
            memory_mib: 64,
            artifacts,
        };
        (kind, entry)
    });
    Arc::new(Catalogue(entries.collect()))
}

pub(crate) fn pipeline() -> Pipeline {
    let mut operators: Vec<Operator> = Vec::new();
    for (name, knobs) in kinds() {
        let inputs = operators.last().map(|o| o.id.clone()).into_iter().collect();
        operators.push(Operator {
            id: operator_id(name),
            kind: OperatorKind::new(name).unwrap(),
            knobs,
            inputs,
        });
    }
    Pipeline::new(PipelineName::new("live-video").unwrap(), operators).unwrap()
}

pub(crate) fn query() -> Query {
    Query {
        id: query_id("gate-camera"),
        pipeline: pipeline(),
        entry: node_id("edge-1"),
        workload: Workload::Continuous {
            rate: Rate::per_second(10.0),
        },
        slo: Slo {
            latency: Some(LatencySlo {
                percentile: 95.0,
                bound: Duration::from_millis(300),
            }),
            accuracy_min: Some(0.75),
            cost_max: Some(CostSlo::PerHour(0.12)),
        },
        constraints: vec![],
        priority: 50,
        stability: Stability {
            min_dwell: Duration::from_secs(10),
            replans_per_minute_max: 6,
        },
    }
}

/// Name, tier, site, speed of the four nodes.
const NODES: [(&str, Tier, &str, f64); 4] = [
    ("edge-1", Tier::Edge, "plant", 0.15),
    ("near-1", Tier::NearEdge, "plant", 0.4),
    ("metro-1", Tier::NearCloud, "metro", 0.7),
    ("cloud-1", Tier::Cloud, "region", 1.0),
];

pub(crate) fn description(name: &str) -> NodeDescription {
    let (_, tier, site, speed) = NODES.iter().find(|n| n.0 == name).unwrap();
    NodeDescription {
        tier: *tier,
        site: SiteId::new(*site).unwrap(),
        device_class: "box".to_owned(),
        emulated_speed: Some(*speed),
        capacity: Resources {
            cpu: Millicores(1000),
            memory_mib: 2048,
            gpu_percent: 0,
        },
        labels: BTreeMap::new(),
        advertised: vec!["127.1.0.1:7000".parse().unwrap()],
        fingerprint: Digest::of(name.as_bytes()),
    }
}

pub(crate) fn prices() -> PriceSheet {
    PriceSheet {
        version: 1,
        core_hour: [
            (Tier::Edge, 0.020),
            (Tier::NearEdge, 0.060),
            (Tier::NearCloud, 0.050),
            (Tier::Cloud, 0.040),
        ]
        .into(),
        gpu_hour: BTreeMap::new(),
        egress_gb: 0.02,
    }
}

/// Rate in Mbit/s and round trip in ms of a link when all is well.
pub(crate) fn nominal(from: &str, to: &str) -> (f64, f64) {
    let site = |name: &str| NODES.iter().find(|n| n.0 == name).unwrap().2;
    match (site(from), site(to)) {
        (a, b) if a == b => (200.0, 2.0),
        ("metro", "region") | ("region", "metro") => (500.0, 20.0),
        (a, b) if a == "metro" || b == "metro" => (6.0, 16.0),
        _ => (6.0, 40.0),
    }
}

pub(crate) fn cluster() -> Cluster {
    let mut links = BTreeMap::new();
    for (a, ..) in NODES {
        for (b, ..) in NODES {
            if a != b {
                let (mbit_s, rtt_ms) = nominal(a, b);
                let link = Link {
                    bandwidth: Bandwidth::from_mbit_s(mbit_s),
                    lower_bound: false,
                    rtt_ms,
                    loss: 0.0,
                };
                links.insert((node_id(a), node_id(b)), link);
            }
        }
    }
    Cluster {
        nodes: NODES
            .iter()
            .map(|(name, ..)| {
                let node = Node {
                    description: description(name),
                    online: true,
                    scheduling: Scheduling::Open,
                };
                (node_id(name), node)
            })
            .collect(),
        links,
        prices: prices(),
    }
}

pub(crate) const FRAME_BYTES: f64 = 921_600.0;

/// Milliseconds on a core of the host's speed.
pub(crate) fn work_ms(kind: &str, configuration: &PipelineConfiguration) -> f64 {
    let area = (resolution(configuration) / 320.0).powi(2);
    match kind {
        "sampler" => 0.2,
        "prepare" => 1.0 + 2.0 * area,
        "detector" => {
            area * match model(configuration) {
                "s" => 2.0,
                "m" => 6.0,
                _ => 16.0,
            }
        }
        "tracker" => 0.4,
        _ => 0.2,
    }
}

pub(crate) fn bytes_out(kind: &str, configuration: &PipelineConfiguration) -> f64 {
    match kind {
        "sampler" => FRAME_BYTES,
        "prepare" => {
            let quality = configuration
                .of(&operator_id("prepare"))
                .and_then(|c| c.integer("quality"))
                .unwrap_or(75) as f64;
            9000.0 * (resolution(configuration) / 320.0).powi(2) * quality / 75.0
        }
        "detector" => 700.0,
        "tracker" => 900.0,
        _ => 300.0,
    }
}

fn resolution(configuration: &PipelineConfiguration) -> f64 {
    configuration
        .of(&operator_id("prepare"))
        .and_then(|c| c.integer("resolution"))
        .unwrap_or(320) as f64
}

fn model(configuration: &PipelineConfiguration) -> &str {
    configuration
        .of(&operator_id("detector"))
        .and_then(|c| c.text("model"))
        .unwrap_or("m")
}

/// Share of objects found, by configuration and light (1 = day, 0 = dark).
pub(crate) fn recall(configuration: &PipelineConfiguration, light: f64) -> f64 {
    let quality = configuration
        .of(&operator_id("prepare"))
        .and_then(|c| c.integer("quality"))
        .unwrap_or(75) as f64;
    let size = match model(configuration) {
        "s" => 0.80,
        "m" => 0.92,
        _ => 0.98,
    };
    let sharp = 1.0 - 0.25 * (448.0 / resolution(configuration)).log2().max(0.0);
    let dark = match model(configuration) {
        "s" => 0.45,
        "m" => 0.72,
        _ => 0.85,
    };
    let clean = 1.0 - 0.05 * (90.0 - quality) / 40.0;
    (size * sharp * clean * (light + (1.0 - light) * dark)).clamp(0.0, 1.0)
}

/// A profile in which the given normalised configurations were measured on the cloud node, with this light.
pub(crate) fn profile(configurations: &[PipelineConfiguration], light: f64) -> QueryProfile {
    let pipeline = pipeline();
    let mut profile = QueryProfile {
        input_bytes: FRAME_BYTES,
        ..QueryProfile::default()
    };
    let cloud = description("cloud-1");
    for configuration in configurations {
        for operator in &pipeline.operators {
            let own = configuration.of(&operator.id).cloned().unwrap_or_default();
            let prefix = configuration.prefix(&pipeline, &operator.id);
            let row = profile.operator_mut(&operator.id, prefix, &own);
            let mean = work_ms(operator.kind.as_str(), configuration);
            let times = ClassTimes {
                full_core_ms: Moments::of([0.95, 1.0, 1.05, 1.0].map(|f| f * mean)),
                speed: cloud.emulated_speed,
            };
            row.times.insert(class_of(&cloud), times);
            row.bytes_out = Moments::of([bytes_out(operator.kind.as_str(), configuration); 8]);
        }
        let accuracy = recall(configuration, light);
        let row = profile.configuration_mut(configuration);
        row.truth = Truth::Labels;
        // Scores around the mean; an answer one frame old is nearly as good, older ones are not.
        row.scores = (0..8)
            .map(|lag| {
                let held = accuracy * (1.0 - 0.06 * f64::from(lag));
                Moments::of((0..120).map(move |i| held + if i % 2 == 0 { 0.03 } else { -0.03 }))
            })
            .collect();
    }
    profile
}

/// Every normalised configuration.
pub(crate) fn all_configurations() -> Vec<PipelineConfiguration> {
    let space = Space::new(&pipeline(), &catalogue()).unwrap();
    space
        .points()
        .iter()
        .map(|p| space.configuration(p))
        .collect()
}

/// A normalised configuration by its values.
pub(crate) fn configuration(resolution: i64, quality: i64, model: &str) -> PipelineConfiguration {
    let mut all = pipeline().golden();
    let name = |text: &str| KnobName::new(text).unwrap();
    all.0.insert(
        operator_id("prepare"),
        Configuration(
            [
                (name("resolution"), KnobValue::Integer(resolution)),
                (name("quality"), KnobValue::Integer(quality)),
            ]
            .into(),
        ),
    );
    all.0.insert(
        operator_id("detector"),
        Configuration([(name("model"), KnobValue::Text(model.to_owned()))].into()),
    );
    all
}
