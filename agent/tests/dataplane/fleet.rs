//! Data planes of several nodes and an app in one process, over real QUIC on the loopback interface, with operators that are stand-ins.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use compass_agent::artifacts::ArtifactCache;
use compass_agent::dataplane::{DataPlane, DataPlaneConfig, Operator, Tuning};
use compass_agent::trials::{SampleStore, Trials};
use compass_agent::workers::{
    Output, Payload, ProcessError, Processed, SelfCommand, WorkerSettings, Workers,
};
use compass_shared::ids::{
    Commit, Digest, FrameId, Generation, InstanceId, NodeId, OperatorId, OperatorKind, QueryId,
};
use compass_shared::model::catalogue::{Runtime, StateKind};
use compass_shared::model::cluster::Resources;
use compass_shared::model::outcome::Outcome;
use compass_shared::model::pipeline::Configuration;
use compass_shared::model::plan::{
    InstanceTarget, NodeTarget, Peer, QueryTarget, Route, RouteStep,
};
use compass_shared::wire::v1::{AgentEvent, FrameHeader, HopControl};
use compass_transport::identity::AuthoritySettings;
use compass_transport::{
    Alpn, CertificateAuthority, Deadline, Dial, Endpoint, EndpointConfig, Role, ServerTrust,
    Session, TransportError, Trust, WallClock,
};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// Only ever reached on failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A frame is given up after this long: far longer than a loaded machine needs for anything here.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub(crate) fn query() -> QueryId {
    QueryId::new("q").unwrap()
}

fn operator(name: &str) -> OperatorId {
    OperatorId::new(name).unwrap()
}

pub(crate) fn instance(operator: &str, node: &str) -> InstanceId {
    let digest = Digest::of(format!("{operator}@{node}").as_bytes());
    InstanceId(u64::from_be_bytes(
        digest.as_bytes()[..8].try_into().unwrap(),
    ))
}

/// A chain of operators: `(operator, node)`.
pub(crate) fn chain(generation: u64, placement: &[(&str, &str)]) -> Route {
    let step = |index: usize| {
        let (name, at) = placement[index];
        let neighbour = |i: usize| placement.get(i).map(|(name, _)| operator(name));
        RouteStep {
            operator: operator(name),
            node: node(at),
            instance: instance(name, at),
            inputs: index
                .checked_sub(1)
                .and_then(neighbour)
                .into_iter()
                .collect(),
            readers: neighbour(index + 1).into_iter().collect(),
        }
    };
    Route {
        generation: Generation(generation),
        steps: (0..placement.len()).map(step).collect(),
    }
}

/// Appends its name to what it reads; can be told to hold frames back.
pub(crate) struct Fake {
    name: String,
    pub(crate) runs: Mutex<BTreeMap<FrameId, u32>>,
    pub(crate) state: Mutex<Vec<u8>>,
    pub(crate) holds: watch::Sender<bool>,
    pub(crate) is_broken: AtomicBool,
    output_bytes: usize,
}

#[async_trait]
impl Operator for Fake {
    async fn process(
        &self,
        _query: &QueryId,
        frame: FrameId,
        inputs: Vec<Payload>,
        _deadline: Duration,
    ) -> Result<Processed, ProcessError> {
        *self.runs.lock().unwrap().entry(frame).or_default() += 1;
        let mut holds = self.holds.subscribe();
        let _ = holds.wait_for(|holds| !holds).await;
        if self.is_broken.load(Ordering::Relaxed) {
            return Err(ProcessError::Crashed("told to".to_owned()));
        }
        let mut bytes: Vec<u8> = inputs.iter().flat_map(|i| i.bytes.to_vec()).collect();
        bytes.truncate(bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len()));
        bytes.extend_from_slice(format!("/{}", self.name).as_bytes());
        bytes.resize(bytes.len().max(self.output_bytes), 0);
        Ok(Processed {
            output: Output::Payload(Payload {
                content: "bytes".to_owned(),
                bytes: bytes.into(),
            }),
            wall: Duration::ZERO,
            cpu: Duration::ZERO,
        })
    }

    async fn snapshot(&self, _query: &QueryId) -> Result<Vec<u8>, ProcessError> {
        Ok(self.state.lock().unwrap().clone())
    }

    async fn restore(&self, _query: &QueryId, state: Vec<u8>) -> Result<(), ProcessError> {
        *self.state.lock().unwrap() = state;
        Ok(())
    }
}

