//! Workers as real processes: they work, they misbehave, and nobody else notices.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use compass_agent::limits::CpuLimiter;
use compass_agent::telemetry::Root;
use compass_agent::workers::{
    Instance, Output, ProcessError, Processed, Purpose, WorkerError, WorkerEvent, WorkerEventKind,
    Workers,
};
use compass_shared::ids::FrameId;
use compass_shared::model::catalogue::{Fault, Runtime};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::KnobValue;
use compass_shared::units::Millicores;
use compass_shared::wire::v1::InstanceState;
use support::{PATIENCE, native, payload, query, settings, synthetic, target};
use tokio::sync::broadcast;

async fn frame(instance: &Instance, number: u64) -> Result<Processed, ProcessError> {
    let input = payload("bytes", &b"hello"[..]);
    instance
        .process(&query(), FrameId(number), vec![input], PATIENCE)
        .await
}

async fn event(events: &mut broadcast::Receiver<WorkerEvent>) -> WorkerEventKind {
    tokio::time::timeout(PATIENCE, events.recv())
        .await
        .unwrap()
        .unwrap()
        .what
}

fn is_alive(pid: u32) -> bool {
    // A zombie still has a folder, but no memory map.
    std::fs::read_to_string(format!("/proc/{pid}/maps")).is_ok_and(|maps| !maps.is_empty())
}

#[tokio::test]
async fn frames_go_through_a_worker_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let instance = workers
        .start(&synthetic(1, 2000, None), None, Purpose::Live)
        .await
        .unwrap();
    let status = instance.status();
    assert_eq!((status.state, status.restarts), (InstanceState::Ready, 0));
    let pid = status.pid.unwrap();
    assert_ne!(pid, std::process::id());
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    assert!(
        !environment.contains("CARGO"),
        "nothing is inherited: {environment}"
    );
    assert_eq!(workers.granted_live(), instance.target().share);

    for number in 0..5 {
        let done = frame(&instance, number).await.unwrap();
        assert_eq!(
            done.output,
            Output::Payload(payload("bytes", &b"hello"[..]))
        );
        assert!(done.cpu >= Duration::from_millis(2));
        assert!(done.wall >= done.cpu);
    }
    let report = instance.report();
    assert_eq!(report.frames, 5);
    assert!(report.service_ms.unwrap().0 >= 2.0);
    assert!(report.busy_cores > 0.0 && report.memory_mib.is_some());
    assert_eq!(
        instance.report().frames,
        0,
        "a report covers the time since the last"
    );

    instance.stop().await;
    assert!(!is_alive(pid));
    assert!(matches!(
        frame(&instance, 9).await,
        Err(ProcessError::Stopped)
    ));
    drop(instance);
    assert_eq!(workers.granted_live().memory_mib, 0);
}

#[tokio::test]
async fn a_camera_frame_passes_whole_and_a_sampler_never_sees_it() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let pixels: Bytes = (0..640 * 480 * 3).map(|n: u32| (n / 7) as u8).collect();
    let picture = payload("rgb8 640x480", pixels.clone());

    let prepare = native(
        1,
        "prepare",
        &[
            ("resolution", KnobValue::Integer(320)),
            ("quality", KnobValue::Integer(80)),
        ],
    );
    let prepare = workers.start(&prepare, None, Purpose::Live).await.unwrap();
    let done = prepare
        .process(&query(), FrameId(0), vec![picture.clone()], PATIENCE)
        .await
        .unwrap();
    let Output::Payload(jpeg) = done.output else {
        panic!("a picture comes out")
    };
    assert_eq!(
        (jpeg.content.as_str(), &jpeg.bytes[..2]),
        ("jpeg", &[0xff, 0xd8][..])
    );

    let sampler = native(2, "sampler", &[("rate", KnobValue::Integer(5))]);
    let sampler = workers.start(&sampler, None, Purpose::Live).await.unwrap();
    let mut kept = Vec::new();
    for number in 0..6 {
        let done = sampler
            .process(&query(), FrameId(number), vec![picture.clone()], PATIENCE)
            .await
            .unwrap();
        if let Output::Payload(out) = done.output {
            assert_eq!(out.bytes.as_ptr(), pixels.as_ptr(), "not even copied");
            kept.push(number);
        }
    }
    assert_eq!(kept, [0, 2, 4]);
}

