use std::sync::Mutex;
use std::time::Duration;

use super::super::supervisor::{RestartPolicy, Verdict, supervise};
use super::*;

/// A core that notes what it is told and does as it is told.
#[derive(Default)]
struct Scripted {
    seen: Arc<Mutex<Vec<(u64, String)>>>,
}

#[derive(Debug, Clone, PartialEq)]
enum Fact {
    Tick,
    Note(&'static str),
    Bulk(u64),
    Wake(Duration),
    Panic,
    Fail,
}

#[derive(Debug, Clone, PartialEq)]
enum Act {
    Done(String),
    Fail,
    WakeAt(Moment),
}

impl Role for Scripted {
    const KIND: &'static str = "scripted";
    type Input = Fact;
    type Effect = Act;

    fn handle(&mut self, now: Moment, input: Fact) -> Vec<Act> {
        let text = format!("{input:?}");
        if input != Fact::Tick || self.seen.lock().unwrap().len() > 1 {
            let at = (now.0 + 500) / 1000;
            self.seen.lock().unwrap().push((at, text.clone()));
        }
        match input {
            Fact::Panic => panic!("injected"),
            Fact::Fail => vec![Act::Fail],
            Fact::Wake(after) => vec![Act::WakeAt(now + after)],
            _ => vec![Act::Done(text)],
        }
    }

    fn tick() -> Fact {
        Fact::Tick
    }

    fn wake_at(effect: &Act) -> Option<Moment> {
        match effect {
            Act::WakeAt(moment) => Some(*moment),
            _ => None,
        }
    }

    fn weight(input: &Fact) -> Weight {
        match input {
            Fact::Bulk(_) => Weight::Bulk,
            _ => Weight::Essential,
        }
    }
}

struct Recorder {
    done: Mutex<Vec<String>>,
    gate: tokio::sync::Semaphore,
    is_gated: bool,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            done: Mutex::default(),
            gate: tokio::sync::Semaphore::new(0),
            is_gated: false,
        }
    }
}

#[async_trait]
impl Perform<Act> for Recorder {
    async fn perform(&self, effect: Act) -> Result<(), String> {
        if self.is_gated {
            self.gate.acquire().await.unwrap().forget();
        }
        match effect {
            Act::Done(text) => {
                self.done.lock().unwrap().push(text);
                Ok(())
            }
            _ => Err("the store has failed".to_owned()),
        }
    }
}

struct Rig {
    seen: Arc<Mutex<Vec<(u64, String)>>>,
    recorder: Arc<Recorder>,
    metrics: Arc<Metrics>,
    address: Addr<RoleActor<Scripted>>,
}

fn start(recorder: Recorder) -> Rig {
    let recorder = Arc::new(recorder);
    let metrics = Arc::new(Metrics::new());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let actor = RoleActor::new(Parts {
        core: Scripted { seen: seen.clone() },
        name: "test".to_owned(),
        performer: recorder.clone(),
        compute: ComputePool::new(1),
        clock: Clock::begin(),
        metrics: metrics.clone(),
        lifeline: Lifeline::detached(),
    });
    Rig {
        seen,
        recorder,
        metrics,
        address: actor.start(),
    }
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[actix::test]
async fn effects_are_performed_in_the_order_of_their_facts() {
    tokio::time::pause();
    let rig = start(Recorder::default());
    for note in ["a", "b", "c"] {
        rig.address.do_send(Tell(Fact::Note(note)));
    }
    until(|| rig.recorder.done.lock().unwrap().len() == 4).await;
    assert_eq!(
        *rig.recorder.done.lock().unwrap(),
        ["Tick", "Note(\"a\")", "Note(\"b\")", "Note(\"c\")"]
    );
}

#[actix::test]
async fn a_core_is_called_at_the_moments_it_asked_for() {
    tokio::time::pause();
    let rig = start(Recorder::default());
    let hour = Duration::from_secs(3600);
    rig.address.do_send(Tell(Fact::Wake(hour * 2)));
    rig.address.do_send(Tell(Fact::Wake(hour)));
    tokio::time::sleep(hour * 3).await;
    let seen = rig.seen.lock().unwrap();
    let ticks: Vec<u64> = seen[2..].iter().map(|(at_ms, _)| at_ms / 1000).collect();
    assert_eq!(ticks, [3600, 7200], "{seen:?}");
}

/// Field report 46: a flood neither grows without bound nor pushes out what matters.
#[actix::test]
async fn field_046_bulk_is_dropped_and_counted_while_essentials_wait_their_turn() {
    tokio::time::pause();
    let rig = start(Recorder {
        is_gated: true,
        ..Recorder::default()
    });
    for n in 0..5_000 {
        rig.address.do_send(Tell(Fact::Bulk(n)));
    }
    rig.address.do_send(Tell(Fact::Note("essential")));
    let dropped = || {
        let text = rig.metrics.text();
        text.contains("inbox_dropped_total{kind=\"scripted\"}")
    };
    until(dropped).await;
    rig.recorder.gate.add_permits(10_000);
    until(|| {
        let done = rig.recorder.done.lock().unwrap();
        done.last().is_some_and(|last| last.contains("essential"))
    })
    .await;
    let handled = rig.recorder.done.lock().unwrap().len();
    assert!(handled <= BULK_MAX + BATCH_MAX + 2, "{handled}");
}

#[actix::test]
async fn a_panic_or_a_failed_effect_ends_the_actor_so_that_a_new_one_is_built() {
    tokio::time::pause();
    for fatal in [Fact::Panic, Fact::Fail] {
        let metrics = Arc::new(Metrics::new());
        let addresses = Arc::new(Mutex::new(Vec::new()));
        let built = addresses.clone();
        let supervising = actix::spawn({
            let metrics = metrics.clone();
            async move {
                supervise(
                    "scripted",
                    "test",
                    RestartPolicy::default(),
                    &metrics.clone(),
                    async |lifeline, _| {
                        let actor = RoleActor::new(Parts {
                            core: Scripted::default(),
                            name: "test".to_owned(),
                            performer: Arc::new(Recorder::default()),
                            compute: ComputePool::new(1),
                            clock: Clock::begin(),
                            metrics: metrics.clone(),
                            lifeline,
                        });
                        built.lock().unwrap().push(actor.start());
                        Ok(())
                    },
                )
                .await
            }
        });
        until(|| addresses.lock().unwrap().len() == 1).await;
        addresses.lock().unwrap()[0].do_send(Tell(fatal));
        until(|| addresses.lock().unwrap().len() == 2).await;
        let second = addresses.lock().unwrap()[1].clone();
        assert!(second.connected());
        second.do_send(Retire);
        assert_eq!(supervising.await.unwrap(), Verdict::Finished);
    }
}
