//! The camera pipeline on real workers with the committed networks: rendered frames in, an answer out, scored against the truth.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use compass_agent::workers::{Instance, Output, Payload, Purpose, Workers};
use compass_scenes::{CLASS_NAMES, Scene, SceneSettings};
use compass_shared::evaluate::decode_detections;
use compass_shared::ids::FrameId;
use compass_shared::model::catalogue::Runtime;
use compass_shared::model::pipeline::KnobValue;
use compass_shared::vision::{Counts, TrueObject, match_f1};
use support::{PATIENCE, native, payload, query, settings, target};

/// Frames per second of the rendered source.
const SOURCE_HZ: f64 = 10.0;

fn model(size: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testbed/models");
    folder.join(format!("{size}.onnx"))
}

/// Sends a frame through the operators one after another and notes what each costs; gives the detections and the answer, or
/// `None` when one of them skips it.
async fn through(
    instances: &[Arc<Instance>],
    frame: u64,
    mut data: Payload,
    cpu: &mut [Duration],
) -> Option<(Payload, Payload)> {
    let mut detections = None;
    for (instance, cpu) in instances.iter().zip(cpu) {
        let query = query();
        let done = instance.process(&query, FrameId(frame), vec![data], PATIENCE);
        let done = done.await.unwrap();
        *cpu += done.cpu;
        match done.output {
            Output::Payload(out) => data = out,
            Output::Skipped => return None,
        }
        if data.content == "detections" {
            detections = Some(data.clone());
        }
    }
    Some((detections?, data))
}

#[tokio::test]
async fn a_rendered_scene_is_answered() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let number = KnobValue::Integer;
    let prepare = [("resolution", number(320)), ("quality", number(75))];
    let detector = Runtime::Onnx {
        head: "center-detector".to_owned(),
    };
    let labels = [("labels", KnobValue::Text(CLASS_NAMES.join(",")))];
    let targets = [
        (native(1, "sampler", &[("rate", number(5))]), None),
        (native(2, "prepare", &prepare), None),
        (target(3, detector), Some(model("medium"))),
        (native(4, "tracker", &[]), None),
        (native(5, "responder", &labels), None),
    ];
    let mut instances = Vec::new();
    for (target, artifact) in &targets {
        let started = workers.start(target, artifact.as_deref(), Purpose::Live);
        instances.push(started.await.unwrap());
    }
    let scene = Scene::new(3, SceneSettings::default());
    let (mut answer_counts, mut detector_counts) = (Counts::default(), Counts::default());
    let mut cpu = vec![Duration::ZERO; instances.len()];
    let mut answered = 0;
    for frame in 0..20_u64 {
        let rendered = scene.frame(frame as f64 / SOURCE_HZ, 1.0);
        let content = format!("rgb8 {}x{}", rendered.width, rendered.height);
        let input = payload(&content, rendered.rgb);
        let Some((detections, answer)) = through(&instances, frame, input, &mut cpu).await else {
            continue;
        };
        answered += 1;
        let answer: serde_json::Value = serde_json::from_slice(&answer.bytes).unwrap();
        let boxes = serde_json::to_vec(&answer["boxes"]).unwrap();
        let truth: Vec<TrueObject> = rendered
            .truth
            .iter()
            .map(|t| TrueObject {
                class: t.class,
                x: t.x,
                y: t.y,
                w: t.w,
                h: t.h,
            })
            .collect();
        let score = |boxes: &[u8]| match_f1(&decode_detections(boxes).unwrap(), &truth, 0.5);
        answer_counts += score(&boxes);
        detector_counts += score(&detections.bytes);
    }
    assert_eq!(answered, 10);
    for (instance, cpu) in instances.iter().zip(cpu) {
        let kind = instance.target().runtime;
        eprintln!(
            "{kind:?}: {:.2} ms CPU a frame",
            cpu.as_secs_f64() * 1e3 / 10.0
        );
    }
    let (answer, detector) = (answer_counts.f1(), detector_counts.f1());
    eprintln!("F1 of the detector {detector:.2}, of the answer {answer:.2}");
    assert!(detector > 0.7, "{detector_counts:?}");
    // Tracking bridges flicker; it must not make up objects.
    assert!(
        answer > detector - 0.05,
        "{answer_counts:?} {detector_counts:?}"
    );
}

#[tokio::test]
async fn the_largest_network_fits_into_the_memory_its_catalogue_entry_states() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let head = Runtime::Onnx {
        head: "center-detector".to_owned(),
    };
    let mut detector = target(1, head);
    detector.share.memory_mib = 64;
    let model = model("large");
    let started = workers.start(&detector, Some(&model), Purpose::Live);
    let detector = started.await.unwrap();
    let frame = Scene::new(1, SceneSettings::default()).frame(0.0, 1.0);
    let picture = payload(&format!("rgb8 {}x{}", frame.width, frame.height), frame.rgb);
    let query = query();
    for number in 0..3 {
        let done = detector.process(&query, FrameId(number), vec![picture.clone()], PATIENCE);
        let done = done.await.unwrap();
        eprintln!("{:?} {:?}", done.cpu, detector.report().memory_mib);
    }
    assert_eq!(detector.status().restarts, 0);
}