/// One node.
pub(crate) struct Node {
    pub(crate) plane: Arc<DataPlane>,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) samples: Arc<SampleStore>,
    pub(crate) events: mpsc::Receiver<AgentEvent>,
    pub(crate) operators: BTreeMap<String, Arc<Fake>>,
    pub(crate) peer: Peer,
    _accepting: JoinSet<()>,
    _folder: tempfile::TempDir,
}

pub(crate) struct Fleet {
    authority: CertificateAuthority,
    app_identity: compass_transport::Identity,
    pub(crate) nodes: BTreeMap<String, Node>,
    commit: AtomicU32,
    /// Size of what each operator puts out, at least.
    pub(crate) output_bytes: usize,
    pub(crate) deadline: Duration,
}

fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

impl Fleet {
    pub(crate) fn new(names: &[&str]) -> Self {
        Self::with_clocks(&names.iter().map(|name| (*name, 0)).collect::<Vec<_>>())
    }

    /// Nodes whose wall clocks are wrong by so many seconds.
    pub(crate) fn with_clocks(names: &[(&str, i64)]) -> Self {
        let settings = AuthoritySettings::default();
        let authority = CertificateAuthority::in_memory(WallClock::system(), settings);
        let app_identity = authority.identity(&Role::App(query())).unwrap();
        let mut fleet = Self {
            authority,
            app_identity,
            nodes: BTreeMap::new(),
            commit: AtomicU32::new(0),
            output_bytes: 0,
            deadline: DEADLINE,
        };
        for (name, offset_s) in names {
            let node = fleet.start(name, *offset_s);
            fleet.nodes.insert((*name).to_owned(), node);
        }
        fleet
    }

    fn start(&self, name: &str, offset_s: i64) -> Node {
        let clock = WallClock::system_with_offset(offset_s);
        let trust = Trust::new(self.authority.certificate().clone(), clock);
        let identity = self.authority.identity(&Role::Node(node(name))).unwrap();
        let fingerprint = identity.key().fingerprint();
        let config = EndpointConfig::new(local(), &[Alpn::Data]);
        let endpoint = Arc::new(Endpoint::bind(config, trust, Some(identity)).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let command = SelfCommand {
            program: PathBuf::from("/nonexistent"),
            leading_arguments: vec![],
        };
        let settings = WorkerSettings::new(command, folder.path().to_owned(), None);
        let samples = Arc::new(SampleStore::new(1 << 20));
        let artifacts = ArtifactCache::new(folder.path().join("artifacts"), 1 << 20).unwrap();
        let trials = Trials::new(
            node(name),
            Resources::default(),
            Arc::new(Workers::new(settings)),
            Arc::new(artifacts),
            Arc::clone(&samples),
        );
        let (sender, events) = mpsc::channel(64);
        let config = DataPlaneConfig {
            node: node(name),
            endpoint: Arc::clone(&endpoint),
            samples: Arc::clone(&samples),
            trials: Arc::new(trials),
            events: sender,
        };
        let plane = DataPlane::start_with(config, Tuning::default());
        let mut accepting = JoinSet::new();
        let (accepts, takes) = (Arc::clone(&endpoint), Arc::clone(&plane));
        accepting.spawn(async move {
            while let Some((principal, session)) = accepts.accept().await {
                takes.accept(principal, session);
            }
        });
        Node {
            peer: Peer {
                node: node(name),
                addresses: endpoint.local_addresses(),
                fingerprint,
            },
            plane,
            endpoint,
            samples,
            events,
            operators: BTreeMap::new(),
            _accepting: accepting,
            _folder: folder,
        }
    }

    /// Gives every node its target for some routes, of which `current` is the one new frames take, and starts what is missing.
    pub(crate) fn apply(&mut self, current: u64, routes: &[Route]) {
        let number = u64::from(self.commit.fetch_add(1, Ordering::Relaxed)) + 1;
        let peers: Vec<Peer> = self.nodes.values().map(|n| n.peer.clone()).collect();
        let fingerprint = self.app_identity.key().fingerprint();
        for (name, member) in &mut self.nodes {
            let here = routes
                .iter()
                .flat_map(|route| &route.steps)
                .filter(|step| step.node.as_str() == name);
            let mut instances = BTreeMap::new();
            for step in here {
                instances.insert(step.instance, step.operator.clone());
            }
            let target = NodeTarget {
                commit: Commit { term: 1, number },
                node: node(name),
                instances: instances.iter().map(|(id, op)| wanted(*id, op)).collect(),
                queries: vec![QueryTarget {
                    query: query(),
                    current: Generation(current),
                    routes: routes.to_vec(),
                    entry: node("edge"),
                    frame_deadline: self.deadline,
                    app_fingerprint: Some(fingerprint),
                }],
                peers: peers.clone(),
                standby: vec![],
            };
            member.plane.apply(&target);
            for (id, op) in instances {
                let output_bytes = self.output_bytes;
                let fake = member
                    .operators
                    .entry(op.to_string())
                    .or_insert_with(|| Arc::new(Fake::new(op.as_str(), output_bytes)));
                member.plane.instance_ready(id, Arc::<Fake>::clone(fake));
            }
        }
    }

    pub(crate) fn fake(&self, node: &str, operator: &str) -> Arc<Fake> {
        Arc::clone(&self.nodes[node].operators[operator])
    }

    /// An app with connections to these nodes.
    pub(crate) async fn app(&self, to: &[&str]) -> App {
        let app = App::new(self.app_endpoint(self.app_identity.clone()));
        for name in to {
            app.connect(&self.nodes[*name].peer, *name == "edge").await;
        }
        app
    }

    /// An endpoint of an app with some identity.
    pub(crate) fn app_endpoint(&self, identity: compass_transport::Identity) -> Endpoint {
        let trust = Trust::new(self.authority.certificate().clone(), WallClock::system());
        Endpoint::bind(EndpointConfig::new(local(), &[]), trust, Some(identity)).unwrap()
    }

    /// A fresh identity of the authority, whose key no target names.
    pub(crate) fn stranger(&self, role: &Role) -> compass_transport::Identity {
        self.authority.identity(role).unwrap()
    }
}

fn wanted(id: InstanceId, operator: &OperatorId) -> InstanceTarget {
    InstanceTarget {
        instance: id,
        kind: OperatorKind::new(operator.as_str()).unwrap(),
        runtime: Runtime::Native("pass".to_owned()),
        configuration: Configuration::default(),
        artifact: None,
        share: Resources::default(),
        state: match operator.as_str() {
            "tracker" => StateKind::Snapshot,
            _ => StateKind::None,
        },
    }
}

impl Fake {
    fn new(name: &str, output_bytes: usize) -> Self {
        Self {
            name: name.to_owned(),
            runs: Mutex::default(),
            state: Mutex::default(),
            holds: watch::Sender::new(false),
            is_broken: AtomicBool::new(false),
            output_bytes,
        }
    }

