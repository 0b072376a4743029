//! A planning role as an actor: a mailbox, an inbox of facts, the core, and timers.
//!
//! Start at [`RoleActor`]. A message only puts a fact into the inbox. While the core is free, it goes to the compute pool with the waiting
//! facts, and its effects are performed in order before it comes back; meanwhile facts gather in the inbox. So a role never blocks its
//! arbiter, its effects never overtake each other, and a slow store or pool holds the role back instead of piling up work.
//!
//! A panic of the core ends the actor; its supervisor builds a new one from the store.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use actix::prelude::*;
use async_trait::async_trait;
use compass_shared::time::Moment;

use super::supervisor::Lifeline;
use crate::clock::Clock;
use crate::compute::{ComputePool, Panicked};
use crate::metrics::{Kind, Metrics, count};

#[cfg(test)]
mod tests;

/// Facts a role handles in one go: bounds how long effects of the first wait for the last.
const BATCH_MAX: usize = 64;
/// Facts that may wait before bulk ones are dropped.
const BULK_MAX: usize = 1_024;
/// Facts that may wait at all. A role this far behind has lost its picture anyway and is built anew.
const INBOX_MAX: usize = 16_384;
/// Moments at which a role wants to be called, at most.
const WAKES_MAX: usize = 64;

/// What happens to a fact when there are too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// It may be dropped: a newer one will say as much.
    Bulk,
    /// It must be handled.
    Essential,
}

/// A state machine of the planning core, as its actor sees it.
pub trait Role: Send + 'static {
    /// Its kind, for logs and metrics.
    const KIND: &'static str;
    /// A fact.
    type Input: Send + 'static;
    /// Something to be done.
    type Effect: Send + 'static;

    /// Takes a fact and answers with what is to be done.
    fn handle(&mut self, now: Moment, input: Self::Input) -> Vec<Self::Effect>;

    /// The fact that time passes.
    fn tick() -> Self::Input;

    /// The moment this effect asks to be called at, if it is that kind of effect.
    fn wake_at(effect: &Self::Effect) -> Option<Moment>;

    /// What may happen to a fact when there are too many.
    fn weight(_input: &Self::Input) -> Weight {
        Weight::Essential
    }

    /// Whether a waiting fact says nothing any more once this newer one is there.
    fn supersedes(_newer: &Self::Input, _waiting: &Self::Input) -> bool {
        false
    }
}

/// Carries out what a role decided.
#[async_trait]
pub trait Perform<E>: Send + Sync + 'static {
    /// Carries out one effect.
    ///
    /// # Errors
    /// When the role cannot go on (say, the store has failed); it is then built anew.
    async fn perform(&self, effect: E) -> Result<(), String>;
}

/// A fact on its way to a role.
#[derive(Debug, Message)]
#[rtype(result = "()")]
pub struct Tell<I>(pub I);

/// Asks a role to end for good.
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub struct Retire;

/// What a role actor is built from.
pub struct Parts<R: Role> {
    /// The core.
    pub core: R,
    /// For logs, e.g. the query's name.
    pub name: String,
    /// Carries out its effects.
    pub performer: Arc<dyn Perform<R::Effect>>,
    /// Where the core runs.
    pub compute: ComputePool,
    /// What it is told as "now".
    pub clock: Clock,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Tells its supervisor when it is gone.
    pub lifeline: Lifeline,
}

/// See the module's head.
pub struct RoleActor<R: Role> {
    /// The core; none while it is in the pool.
    core: Option<R>,
    inbox: VecDeque<R::Input>,
    wakes: BTreeSet<Moment>,
    timer: Option<SpawnHandle>,
    name: String,
    performer: Arc<dyn Perform<R::Effect>>,
    compute: ComputePool,
    clock: Clock,
    metrics: Arc<Metrics>,
    lifeline: Lifeline,
}