#[tokio::test]
async fn bad_input_is_an_error_and_the_worker_lives_on() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let instance = workers
        .start(&native(1, "prepare", &[]), None, Purpose::Live)
        .await
        .unwrap();
    let pid = instance.status().pid;
    let good = payload("rgb8 16x16", vec![9; 16 * 16 * 3]);
    for bad in [
        payload("jpeg", &b"\xff\xd8 and then nothing"[..]),
        payload("rgb8 16x16", &b"short"[..]),
        payload("tracks", &b"[]"[..]),
    ] {
        let error = instance
            .process(&query(), FrameId(1), vec![bad], PATIENCE)
            .await
            .unwrap_err();
        assert!(matches!(error, ProcessError::BadInput(_)), "{error:?}");
        instance
            .process(&query(), FrameId(2), vec![good.clone()], PATIENCE)
            .await
            .unwrap();
    }
    assert!(matches!(
        instance
            .process(&query(), FrameId(3), vec![], PATIENCE)
            .await,
        Err(ProcessError::BadInput(_))
    ));
    assert_eq!(instance.status().pid, pid);
}

#[tokio::test]
async fn what_cannot_be_started_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.onnx");
    std::fs::write(&model, b"not a model").unwrap();
    let mut workers = settings(folder.path(), None);
    workers.start_within = Duration::from_secs(30);
    let start = async |workers: &Workers, target, artifact| {
        workers
            .start(&target, artifact, Purpose::Live)
            .await
            .unwrap_err()
    };
    let all = Workers::new(workers.clone());

    let refused = start(
        &all,
        native(1, "sampler", &[("rate", KnobValue::Integer(0))]),
        None,
    )
    .await;
    assert_eq!(
        refused,
        WorkerError::Refused("knob rate must be 1 to 1000, not 0".to_owned())
    );
    let detector = target(
        2,
        Runtime::Onnx {
            head: "center-detector".to_owned(),
        },
    );
    let corrupt = start(&all, detector, Some(&*model)).await.to_string();
    assert!(corrupt.starts_with("the model cannot be used"), "{corrupt}");
    let missing = Runtime::Process {
        command: vec!["/nowhere/operator".to_owned()],
    };
    let missing = start(&all, target(3, missing), None).await;
    assert!(
        matches!(&missing, WorkerError::Crashed(words) if words.contains("/nowhere/operator")),
        "{missing:?}"
    );
    let silent = Runtime::Process {
        command: vec!["true".to_owned()],
    };
    let silent = start(&all, target(4, silent), None).await;
    assert!(
        matches!(&silent, WorkerError::Crashed(words) if words.contains("exit status 0")),
        "{silent:?}"
    );
    let chatty = Runtime::Process {
        // It reads on, so that what it said is noticed before a broken pipe is.
        command: ["sh", "-c", "echo loading the model; exec cat > /dev/null"]
            .map(str::to_owned)
            .to_vec(),
    };
    let chatty = start(&all, target(7, chatty), None).await;
    assert!(
        matches!(&chatty, WorkerError::Crashed(words) if words.contains("is no worker's message")),
        "{chatty:?}"
    );
    let mute = Runtime::Process {
        command: vec!["sleep".to_owned(), "1000".to_owned()],
    };
    workers.start_within = Duration::from_millis(200);
    let mute = start(&Workers::new(workers.clone()), target(5, mute), None).await;
    assert_eq!(mute, WorkerError::TooSlow(Duration::from_millis(200)));
    workers.self_command.program = folder.path().join("no-agent-here");
    let nothing = start(&Workers::new(workers), synthetic(6, 0, None), None).await;
    assert!(matches!(nothing, WorkerError::Spawn(_)), "{nothing:?}");
}