    pub(crate) fn most_runs(&self) -> u32 {
        self.runs
            .lock()
            .unwrap()
            .values()
            .copied()
            .max()
            .unwrap_or(0)
    }
}

/// What an app knows.
#[derive(Debug, Default, Clone)]
pub(crate) struct Known {
    pub(crate) credits: u32,
    pub(crate) ends: BTreeMap<u64, Outcome>,
    pub(crate) results: BTreeMap<u64, Vec<(Generation, Vec<u8>)>>,
}

pub(crate) struct App {
    endpoint: Endpoint,
    known: watch::Sender<Known>,
    entry: Mutex<Option<Arc<dyn Session>>>,
    tasks: Mutex<JoinSet<()>>,
}

impl App {
    fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            known: watch::Sender::default(),
            entry: Mutex::new(None),
            tasks: Mutex::new(JoinSet::new()),
        }
    }

    /// Opens a data connection and listens on it; tries again while the node does not know the app yet.
    pub(crate) async fn connect(&self, peer: &Peer, is_entry: bool) {
        let dial = Dial::new(Alpn::Data, Role::Node(peer.node.clone()))
            .trusting(ServerTrust::Key(peer.fingerprint));
        let session = self
            .endpoint
            .connect(&peer.addresses, &dial, Deadline::after(PATIENCE))
            .await
            .unwrap();
        if is_entry {
            *self.entry.lock().unwrap() = Some(Arc::clone(&session));
            self.known.send_modify(|known| known.credits = 0);
        }
        let known = self.known.clone();
        self.tasks
            .lock()
            .unwrap()
            .spawn(listen(session, known, is_entry));
    }

    /// Sends one frame as soon as there is credit; its number is its content.
    pub(crate) async fn send(&self, frame: u64) {
        self.send_again(frame, 0).await;
    }

    pub(crate) async fn send_again(&self, frame: u64, attempt: u16) {
        self.until(|known| known.credits > 0).await;
        self.known.send_modify(|known| known.credits -= 1);
        let body = Bytes::from(format!("f{frame}"));
        let header = FrameHeader {
            query: query(),
            generation: Generation(0),
            frame: FrameId(frame),
            from: None,
            to: None,
            age_us: 0,
            content: "bytes".to_owned(),
            attempt,
            payload_bytes: u32::try_from(body.len()).unwrap(),
        };
        let session = self.entry.lock().unwrap().clone().unwrap();
        let deadline = Deadline::after(PATIENCE);
        let mut stream = session.open_uni(deadline).await.unwrap();
        stream.write_frame(&header, deadline).await.unwrap();
        stream.write_bytes(body, deadline).await.unwrap();
        stream.finish().unwrap();
    }

    /// Sends bytes as they are on a stream of their own and leaves it open; gives how the node takes it.
    pub(crate) async fn send_raw(&self, bytes: Vec<u8>) -> TransportError {
        let session = self.entry.lock().unwrap().clone().unwrap();
        let deadline = Deadline::after(PATIENCE);
        let mut stream = session.open_uni(deadline).await.unwrap();
        stream.write_bytes(bytes.into(), deadline).await.unwrap();
        tokio::time::timeout(PATIENCE, stream.stopped())
            .await
            .unwrap()
    }

    /// Begins a frame and gives it up in the middle.
    pub(crate) async fn send_part(&self, bytes: Vec<u8>, is_finished: bool) {
        let session = self.entry.lock().unwrap().clone().unwrap();
        let deadline = Deadline::after(PATIENCE);
        let mut stream = session.open_uni(deadline).await.unwrap();
        stream.write_bytes(bytes.into(), deadline).await.unwrap();
        if is_finished {
            stream.finish().unwrap();
        }
    }

    /// Waits until the app knows something.
    pub(crate) async fn until(&self, what: impl Fn(&Known) -> bool) -> Known {
        let mut known = self.known.subscribe();
        let seen = tokio::time::timeout(PATIENCE, known.wait_for(|known| what(known))).await;
        match seen {
            Ok(seen) => seen.unwrap().clone(),
            Err(_) => panic!("waited in vain; known: {:?}", self.known.borrow()),
        }
    }

    /// Waits until these frames have ended and gives how.
    pub(crate) async fn ends(&self, frames: std::ops::Range<u64>) -> BTreeMap<u64, Outcome> {
        let wanted: BTreeSet<u64> = frames.collect();
        let known = self
            .until(|known| wanted.iter().all(|frame| known.ends.contains_key(frame)))
            .await;
        known.ends
    }

    pub(crate) fn results(&self) -> BTreeMap<u64, Vec<(Generation, Vec<u8>)>> {
        self.known.borrow().results.clone()
    }

    /// Ends every connection.
    pub(crate) async fn leave(&self) {
        self.tasks.lock().unwrap().abort_all();
        let code = compass_transport::CloseCode::DONE;
        self.endpoint.close(code, "", Deadline::after_s(1)).await;
    }
}