impl<R: Role + Unpin> RoleActor<R>
where
    R::Input: Unpin,
{
    /// An actor that is ready to be started.
    pub fn new(parts: Parts<R>) -> Self {
        Self {
            core: Some(parts.core),
            inbox: VecDeque::new(),
            wakes: BTreeSet::new(),
            timer: None,
            name: parts.name,
            performer: parts.performer,
            compute: parts.compute,
            clock: parts.clock,
            metrics: parts.metrics,
            lifeline: parts.lifeline,
        }
    }

    fn take_in(&mut self, input: R::Input, context: &mut Context<Self>) {
        self.inbox.retain(|waiting| !R::supersedes(&input, waiting));
        if self.inbox.len() >= BULK_MAX && R::weight(&input) == Weight::Bulk {
            count(&self.metrics.inbox_dropped, R::KIND);
            return;
        }
        if self.inbox.len() >= INBOX_MAX {
            tracing::error!(
                role = R::KIND,
                name = self.name,
                "too far behind: built anew"
            );
            context.stop();
            return;
        }
        self.inbox.push_back(input);
        self.pump(context);
    }

    /// Gives the core its waiting facts, unless it is at work.
    fn pump(&mut self, context: &mut Context<Self>) {
        if self.inbox.is_empty() {
            return;
        }
        let Some(mut core) = self.core.take() else {
            return;
        };
        let size = self.inbox.len().min(BATCH_MAX);
        let facts: Vec<R::Input> = self.inbox.drain(..size).collect();
        let clock = self.clock;
        let compute = self.compute.clone();
        let performer = self.performer.clone();
        let metrics = self.metrics.clone();
        let work = async move {
            let (core, effects) = compute
                .run(move || {
                    let begun = std::time::Instant::now();
                    let mut effects = Vec::new();
                    for fact in facts {
                        effects.extend(core.handle(clock.now(), fact));
                    }
                    let kind = Kind { kind: R::KIND };
                    let took = begun.elapsed().as_secs_f64();
                    metrics.planning.get_or_create(&kind).observe(took);
                    (core, effects)
                })
                .await
                .map_err(|Panicked(reason)| format!("it panicked: {reason}"))?;
            let mut wakes = Vec::new();
            for effect in effects {
                match R::wake_at(&effect) {
                    Some(moment) => wakes.push(moment),
                    None => performer.perform(effect).await?,
                }
            }
            Ok::<_, String>((core, wakes))
        };
        let done = work.into_actor(self).map(|result, actor, context| {
            match result {
                Ok((core, wakes)) => {
                    actor.core = Some(core);
                    actor.wakes.extend(wakes);
                    actor.arm(context);
                    actor.pump(context);
                }
                Err(reason) => {
                    // The lifeline is not told that this is on purpose: the supervisor builds a new one.
                    tracing::error!(role = R::KIND, name = actor.name, reason, "role failed");
                    context.stop();
                }
            }
        });
        context.spawn(done);
    }

    /// Sets the timer to the soonest moment the core wants to be called at.
    fn arm(&mut self, context: &mut Context<Self>) {
        while self.wakes.len() > WAKES_MAX {
            // An early tick does no harm, a missed one might: forget the latest.
            self.wakes.pop_last();
        }
        if let Some(timer) = self.timer.take() {
            context.cancel_future(timer);
        }
        let Some(soonest) = self.wakes.first() else {
            return;
        };
        let pause = soonest.since(self.clock.now());
        self.timer = Some(context.run_later(pause, |actor, context| {
            actor.timer = None;
            let now = actor.clock.now();
            actor.wakes.retain(|moment| *moment > now);
            actor.take_in(R::tick(), context);
            actor.arm(context);
        }));
    }
}

impl<R: Role + Unpin> Actor for RoleActor<R>
where
    R::Input: Unpin,
{
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Context<Self>) {
        tracing::debug!(role = R::KIND, name = self.name, "started");
        self.take_in(R::tick(), context);
    }
}

impl<R: Role + Unpin> Handler<Tell<R::Input>> for RoleActor<R>
where
    R::Input: Unpin,
{
    type Result = ();

    fn handle(&mut self, message: Tell<R::Input>, context: &mut Context<Self>) {
        self.take_in(message.0, context);
    }
}

impl<R: Role + Unpin> Handler<Retire> for RoleActor<R>
where
    R::Input: Unpin,
{
    type Result = ();

    fn handle(&mut self, _: Retire, context: &mut Context<Self>) {
        self.lifeline.finish();
        context.stop();
    }
}

/// Makes an actor panic in its handler, for tests.
#[cfg(test)]
#[derive(Debug, Clone, Copy, Message)]
#[rtype(result = "()")]
pub(crate) struct Crash;

#[cfg(test)]
impl<R: Role + Unpin> Handler<Crash> for RoleActor<R>
where
    R::Input: Unpin,
{
    type Result = ();

    fn handle(&mut self, _: Crash, _: &mut Context<Self>) {
        panic!("injected");
    }
}