/// Starts an instance that misbehaves on its second frame beside a good one, and sees to it that only the bad one suffers.
async fn misbehave(fault: Fault, stall_after: Duration) -> String {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(folder.path(), None);
    settings.stall_after = stall_after;
    let workers = Workers::new(settings);
    let good = workers
        .start(&synthetic(1, 500, None), None, Purpose::Live)
        .await
        .unwrap();
    let bad = workers
        .start(&synthetic(2, 500, Some(fault)), None, Purpose::Live)
        .await
        .unwrap();
    let (good_pid, bad_pid) = (good.status().pid, bad.status().pid);
    let mut events = workers.events();
    frame(&bad, 1).await.unwrap();

    let neighbour = tokio::spawn(async move {
        for number in 0..200 {
            frame(&good, number).await.unwrap();
        }
        good.status()
    });
    let crashed = frame(&bad, 2).await.unwrap_err();
    let ProcessError::Crashed(words) = crashed else {
        panic!("{crashed:?}")
    };
    assert_eq!(
        event(&mut events).await,
        WorkerEventKind::Crashed(words.clone())
    );
    assert!(!is_alive(bad_pid.unwrap()));
    // What was queued meanwhile is served by the successor.
    frame(&bad, 3).await.unwrap();
    assert_eq!(event(&mut events).await, WorkerEventKind::Ready);
    let status = bad.status();
    assert_eq!((status.state, status.restarts), (InstanceState::Ready, 1));
    let neighbour = neighbour.await.unwrap();
    assert_eq!((neighbour.pid, neighbour.restarts), (good_pid, 0));
    words
}

#[tokio::test]
async fn an_operator_that_aborts_is_replaced() {
    let words = misbehave(Fault::AbortAt(2), PATIENCE).await;
    assert_eq!(words, "ended by signal 6: aborting as told");
}

#[tokio::test]
async fn an_operator_that_spins_is_killed_and_replaced() {
    let words = misbehave(Fault::SpinAt(2), Duration::from_millis(2500)).await;
    assert_eq!(words, "killed: it did not answer within 2.5s");
}

#[tokio::test]
async fn an_operator_that_allocates_without_end_meets_its_cap() {
    let words = misbehave(Fault::AllocateAt(2), PATIENCE).await;
    assert!(words.contains("memory allocation of"), "{words}");
}

#[tokio::test]
async fn an_operator_that_always_crashes_counts_as_failed_and_turns_frames_away() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let mut events = workers.events();
    let instance = workers
        .start(
            &synthetic(1, 0, Some(Fault::AbortAt(1))),
            None,
            Purpose::Live,
        )
        .await
        .unwrap();
    for number in 0..5 {
        assert!(matches!(
            frame(&instance, number).await,
            Err(ProcessError::Crashed(_))
        ));
    }
    while !matches!(event(&mut events).await, WorkerEventKind::Failed(_)) {}
    assert!(matches!(instance.status().state, InstanceState::Failed(_)));
    assert!(matches!(
        frame(&instance, 9).await,
        Err(ProcessError::Down(_))
    ));
    instance.stop().await;
}

#[tokio::test]
async fn an_emulated_device_takes_its_time_and_its_queue_shows() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), Some(0.1)));
    let mut slow = synthetic(1, 2000, None);
    slow.share.cpu = Millicores(500);
    let instance = workers.start(&slow, None, Purpose::Live).await.unwrap();
    let begun = Instant::now();
    // 2 ms at a tenth of the speed with half a core: 40 ms each, one after another.
    let both = tokio::join!(frame(&instance, 1), frame(&instance, 2), async {
        tokio::task::yield_now().await;
        instance.queue_age()
    });
    // Timers may be early by less than one of their steps.
    assert!(begun.elapsed() >= Duration::from_millis(79));
    for done in [both.0.unwrap(), both.1.unwrap()] {
        assert!(
            done.wall >= done.cpu.mul_f64(20.0) && done.cpu >= Duration::from_millis(2),
            "{done:?}"
        );
    }
    assert!(instance.achieved_cores().unwrap() <= 0.501);
    assert_eq!(instance.queue_age(), Duration::ZERO);
}

