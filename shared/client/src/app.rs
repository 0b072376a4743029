//! The app's handle, what it shares with its background tasks, and the events they produce.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use compass_shared::ids::{FrameId, Generation, NodeId, QueryId, SampleSetId};
use compass_shared::model::outcome::{Outcome, OutcomeCounts};
use compass_shared::model::plan::Peer;
use compass_shared::model::trigger::Trigger;
use compass_shared::time::Moment;
use compass_shared::wire::v1::AppToCoordinator;
use compass_transport::{ConnectError, Endpoint, PrivateKey, ServerTrust, TransportError};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::ledger::Ledger;
use crate::outbox::Outbox;
use crate::{control, link};

/// Events kept for an app that does not take them; beyond that the connections wait.
const EVENTS_MAX: usize = 1024;

/// Frames that may wait for room before the oldest gives way: at ten frames a second under half a second.
const WAITING_MAX: usize = 4;

/// Numbers that an app may give to frames within each millisecond of its life without meeting those of a later one.
const NUMBERS_PER_MS: u64 = 1 << 11;

/// Numbers stay below this: operators in any language can hold them, and JSON.
const NUMBERS_END: u64 = 1 << 53;

/// How to reach the fleet and what to ask of it.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The coordinator's addresses, best first.
    pub coordinator: Vec<SocketAddr>,
    /// The address everything is sent from; port 0 lets the system choose.
    pub local: SocketAddr,
    /// How to know the coordinator: by its authority's fingerprint.
    pub server_trust: ServerTrust,
    /// A bearer token of role app.
    pub token: String,
    /// The query, as people write it.
    pub query_yaml: String,
}

/// Why a query could not be registered.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No socket.
    #[error("cannot open a socket: {0}")]
    Bind(#[from] compass_transport::BindError),
    /// The coordinator cannot be reached or does not let us in.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection broke.
    #[error("the session with the coordinator broke: {0}")]
    Transport(#[from] TransportError),
    /// The coordinator said no.
    #[error("the coordinator refused the query: {0}")]
    Rejected(String),
    /// The coordinator answered something else.
    #[error("the coordinator answered out of turn")]
    OutOfTurn,
    /// The certificate cannot be used.
    #[error("the certificate received cannot be used: {0}")]
    Identity(#[from] compass_transport::identity::IdentityError),
    /// TLS cannot use it.
    #[error("the certificate received cannot be used: {0}")]
    Tls(String),
}

/// A result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Of which frame.
    pub frame: FrameId,
    /// The plan that computed it, from the first operator to the last.
    pub generation: Generation,
    /// From capture to arrival.
    pub latency: Duration,
    /// In time or late.
    pub outcome: Outcome,
    /// How to read it.
    pub content: String,
    /// It.
    pub payload: Bytes,
}

/// There is no room for a request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no room for this request now; ask again in {} ms", retry_after.as_millis())]
pub struct Refused {
    /// When there may be.
    pub retry_after: Duration,
}

/// What happens to an app.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A result arrived (in time or late).
    Result(Answer),
    /// A frame ended without a result.
    Ended {
        /// The frame.
        frame: FrameId,
        /// How.
        outcome: Outcome,
    },
    /// A request (see [`App::request`]) was refused by the fleet for want of room; it counts as rejected.
    Refused {
        /// The request.
        frame: FrameId,
        /// When to ask again.
        refused: Refused,
    },
    /// A new plan is in force.
    PlanChanged {
        /// Its generation.
        generation: Generation,
        /// Why.
        trigger: Trigger,
        /// One line.
        summary: String,
    },
    /// No plan meets the SLOs; the nearest, and the cheapest fix.
    Infeasible(String),
    /// Truth for these frames is welcome: answer with [`App::label`].
    LabelsWanted {
        /// Name it in the answer.
        set: SampleSetId,
        /// The frames.
        frames: Vec<FrameId>,
    },
    /// A connection was lost or is back; in words.
    Connection(String),
    /// The query has ended: withdrawn, or refused on reconnection; in words.
    Closed(String),
}

/// A refused request is asked again after this long while nothing is known of how long answers take.
const RETRY_UNKNOWN: Duration = Duration::from_millis(500);
const RETRY_MIN: Duration = Duration::from_millis(10);

/// What is known of an app's requests.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    /// Whether its frames are requests.
    pub(crate) are_sent: bool,
    /// What the fleet has said of those it refuses; their ends follow.
    pub(crate) refused: BTreeMap<FrameId, Duration>,
    /// How long answers take, as of late.
    answer_time: Option<Duration>,
}

impl Requests {
    pub(crate) fn answered(&mut self, took: Duration) {
        let known = self.answer_time.unwrap_or(took);
        self.answer_time = Some(known.mul_f64(0.8) + took.mul_f64(0.2));
    }

