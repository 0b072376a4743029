//! Keeps actors alive: starts them from a factory, notices when one is gone, starts it again with growing pauses, and gives up loudly.
//!
//! Start at [`supervise`]. actix's own supervisor does not survive a panic and keeps old state after a stop; here every start builds a
//! new actor from the store. An actor holds a [`Lifeline`]; when it is dropped, however that came about (a panic unwinds its task, its
//! context stopped, its arbiter ended), the supervisor hears it at once.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::metrics::{Metrics, count};

/// When to start again and when to stop trying.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Pause before the first restart: short, because most faults do not repeat.
    pub pause_min: Duration,
    /// Longest pause.
    pub pause_max: Duration,
    /// More restarts than this within the window, and it is given up.
    pub restarts_max: usize,
    /// The window.
    pub window: Duration,
}

impl Default for RestartPolicy {
    /// A core actor must be back within a second; ten crashes in five minutes are not bad luck.
    fn default() -> Self {
        Self {
            pause_min: Duration::from_millis(50),
            pause_max: Duration::from_secs(10),
            restarts_max: 10,
            window: Duration::from_secs(300),
        }
    }
}

/// Held by an actor; tells its supervisor when the actor is gone.
#[derive(Debug)]
pub struct Lifeline {
    end: Option<oneshot::Sender<End>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Finished,
    Lost,
}

impl Lifeline {
    fn new() -> (Self, oneshot::Receiver<End>) {
        let (sender, receiver) = oneshot::channel();
        (Self { end: Some(sender) }, receiver)
    }

    /// One that nobody listens to, for tests.
    #[cfg(test)]
    pub(crate) fn detached() -> Self {
        Self { end: None }
    }

    /// Says that the actor ends on purpose and is not to be started again.
    pub fn finish(&mut self) {
        if let Some(end) = self.end.take() {
            let _ = end.send(End::Finished);
        }
    }
}

impl Drop for Lifeline {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            let _ = end.send(End::Lost);
        }
    }
}

/// How supervising ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The actor finished by itself.
    Finished,
    /// It kept failing and is given up; why.
    GivenUp(String),
}

/// Starts an actor of a kind and keeps it alive until it finishes or is given up.
///
/// `start` builds and starts a new one, which must hold the lifeline; it is told how many times it has been started before. An error means
/// that it could not be built; that counts as a crash.
pub async fn supervise(
    kind: &'static str,
    name: &str,
    policy: RestartPolicy,
    metrics: &Metrics,
    mut start: impl AsyncFnMut(Lifeline, usize) -> Result<(), String>,
) -> Verdict {
    let mut crashes: VecDeque<Instant> = VecDeque::new();
    let mut restarts = 0;
    loop {
        let (lifeline, end) = Lifeline::new();
        let reason = match start(lifeline, restarts).await {
            Ok(()) => match end.await {
                Ok(End::Finished) => return Verdict::Finished,
                Ok(End::Lost) | Err(_) => "it crashed".to_owned(),
            },
            Err(reason) => reason,
        };
        let now = Instant::now();
        crashes.push_back(now);
        while crashes
            .front()
            .is_some_and(|crash| now.duration_since(*crash) > policy.window)
        {
            crashes.pop_front();
        }
        if crashes.len() > policy.restarts_max {
            count(&metrics.given_up, kind);
            let verdict = format!(
                "{kind} {name} failed {} times within {:?}, last because {reason}",
                crashes.len(),
                policy.window
            );
            tracing::error!(kind, name, "{verdict}: given up");
            return Verdict::GivenUp(verdict);
        }
        restarts += 1;
        count(&metrics.restarts, kind);
        let pause = pause(&policy, crashes.len());
        tracing::error!(kind, name, restarts, reason, ?pause, "starting it again");
        tokio::time::sleep(pause).await;
    }
}