#[tokio::test]
async fn a_share_changes_under_an_instance_that_remembers() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), Some(0.1)));
    let instance = workers
        .start(&synthetic(1, 2000, None), None, Purpose::Live)
        .await
        .unwrap();
    let pid = instance.status().pid;
    let factor = async |number| {
        let done = frame(&instance, number).await.unwrap();
        done.wall.as_secs_f64() / done.cpu.as_secs_f64()
    };
    assert!(factor(1).await >= 9.999);
    let quarter = Resources {
        cpu: Millicores(250),
        memory_mib: 32,
        gpu_percent: 0,
    };
    instance.set_share(quarter);
    assert!(factor(2).await >= 39.999);
    assert_eq!(
        (instance.status().pid, instance.report().granted_cores),
        (pid, 0.25)
    );
    assert_eq!(
        (instance.target().share, workers.granted_live()),
        (quarter, quarter)
    );
}

#[tokio::test]
async fn a_deadline_ends_the_wait_but_not_the_worker() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), Some(0.01)));
    let instance = workers
        .start(&synthetic(1, 15_000, None), None, Purpose::Live)
        .await
        .unwrap();
    let pid = instance.status().pid;
    let soon = Duration::from_millis(800);
    let process = async |number| {
        let input = payload("bytes", &b"x"[..]);
        instance
            .process(&query(), FrameId(number), vec![input], soon)
            .await
    };
    let (served, waiting) = tokio::join!(process(1), process(2));
    assert_eq!(
        (served, waiting),
        (Err(ProcessError::Expired), Err(ProcessError::Expired))
    );
    frame(&instance, 3).await.unwrap();
    assert_eq!(instance.status().pid, pid);
    assert_eq!(
        instance.report().frames,
        2,
        "the frame whose deadline passed in the queue was never begun"
    );
}

#[tokio::test]
async fn a_tracker_keeps_identities_over_a_planned_move() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let old = workers
        .start(&native(1, "tracker", &[]), None, Purpose::Live)
        .await
        .unwrap();
    let new = workers
        .start(&native(2, "tracker", &[]), None, Purpose::Live)
        .await
        .unwrap();
    let track = async |instance: &Arc<Instance>, number: u64, x: f32| {
        let boxes = format!(r#"[{{"class":1,"score":0.9,"x":{x},"y":0.5,"w":0.1,"h":0.1}}]"#);
        let input = payload("detections", boxes.into_bytes());
        let done = instance
            .process(&query(), FrameId(number), vec![input], PATIENCE)
            .await
            .unwrap();
        let Output::Payload(out) = done.output else {
            panic!("tracks come out")
        };
        serde_json::from_slice::<serde_json::Value>(&out.bytes).unwrap()[0]["id"]
            .as_u64()
            .unwrap()
    };
    track(&old, 0, 0.9).await;
    let id = track(&old, 1, 0.1).await;
    new.restore(&query(), old.snapshot(&query()).await.unwrap())
        .await
        .unwrap();
    assert_eq!(track(&new, 2, 0.12).await, id);
    new.reset(&query()).await.unwrap();
    assert_eq!(track(&new, 3, 0.14).await, 0);
    assert!(matches!(
        new.restore(&query(), b"nonsense".to_vec()).await,
        Err(ProcessError::BadInput(_))
    ));
}

#[tokio::test]
async fn a_dropped_instance_takes_its_process_group_along() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let script = r#"sleep 1000 & echo $! > child; printf '\0\0\0\016\0\0\0\0{"is":"ready"}'; wait"#;
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let instance = workers
        .start(
            &target(1, Runtime::Process { command }),
            None,
            Purpose::Trial,
        )
        .await
        .unwrap();
    let pids = [
        instance.status().pid.unwrap(),
        std::fs::read_to_string(folder.path().join("workers/child"))
            .unwrap()
            .trim()
            .parse()
            .unwrap(),
    ];
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    assert_eq!(
        workers.granted_live().memory_mib,
        0,
        "trials are no live share"
    );
    drop(instance);
    let gone = async {
        while pids.iter().any(|pid| is_alive(*pid)) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.unwrap();
}

