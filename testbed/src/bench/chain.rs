//! Two nodes' data planes and an app, as the agents run them: real sessions over loopback, each node on a runtime of its own.
//!
//! They live in this process, so that one clock sees both ends of a hop; between the nodes nothing is shared but that clock. The operators
//! are stand-ins that take no time: the first puts out as many bytes as it is asked for and notes when it has, the second notes when they
//! have come. What lies between is the hop: both data planes, the transport and the network.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use async_trait::async_trait;
use bytes::Bytes;
use compass_agent::artifacts::ArtifactCache;
use compass_agent::dataplane::{DataPlane, DataPlaneConfig, Operator};
use compass_agent::trials::{SampleStore, Trials};
use compass_agent::workers::{
    Output, Payload, ProcessError, Processed, SelfCommand, WorkerSettings, Workers,
};
use compass_shared::ids::{
    Commit, FrameId, Generation, InstanceId, NodeId, OperatorId, OperatorKind, QueryId,
};
use compass_shared::model::catalogue::{Runtime as OperatorRuntime, StateKind};
use compass_shared::model::cluster::Resources;
use compass_shared::model::pipeline::Configuration;
use compass_shared::model::plan::{
    InstanceTarget, NodeTarget, Peer, QueryTarget, Route, RouteStep,
};
use compass_shared::wire::v1::{FrameHeader, HopControl};
use compass_transport::identity::AuthoritySettings;
use compass_transport::{
    Alpn, CertificateAuthority, Deadline, Dial, Endpoint, EndpointConfig, Identity, Role,
    SendStream, ServerTrust, Session, Trust, WallClock,
};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use super::node_runtime;

/// Only met when something is broken.
const PATIENCE: Duration = Duration::from_secs(30);
const QUERY: &str = "bench";
const MESSAGE_BYTES_MAX: usize = 1 << 20;
/// First operator's instance; the second's is the next number.
const FIRST: u64 = 1 << 16;
const NAMES: [&str; 2] = ["first", "second"];

/// When each frame was put out by the first operator and reached the second.
#[derive(Debug, Default)]
struct Marks {
    put_out: BTreeMap<FrameId, Instant>,
    hops: BTreeMap<FrameId, Duration>,
}

struct StandIn {
    is_first: bool,
    pause: Duration,
    marks: Arc<Mutex<Marks>>,
}

#[async_trait]
impl Operator for StandIn {
    async fn process(
        &self,
        _query: &QueryId,
        frame: FrameId,
        inputs: Vec<Payload>,
        _deadline: Duration,
    ) -> Result<Processed, ProcessError> {
        let now = Instant::now();
        if self.is_first && !self.pause.is_zero() {
            tokio::time::sleep(self.pause).await;
        }
        let bytes = if self.is_first {
            // The app asks for a size in words.
            let asked = inputs
                .first()
                .and_then(|input| std::str::from_utf8(&input.bytes).ok()?.parse().ok());
            let size = asked.ok_or_else(|| ProcessError::BadInput("not a size".to_owned()))?;
            Bytes::from(vec![7; size])
        } else {
            Bytes::from_static(b"done")
        };
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_first {
            marks.put_out.insert(frame, Instant::now());
        } else if let Some(began) = marks.put_out.remove(&frame) {
            marks
                .hops
                .insert(frame, now.saturating_duration_since(began));
        }
        Ok(Processed {
            output: Output::Payload(Payload {
                content: "bytes".to_owned(),
                bytes,
            }),
            wall: Duration::ZERO,
            cpu: Duration::ZERO,
        })
    }

    async fn snapshot(&self, _query: &QueryId) -> Result<Vec<u8>, ProcessError> {
        Ok(Vec::new())
    }

    async fn restore(&self, _query: &QueryId, _state: Vec<u8>) -> Result<(), ProcessError> {
        Ok(())
    }
}

struct Node {
    plane: Arc<DataPlane>,
    peer: Peer,
    runtime: Runtime,
}

/// See the module's head.
pub(super) struct Chain {
    nodes: Vec<Node>,
    marks: Arc<Mutex<Marks>>,
    app: Runtime,
    entry: Arc<dyn Session>,
    news: mpsc::UnboundedReceiver<News>,
    credits: u32,
    next: FrameId,
    _endpoint: Endpoint,
}

/// What the app hears.
enum News {
    Credit(u32),
    Result(FrameId),
    /// How a frame ended without a result, or a connection.
    Bad(String),
}

impl Chain {
    /// Each frame rests for `pause` at the first operator, before its output counts as put out.
    pub(super) fn start(folder: &Path, pause: Duration) -> anyhow::Result<Self> {
        let authority =
            CertificateAuthority::in_memory(WallClock::system(), AuthoritySettings::default());
        let query = QueryId::new(QUERY)?;
        let app_identity = authority.identity(&Role::App(query))?;
        let nodes: Vec<Node> = NAMES
            .iter()
            .map(|name| start_node(name, &authority, folder))
            .collect::<anyhow::Result<_>>()?;
        let marks = Arc::default();
        apply(&nodes, &app_identity, pause, &marks)?;

        let app = node_runtime("app")?;
        let (tell, news) = mpsc::unbounded_channel();
        let (endpoint, entry) = app.block_on(connect(&nodes, &authority, app_identity, &tell))?;
        Ok(Self {
            nodes,
            marks,
            app,
            entry,
            news,
            credits: 0,
            next: FrameId(1),
            _endpoint: endpoint,
        })
    }