async fn listen(session: Arc<dyn Session>, known: watch::Sender<Known>, is_entry: bool) {
    let (mut send, mut receive) = session.take_control().unwrap();
    let mut streams = JoinSet::new();
    let (say, mut to_say) = mpsc::unbounded_channel::<HopControl>();
    loop {
        tokio::select! {
            message = receive.next_frame::<HopControl>(1 << 20, Deadline::never()) => match message {
                Ok(Some(HopControl::Credit { frames, .. })) if is_entry => {
                    known.send_modify(|known| known.credits += frames);
                }
                Ok(Some(HopControl::Ended { frame, outcome, .. })) => known.send_modify(|known| {
                    known.ends.entry(frame.0).or_insert(outcome);
                }),
                Ok(Some(HopControl::Ping(number))) => say.send(HopControl::Pong(number)).unwrap(),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            },
            stream = session.accept_uni(Deadline::never()) => {
                let Ok(mut stream) = stream else { return };
                let (known, say) = (known.clone(), say.clone());
                streams.spawn(async move {
                    let deadline = Deadline::after(PATIENCE);
                    let Ok(header) = stream.read_frame::<FrameHeader>(1 << 20, deadline).await else { return };
                    let Ok(body) = stream.read_bytes(header.payload_bytes as usize, deadline).await else { return };
                    let (query, frame) = (header.query.clone(), header.frame);
                    let _ = say.send(HopControl::Received { query: query.clone(), frame, to: None });
                    let _ = say.send(HopControl::Ended { query, frame, to: None, outcome: Outcome::Answered });
                    known.send_modify(|known| {
                        known.ends.insert(frame.0, Outcome::Answered);
                        let end = body.iter().position(|b| *b == 0).unwrap_or(body.len());
                        known.results.entry(frame.0).or_default().push((header.generation, body[..end].to_vec()));
                    });
                });
            }
            Some(message) = to_say.recv() => {
                if send.write_frame(&message, Deadline::after(PATIENCE)).await.is_err() {
                    return;
                }
            }
        }
    }
}