    /// As long as it takes at the present pace until one of those on their way has ended.
    fn retry_after(&self, in_flight: u64) -> Duration {
        let in_flight = u32::try_from(in_flight).unwrap_or(u32::MAX).max(1);
        let pace = self.answer_time.map(|time| time / in_flight);
        pace.unwrap_or(RETRY_UNKNOWN).max(RETRY_MIN)
    }
}

/// What changes while the app runs.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) ledger: Ledger,
    pub(crate) outbox: Outbox,
    pub(crate) next_frame: FrameId,
    pub(crate) planned: bool,
    pub(crate) requests: Requests,
    links: BTreeMap<NodeId, AbortHandle>,
}

/// What the handle and the background tasks share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) query: QueryId,
    pub(crate) endpoint: Endpoint,
    started: Instant,
    state: Mutex<State>,
    /// Something to send, or room to send it.
    pub(crate) sendable: Notify,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) to_coordinator: mpsc::Sender<AppToCoordinator>,
    /// The node where frames enter.
    pub(crate) entry: watch::Sender<NodeId>,
}

impl Shared {
    pub(crate) fn now(&self) -> Moment {
        Moment::from_duration(self.started.elapsed())
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A frame ended without a result; tells the app if that is news.
    pub(crate) async fn ended(&self, frame: FrameId, outcome: Outcome) {
        let (is_news, refused) = {
            let mut state = self.state();
            state.outbox.forget(frame);
            let refused = state.requests.refused.remove(&frame);
            (state.ledger.ended(frame, outcome), refused)
        };
        if is_news {
            let event = match refused {
                Some(retry_after) if outcome == Outcome::Rejected => Event::Refused {
                    frame,
                    refused: Refused { retry_after },
                },
                _ => Event::Ended { frame, outcome },
            };
            self.tell(event).await;
        }
    }

    /// The receiver may be gone when the app is being dropped: then nobody needs to know.
    pub(crate) async fn tell(&self, event: Event) {
        let _ = self.events.send(event).await;
    }

    /// Keeps data connections to exactly these nodes.
    pub(crate) fn keep_links(self: &Arc<Self>, peers: &[&Peer]) {
        let mut state = self.state();
        state.links.retain(|node, task| {
            let wanted = peers.iter().any(|peer| peer.node == *node) && !task.is_finished();
            if !wanted {
                task.abort();
            }
            wanted
        });
        for peer in peers {
            if !state.links.contains_key(&peer.node) {
                let task = tokio::spawn(link::run(Arc::clone(self), (*peer).clone()));
                state.links.insert(peer.node.clone(), task.abort_handle());
            }
        }
    }
}

/// A registered query.
#[derive(Debug)]
pub struct App {
    shared: Arc<Shared>,
    events: mpsc::Receiver<Event>,
    tasks: Vec<AbortHandle>,
}

impl App {
    /// Registers the query (or takes up the same query again) and starts its connections.
    ///
    /// # Errors
    /// When the coordinator cannot be reached, or refuses; a mistake in the query comes with its line.
    pub async fn register(settings: Settings) -> Result<Self, ClientError> {
        let key = PrivateKey::generate();
        let registered = control::register(&settings, &key).await?;
        let (events, event_receiver) = mpsc::channel(EVENTS_MAX);
        let (to_coordinator, outgoing) = mpsc::channel(EVENTS_MAX);
        let started = Instant::now();
        let state = State {
            ledger: Ledger::new(
                Moment(0),
                registered.latency_bound,
                registered.frame_deadline,
            ),
            outbox: Outbox::new(WAITING_MAX),
            next_frame: first_frame(SystemTime::now()),
            planned: false,
            requests: Requests::default(),
            links: BTreeMap::new(),
        };
        let shared = Arc::new(Shared {
            query: registered.query,
            endpoint: registered.endpoint,
            started,
            state: Mutex::new(state),
            sendable: Notify::new(),
            events,
            to_coordinator,
            entry: watch::Sender::new(registered.entry.node.clone()),
        });
        shared.keep_links(&[&registered.entry]);
        let talk = control::run(
            Arc::clone(&shared),
            settings,
            registered.session,
            registered.streams,
            outgoing,
        );
        let tasks = vec![
            tokio::spawn(talk).abort_handle(),
            tokio::spawn(control::measure(Arc::clone(&shared))).abort_handle(),
        ];
        Ok(Self {
            shared,
            events: event_receiver,
            tasks,
        })
    }

    /// The query's name.
    pub fn query(&self) -> &QueryId {
        &self.shared.query
    }