    /// Sends one frame through both operators and gives what the hop between them took, with this payload.
    pub(super) fn hop(&mut self, payload_bytes: usize) -> anyhow::Result<Duration> {
        while self.credits == 0 {
            self.hear()?;
        }
        self.credits -= 1;
        let frame = self.next;
        self.next = frame.next();
        let sent = self
            .app
            .spawn(send(Arc::clone(&self.entry), frame, payload_bytes));
        self.app.block_on(sent)??;
        while self.hear()? != Some(frame) {}
        let mut marks = self.marks.lock().unwrap_or_else(PoisonError::into_inner);
        let hop = marks.hops.remove(&frame);
        hop.with_context(|| format!("frame {frame} did not pass the hop"))
    }

    /// Takes one piece of news; gives the frame whose result it is.
    fn hear(&mut self) -> anyhow::Result<Option<FrameId>> {
        let Self { news, app, .. } = self;
        let heard = app.block_on(async { tokio::time::timeout(PATIENCE, news.recv()).await });
        match heard.context("nothing was heard of a frame")? {
            Some(News::Credit(more)) => self.credits += more,
            Some(News::Result(frame)) => return Ok(Some(frame)),
            Some(News::Bad(what)) => bail!("{what}"),
            None => bail!("all connections have ended"),
        }
        Ok(None)
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // Within a runtime: sessions close as they go.
        let _within = self.app.enter();
        for node in self.nodes.drain(..) {
            drop(node.plane);
            node.runtime.shutdown_background();
        }
    }
}

fn start_node(name: &str, authority: &CertificateAuthority, folder: &Path) -> anyhow::Result<Node> {
    let id = NodeId::new(name)?;
    let runtime = node_runtime(name)?;
    let within = runtime.enter();
    let trust = Trust::new(authority.certificate().clone(), WallClock::system());
    let identity = authority.identity(&Role::Node(id.clone()))?;
    let fingerprint = identity.key().fingerprint();
    let config = EndpointConfig::new(local(), &[Alpn::Data]);
    let endpoint = Arc::new(Endpoint::bind(config, trust, Some(identity))?);
    let samples = Arc::new(SampleStore::new(1 << 20));
    // There are no trials here, so no workers either.
    let command = SelfCommand {
        program: PathBuf::from("/nonexistent"),
        leading_arguments: vec![],
    };
    let workers = Workers::new(WorkerSettings::new(command, folder.join(name), None));
    let artifacts = ArtifactCache::new(folder.join(name).join("artifacts"), 1 << 20)?;
    let trials = Trials::new(
        id.clone(),
        Resources::default(),
        Arc::new(workers),
        Arc::new(artifacts),
        Arc::clone(&samples),
    );
    let (events, mut unread) = mpsc::channel(64);
    tokio::spawn(async move { while unread.recv().await.is_some() {} });
    let plane = DataPlane::start(DataPlaneConfig {
        node: id.clone(),
        endpoint: Arc::clone(&endpoint),
        samples,
        trials: Arc::new(trials),
        events,
    });
    let (accepts, takes) = (Arc::clone(&endpoint), Arc::clone(&plane));
    tokio::spawn(async move {
        while let Some((principal, session)) = accepts.accept().await {
            takes.accept(principal, session);
        }
    });
    let peer = Peer {
        node: id,
        addresses: endpoint.local_addresses(),
        fingerprint,
    };
    drop(within);
    Ok(Node {
        plane,
        peer,
        runtime,
    })
}

/// Gives every node its target: the first operator on the first node, the second on the second.
fn apply(
    nodes: &[Node],
    app: &Identity,
    pause: Duration,
    marks: &Arc<Mutex<Marks>>,
) -> anyhow::Result<()> {
    let operators: Vec<OperatorId> = NAMES
        .iter()
        .map(|name| OperatorId::new(*name))
        .collect::<Result<_, _>>()?;
    let step = |index: usize| RouteStep {
        operator: operators[index].clone(),
        node: nodes[index].peer.node.clone(),
        instance: instance(index),
        inputs: operators[..index].to_vec(),
        readers: operators[index + 1..].to_vec(),
    };
    let route = Route {
        generation: Generation(1),
        steps: (0..nodes.len()).map(step).collect(),
    };
    let peers: Vec<Peer> = nodes.iter().map(|node| node.peer.clone()).collect();
    for (index, node) in nodes.iter().enumerate() {
        let target = NodeTarget {
            commit: Commit { term: 1, number: 1 },
            node: node.peer.node.clone(),
            instances: vec![InstanceTarget {
                instance: instance(index),
                kind: OperatorKind::new(NAMES[index])?,
                runtime: OperatorRuntime::Native("stand-in".to_owned()),
                configuration: Configuration::default(),
                artifact: None,
                share: Resources::default(),
                state: StateKind::None,
            }],
            queries: vec![QueryTarget {
                query: QueryId::new(QUERY)?,
                current: Generation(1),
                routes: vec![route.clone()],
                entry: nodes[0].peer.node.clone(),
                frame_deadline: PATIENCE,
                app_fingerprint: Some(app.key().fingerprint()),
            }],
            peers: peers.clone(),
            standby: vec![],
        };
        node.plane.apply(&target);
        let operator = StandIn {
            is_first: index == 0,
            pause,
            marks: Arc::clone(marks),
        };
        node.plane
            .instance_ready(instance(index), Arc::new(operator));
    }
    Ok(())
}