#[tokio::test]
async fn descriptors_left_open_in_the_agent_do_not_reach_a_worker() {
    let folder = tempfile::tempdir().unwrap();
    let secret = std::fs::File::create(folder.path().join("secret")).unwrap();
    rustix::io::fcntl_setfd(&secret, rustix::io::FdFlags::empty()).unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let instance = workers
        .start(&synthetic(1, 0, None), None, Purpose::Live)
        .await
        .unwrap();
    let pid = instance.status().pid.unwrap();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    let open: Vec<_> = open
        .flatten()
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .collect();
    assert!(
        open.len() == 3 && open.iter().all(|link| !link.ends_with("secret")),
        "{open:?}"
    );
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    assert!(
        status
            .lines()
            .any(|line| line.split_whitespace().eq(["NoNewPrivs:", "1"]))
    );
}

#[tokio::test]
async fn the_kernel_holds_a_share_where_it_can_and_the_agent_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = settings(folder.path(), None);
    settings.limiter =
        CpuLimiter::detect(&Root::default(), &format!("test-{}", std::process::id()));
    let arranged = settings.limiter.enforcement();
    eprintln!("{}", settings.limiter.summary());
    let workers = Workers::new(settings);
    let mut half = synthetic(1, 3000, None);
    half.share.cpu = Millicores(500);
    let instance = workers.start(&half, None, Purpose::Live).await.unwrap();
    assert_eq!(instance.enforcement(), arranged);
    let begun = Instant::now();
    let mut cpu = Duration::ZERO;
    for number in 0..20 {
        cpu += frame(&instance, number).await.unwrap().cpu;
    }
    // A quota may be a period ahead.
    assert!(
        begun.elapsed() + Duration::from_millis(10) >= cpu.mul_f64(1.9),
        "{:?} for {cpu:?}",
        begun.elapsed()
    );
    instance.stop().await;
}

#[tokio::test]
async fn the_python_example_works_as_documented() {
    let python = std::process::Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output();
    let Some(python) = python.ok().filter(|out| out.status.success()) else {
        eprintln!("python3 is not here: the process operator's example was not run");
        return;
    };
    let python = String::from_utf8(python.stdout).unwrap().trim().to_owned();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/process_operator.py");
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    let command = vec![python, example.to_owned()];
    let instance = workers
        .start(
            &target(1, Runtime::Process { command }),
            None,
            Purpose::Live,
        )
        .await
        .unwrap();
    let input = payload("bytes", vec![1; 300_000]);
    let done = instance
        .process(&query(), FrameId(1), vec![input], PATIENCE)
        .await
        .unwrap();
    assert_eq!(
        done.output,
        Output::Payload(payload("text", &b"300000 bytes"[..]))
    );
    assert!(done.cpu > Duration::ZERO, "measured from outside");
    assert_eq!(
        instance.snapshot(&query()).await,
        Err(ProcessError::BadInput(
            "this operator keeps no state".to_owned()
        ))
    );
    instance.reset(&query()).await.unwrap();
    instance.stop().await;
}

#[tokio::test]
async fn a_child_that_breaks_the_protocol_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Workers::new(settings(folder.path(), None));
    // Ready, then a payload of four gigabytes announced.
    let script = r#"printf '\0\0\0\016\0\0\0\0{"is":"ready"}'; head -c 50 >/dev/null; printf '\0\0\0\002\377\377\377\377{}'; sleep 1000"#;
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let instance = workers
        .start(
            &target(1, Runtime::Process { command }),
            None,
            Purpose::Live,
        )
        .await
        .unwrap();
    let crashed = frame(&instance, 1).await.unwrap_err();
    let ProcessError::Crashed(words) = crashed else {
        panic!("{crashed:?}")
    };
    assert!(
        words.contains("too large") || words.contains("without being asked"),
        "{words}"
    );
}