    /// Hands over a frame captured now; never waits. Without room the oldest waiting frame is given up as rejected.
    pub fn send(&self, content: &str, payload: impl Into<Bytes>) -> FrameId {
        let captured = self.shared.now();
        let mut state = self.shared.state();
        let frame = state.next_frame;
        state.next_frame = frame.next();
        let counted = state.planned;
        state.ledger.sent(captured, frame, counted);
        let gave_way = state.outbox.push(frame, content, payload.into());
        if let Some(oldest) = gave_way {
            let is_news = state.ledger.ended(oldest, Outcome::Rejected);
            drop(state);
            // The counts are right either way; an app that does not take its events misses only the notice.
            if is_news {
                let _ = self.shared.events.try_send(Event::Ended {
                    frame: oldest,
                    outcome: Outcome::Rejected,
                });
            }
        } else {
            drop(state);
        }
        self.shared.sendable.notify_one();
        frame
    }

    /// Hands over a request of a one-shot query; never waits. From the first one on, frames of this app are requests: one for which there is
    /// no room is refused, and none that was taken gives way to it. A refused one counts as rejected. Before the first plan requests
    /// serve profiling only, and end as rejected.
    ///
    /// # Errors
    /// [`Refused`], with the time after which to ask again; nothing was sent.
    pub fn request(&self, content: &str, payload: impl Into<Bytes>) -> Result<FrameId, Refused> {
        let captured = self.shared.now();
        let mut state = self.shared.state();
        state.requests.are_sent = true;
        let frame = state.next_frame;
        state.next_frame = frame.next();
        let counted = state.planned;
        state.ledger.sent(captured, frame, counted);
        let has_room = state.outbox.has_room();
        if has_room {
            state.outbox.push(frame, content, payload.into());
        } else {
            state.ledger.ended(frame, Outcome::Rejected);
        }
        let retry_after = state.requests.retry_after(state.ledger.in_flight());
        drop(state);
        self.shared.sendable.notify_one();
        if has_room {
            Ok(frame)
        } else {
            Err(Refused { retry_after })
        }
    }

    /// The next event; `None` after [`Event::Closed`].
    pub async fn next_event(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Gives the truth for frames asked for by [`Event::LabelsWanted`], in the evaluator's encoding.
    pub async fn label(&self, set: SampleSetId, labels: Vec<(FrameId, Vec<u8>)>) {
        let _ = self
            .shared
            .to_coordinator
            .send(AppToCoordinator::Labels { set, labels })
            .await;
    }

    /// Reports an accuracy the app measured against its own truth; goes out with the next report.
    pub fn accuracy(&self, value: f64) {
        self.shared.state().ledger.accuracy(value);
    }

    /// Counts of all frames since the first plan.
    pub fn counts(&self) -> OutcomeCounts {
        *self.shared.state().ledger.total()
    }

    /// Frames that count and have not ended yet.
    pub fn in_flight(&self) -> u64 {
        self.shared.state().ledger.in_flight()
    }

    /// Ends the query; [`Event::Closed`] confirms it.
    pub async fn withdraw(&self) {
        let _ = self
            .shared
            .to_coordinator
            .send(AppToCoordinator::Withdraw)
            .await;
    }
}

/// The number of an app's first frame, greater than any that an earlier life of it has given: nodes know duplicates, samples and labels
/// by number, and would take a new frame with an old number for the old one sent again. No latency rests on this reading of the clock.
fn first_frame(now: SystemTime) -> FrameId {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    let ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    FrameId(ms % (NUMBERS_END / NUMBERS_PER_MS) * NUMBERS_PER_MS + 1)
}

impl Drop for App {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        self.shared.keep_links(&[]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_request_is_told_to_come_when_one_of_those_on_their_way_may_have_ended() {
        let mut requests = Requests::default();
        assert_eq!(requests.retry_after(4), RETRY_UNKNOWN);
        requests.answered(Duration::from_millis(400));
        assert_eq!(requests.retry_after(4), Duration::from_millis(100));
        assert_eq!(requests.retry_after(0), Duration::from_millis(400));
        assert_eq!(requests.retry_after(1_000), RETRY_MIN);
        let text = Refused {
            retry_after: Duration::from_millis(100),
        }
        .to_string();
        assert!(text.contains("again in 100 ms"), "{text}");
    }

    #[test]
    fn an_app_that_starts_again_never_gives_a_frame_an_old_number() {
        let born = UNIX_EPOCH + Duration::from_millis(1_800_000_000_123);
        for (lived_ms, frames_per_s) in [(1, 30), (40, 1_000), (86_400_000, 60)] {
            let last = first_frame(born).0 + lived_ms * frames_per_s / 1_000;
            let again = first_frame(born + Duration::from_millis(lived_ms));
            assert!(again.0 > last, "{again} after {last}");
        }
        // For a hundred years from now.
        let far = born + Duration::from_secs(80 * 365 * 86_400);
        assert!(first_frame(far).0 < NUMBERS_END);
        assert_eq!(first_frame(UNIX_EPOCH - Duration::from_secs(1)), FrameId(1));
    }
}