fn instance(index: usize) -> InstanceId {
    InstanceId(FIRST + index as u64)
}

fn local() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Connects the app to every node, as `compass-client` does; gives the session with the entry.
async fn connect(
    nodes: &[Node],
    authority: &CertificateAuthority,
    identity: Identity,
    tell: &mpsc::UnboundedSender<News>,
) -> anyhow::Result<(Endpoint, Arc<dyn Session>)> {
    let trust = Trust::new(authority.certificate().clone(), WallClock::system());
    let endpoint = Endpoint::bind(EndpointConfig::new(local(), &[]), trust, Some(identity))?;
    let mut entry = None;
    for node in nodes {
        let dial = Dial::new(Alpn::Data, Role::Node(node.peer.node.clone()))
            .trusting(ServerTrust::Key(node.peer.fingerprint));
        let session = endpoint
            .connect(&node.peer.addresses, &dial, Deadline::after(PATIENCE))
            .await?;
        let is_entry = entry.is_none();
        entry.get_or_insert_with(|| Arc::clone(&session));
        let tell = tell.clone();
        tokio::spawn(async move {
            if let Err(error) = listen(session, is_entry, &tell).await {
                // Nobody listens any more at the end of the bench.
                let _ = tell.send(News::Bad(format!("{error:#}")));
            }
        });
    }
    Ok((endpoint, entry.context("there is a node")?))
}

async fn send(entry: Arc<dyn Session>, frame: FrameId, size: usize) -> anyhow::Result<()> {
    let payload = Bytes::from(size.to_string());
    let header = FrameHeader {
        query: QueryId::new(QUERY)?,
        generation: Generation(0),
        frame,
        from: None,
        to: None,
        age_us: 0,
        content: "bytes".to_owned(),
        attempt: 0,
        payload_bytes: payload.len() as u32,
    };
    let deadline = Deadline::after(PATIENCE);
    let mut stream = entry.open_uni(deadline).await?;
    stream.write_frame(&header, deadline).await?;
    stream.write_bytes(payload, deadline).await?;
    Ok(stream.finish()?)
}

/// The app's side of one connection.
async fn listen(
    session: Arc<dyn Session>,
    is_entry: bool,
    tell: &mpsc::UnboundedSender<News>,
) -> anyhow::Result<()> {
    let (mut say, mut hear) = session.take_control().context("control is taken once")?;
    loop {
        tokio::select! {
            message = hear.next_frame::<HopControl>(MESSAGE_BYTES_MAX, Deadline::never()) => {
                let news = match message?.context("the control stream has ended")? {
                    HopControl::Credit { frames, .. } if is_entry => News::Credit(frames),
                    HopControl::Ended { frame, outcome, .. } if outcome.is_miss() => {
                        News::Bad(format!("frame {frame} ended as {outcome:?}"))
                    }
                    HopControl::Ping(number) => {
                        say.write_frame(&HopControl::Pong(number), Deadline::after(PATIENCE)).await?;
                        continue;
                    }
                    _ => continue,
                };
                tell.send(news)?;
            }
            stream = session.accept_uni(Deadline::never()) => {
                let frame = take_result(stream?, &mut say).await?;
                tell.send(News::Result(frame))?;
            }
        }
    }
}

async fn take_result(
    mut stream: compass_transport::RecvStream,
    say: &mut SendStream,
) -> anyhow::Result<FrameId> {
    let deadline = Deadline::after(PATIENCE);
    let header: FrameHeader = stream.read_frame(MESSAGE_BYTES_MAX, deadline).await?;
    stream
        .read_bytes(header.payload_bytes as usize, deadline)
        .await?;
    let FrameHeader { query, frame, .. } = header;
    let received = HopControl::Received {
        query: query.clone(),
        frame,
        to: None,
    };
    say.write_frame(&received, deadline).await?;
    let ended = HopControl::Ended {
        query,
        frame,
        to: None,
        outcome: compass_shared::model::outcome::Outcome::Answered,
    };
    say.write_frame(&ended, deadline).await?;
    Ok(frame)
}