/// Doubles with each crash in the window.
fn pause(policy: &RestartPolicy, crashes: usize) -> Duration {
    let doublings = u32::try_from(crashes.saturating_sub(1)).map_or(16, |n| n.min(16));
    policy
        .pause_min
        .saturating_mul(1 << doublings)
        .min(policy.pause_max)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use actix::prelude::*;

    use super::*;

    struct Fragile {
        _lifeline: Lifeline,
    }

    impl Actor for Fragile {
        type Context = Context<Self>;
    }

    #[derive(Message)]
    #[rtype(result = "()")]
    struct Panic;

    #[derive(Message)]
    #[rtype(result = "()")]
    struct Finish;

    impl Handler<Panic> for Fragile {
        type Result = ();
        fn handle(&mut self, _: Panic, _: &mut Context<Self>) {
            panic!("injected");
        }
    }

    impl Handler<Finish> for Fragile {
        type Result = ();
        fn handle(&mut self, _: Finish, context: &mut Context<Self>) {
            self._lifeline.finish();
            context.stop();
        }
    }

    fn factory(
        addresses: Rc<RefCell<Vec<Addr<Fragile>>>>,
    ) -> impl AsyncFnMut(Lifeline, usize) -> Result<(), String> {
        async move |lifeline, _| {
            addresses.borrow_mut().push(
                Fragile {
                    _lifeline: lifeline,
                }
                .start(),
            );
            Ok(())
        }
    }

    async fn until(condition: impl Fn() -> bool) {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Field report 46: after a panic every later send to the actor fails; a new one must be there within a second.
    #[actix::test]
    async fn field_046_a_panicked_actor_is_replaced_within_a_second() {
        tokio::time::pause();
        let addresses = Rc::new(RefCell::new(Vec::new()));
        let start = factory(addresses.clone());
        actix::spawn(async move {
            let metrics = Metrics::new();
            supervise("test", "fragile", RestartPolicy::default(), &metrics, start).await
        });
        until(|| addresses.borrow().len() == 1).await;
        let first = addresses.borrow()[0].clone();
        let begun = Instant::now();
        let _ = first.send(Panic).await;
        until(|| addresses.borrow().len() == 2).await;
        assert!(begun.elapsed() < Duration::from_secs(1));
        assert!(!first.connected());
        assert!(addresses.borrow()[1].connected());
    }

    #[actix::test]
    async fn one_that_keeps_crashing_is_given_up_with_its_name() {
        tokio::time::pause();
        let metrics = Metrics::new();
        let verdict = supervise(
            "explorer",
            "lobby",
            RestartPolicy::default(),
            &metrics,
            async |lifeline, _| {
                drop(lifeline);
                Ok(())
            },
        )
        .await;
        let Verdict::GivenUp(reason) = verdict else {
            panic!("{verdict:?}");
        };
        assert!(reason.contains("explorer lobby"), "{reason}");
        let text = metrics.text();
        assert!(
            text.contains("actor_restarts_total{kind=\"explorer\"} 10"),
            "{text}"
        );
        assert!(
            text.contains("actors_given_up_total{kind=\"explorer\"} 1"),
            "{text}"
        );
    }

    #[actix::test]
    async fn crashes_far_apart_are_forgiven() {
        tokio::time::pause();
        let metrics = Metrics::new();
        let verdict = supervise(
            "test",
            "slow",
            RestartPolicy::default(),
            &metrics,
            async |mut lifeline, restarts| {
                actix::spawn(async move {
                    tokio::time::sleep(Duration::from_secs(60)).await;
                    if restarts == 30 {
                        lifeline.finish();
                    }
                });
                Ok(())
            },
        )
        .await;
        assert_eq!(verdict, Verdict::Finished);
    }

    #[actix::test]
    async fn one_that_finishes_is_not_started_again() {
        tokio::time::pause();
        let addresses = Rc::new(RefCell::new(Vec::new()));
        let start = factory(addresses.clone());
        let supervising = actix::spawn(async move {
            let metrics = Metrics::new();
            supervise("test", "fragile", RestartPolicy::default(), &metrics, start).await
        });
        until(|| addresses.borrow().len() == 1).await;
        let address = addresses.borrow()[0].clone();
        address.do_send(Finish);
        assert_eq!(supervising.await.unwrap(), Verdict::Finished);
    }
}
