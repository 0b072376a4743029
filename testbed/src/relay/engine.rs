//! The shell around [`Network`]: sockets, one timer, and commands, on one thread of its own.
//!
//! The thread sleeps in `epoll` until a datagram comes, a packet is due (nanosecond timeout) or a command wakes it. A
//! datagram is read, given its path by source and destination, offered to the network, and when it is due it is sent from
//! the socket of its flow. How late that was is recorded: it is the emulator's own error.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use compass_shared::seed::Seed;
use rustix::event::{Timespec, epoll};

use super::config::{RelayConfig, check_target};
use super::control::{
    Description, NodeDescription, PathDescription, RelayControl, Request, Response,
    ServiceDescription, no_node, no_path, no_pipe,
};
use super::counters::{Count, DropCause, NamedLinkCounters, RelayCounters};
use super::flows::{Flow, FlowId, FlowKey, FlowTable};
use super::lateness::Lateness;
use super::network::{Delivery, LinkId, Network, PipeId};
use super::shape::{PathShape, PipeShape, ResolvedPipe};
use super::sockets::{self, SocketBuffers};

/// The largest UDP payload and a little more.
const DATAGRAM_BYTES_MAX: usize = 64 << 10;

/// Datagrams read from one socket before deliveries that are due get their turn.
const READS_PER_TURN: usize = 64;

/// Sockets reported by one call of `epoll`; the others wait for the next.
const EVENTS_PER_TURN: usize = 64;

/// A relay. See [`Relay::start`].
#[derive(Debug)]
pub struct Relay;

impl Relay {
    /// Checks the configuration, binds every socket and starts the relay's thread. It stops with the last clone of the handle.
    pub fn start(config: RelayConfig) -> anyhow::Result<RelayHandle> {
        config.check()?;
        let pipes = resolve_pipes(&config)?;
        let (wake, woken) = UnixStream::pair()?;
        woken.set_nonblocking(true)?;
        let (commands, inbox) = mpsc::channel();
        let mut engine = Engine::new(&config, pipes, woken, inbox)?;
        let thread = std::thread::Builder::new()
            .name("relay".to_owned())
            .spawn(move || engine.run())?;
        Ok(RelayHandle {
            inner: Arc::new(Running {
                commands,
                wake,
                thread: Mutex::new(Some(thread)),
            }),
        })
    }
}

fn resolve_pipes(config: &RelayConfig) -> anyhow::Result<Vec<ResolvedPipe>> {
    let resolve = |pipe: &super::config::PipeConfig| {
        pipe.shape
            .resolve()
            .with_context(|| format!("pipe `{}`", pipe.name))
    };
    config.pipes.iter().map(resolve).collect()
}

/// A running relay; clones are the same relay.
#[derive(Debug, Clone)]
pub struct RelayHandle {
    inner: Arc<Running>,
}

#[derive(Debug)]
struct Running {
    commands: Sender<Command>,
    wake: UnixStream,
    thread: Mutex<Option<JoinHandle<anyhow::Result<()>>>>,
}

impl RelayHandle {
    /// Waits until the relay's thread ends, which it does by itself only when it fails.
    pub fn join(&self) -> anyhow::Result<()> {
        let thread = self
            .inner
            .thread
            .lock()
            .map(|mut thread| thread.take())
            .unwrap_or_default();
        thread.map_or(Ok(()), |thread| {
            thread
                .join()
                .unwrap_or_else(|_| bail!("the relay panicked"))
        })
    }
}

#[derive(Debug)]
enum Command {
    Request {
        request: Request,
        pipe: Option<ResolvedPipe>,
        answer: Sender<Response>,
    },
    Stop,
}

impl Running {
    fn send(&self, command: Command) -> anyhow::Result<()> {
        self.commands
            .send(command)
            .context("the relay has stopped")?;
        (&self.wake)
            .write_all(&[0])
            .context("the relay has stopped")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let thread = self
            .thread
            .lock()
            .map(|mut thread| thread.take())
            .unwrap_or_default();
        if self.send(Command::Stop).is_ok()
            && let Some(thread) = thread
        {
            // A panic of the thread has already been printed; a drop cannot do more.
            let _ended = thread.join();
        }
    }
}

impl RelayControl for RelayHandle {
    fn request(&self, request: Request) -> anyhow::Result<Response> {
        // A trace is read here, so that the relay's thread never waits for a disk.
        let pipe = match &request {
            Request::SetPipe { name, shape } => {
                Some(shape.resolve().with_context(|| format!("pipe `{name}`"))?)
            }
            _ => None,
        };
        let (answer, answered) = mpsc::channel();
        self.inner.send(Command::Request {
            request,
            pipe,
            answer,
        })?;
        answered.recv().context("the relay has stopped")
    }
}

/// What a packet under way carries.
#[derive(Debug)]
struct Parcel {
    flow: FlowId,
    direction: Direction,
    data: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
enum Direction {
    /// From the flow's source to the service.
    Forward,
    /// From the service to the flow's source.
    Back,
}

#[derive(Debug)]
struct Node {
    name: String,
    address: Ipv4Addr,
    relay: Ipv4Addr,
}

#[derive(Debug)]
struct Service {
    node: usize,
    name: String,
    socket: UdpSocket,
    advertised: SocketAddrV4,
    target: Option<SocketAddr>,
}

#[derive(Debug)]
struct Path {
    link: LinkId,
    pipes: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readable {
    Wake,
    Service(usize),
    Flow(FlowId),
}

#[derive(Debug)]
struct Engine {
    start: Instant,
    network: Network<Parcel>,
    nodes: Vec<Node>,
    node_at: HashMap<Ipv4Addr, usize>,
    services: Vec<Service>,
    flows: FlowTable<UdpSocket>,
    /// By source and destination node.
    paths: BTreeMap<(usize, usize), Path>,
    pipes: BTreeMap<String, (PipeId, PipeShape)>,
    granted: SocketBuffers,
    lateness: Lateness,
    /// Counters that belong to no link or pipe.
    counters: RelayCounters,
    /// Kernel drops at flow sockets that are closed by now.
    kernel_drops_before: u64,
    epoll: OwnedFd,
    woken: UnixStream,
    inbox: Receiver<Command>,
    buffer: Vec<u8>,
}

impl Engine {
    fn new(
        config: &RelayConfig,
        pipes: Vec<ResolvedPipe>,
        woken: UnixStream,
        inbox: Receiver<Command>,
    ) -> anyhow::Result<Self> {
        let mut engine = Self {
            start: Instant::now(),
            network: Network::new(Seed(config.seed).child("relay")),
            nodes: Vec::new(),
            node_at: HashMap::new(),
            services: Vec::new(),
            flows: FlowTable::new(Duration::from_secs_f64(config.flow_idle_s)),
            paths: BTreeMap::new(),
            pipes: BTreeMap::new(),
            granted: SocketBuffers::WANTED,
            lateness: Lateness::default(),
            counters: RelayCounters::default(),
            kernel_drops_before: 0,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            woken,
            inbox,
            buffer: vec![0; DATAGRAM_BYTES_MAX],
        };
        engine.watch(&engine.woken, Readable::Wake)?;
        engine.add_nodes(config)?;
        for (pipe, resolved) in config.pipes.iter().zip(pipes) {
            let id = engine.network.add_pipe(resolved.model(Duration::ZERO));
            engine.pipes.insert(pipe.name.clone(), (id, resolved.shape));
        }
        engine.add_paths(config)?;
        Ok(engine)
    }

    fn add_nodes(&mut self, config: &RelayConfig) -> anyhow::Result<()> {
        for node in &config.nodes {
            let index = self.nodes.len();
            self.nodes.push(Node {
                name: node.name.clone(),
                address: node.address,
                relay: node.relay,
            });
            self.node_at.insert(node.address, index);
            for service in &node.services {
                let socket = sockets::bind(
                    SocketAddrV4::new(node.relay, service.port),
                    &mut self.granted,
                )?;
                let advertised = local_v4(&socket)?;
                self.watch(&socket, Readable::Service(self.services.len()))?;
                let (name, target) = (service.name.clone(), service.target);
                self.services.push(Service {
                    node: index,
                    name,
                    socket,
                    advertised,
                    target,
                });
            }
        }
        Ok(())
    }

    fn add_paths(&mut self, config: &RelayConfig) -> anyhow::Result<()> {
        for path in &config.paths {
            let ends = (self.node(&path.from)?, self.node(&path.to)?);
            self.add_path(ends, path.shape, &path.pipes)?;
        }
        let Some(shape) = config.other_paths else {
            return Ok(());
        };
        for from in 0..self.nodes.len() {
            for to in 0..self.nodes.len() {
                if !self.paths.contains_key(&(from, to)) {
                    self.add_path((from, to), shape, &[])?;
                }
            }
        }
        Ok(())
    }

    fn add_path(
        &mut self,
        ends: (usize, usize),
        shape: PathShape,
        pipes: &[String],
    ) -> anyhow::Result<()> {
        let id_of = |name: &String| {
            self.pipes
                .get(name)
                .map(|pipe| pipe.0)
                .with_context(|| no_pipe(name))
        };
        let ids: Vec<PipeId> = pipes.iter().map(id_of).collect::<anyhow::Result<_>>()?;
        let name = format!("{} → {}", self.nodes[ends.0].name, self.nodes[ends.1].name);
        let link = self.network.add_link(&name, shape, ids);
        self.paths.insert(
            ends,
            Path {
                link,
                pipes: pipes.to_vec(),
            },
        );
        Ok(())
    }

    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn watch(&self, source: impl AsFd, readable: Readable) -> anyhow::Result<()> {
        epoll::add(
            &self.epoll,
            source,
            epoll::EventData::new_u64(readable.token()),
            epoll::EventFlags::IN,
        )?;
        Ok(())
    }

    /// The life of the relay's thread.
    fn run(&mut self) -> anyhow::Result<()> {
        let mut events = [MaybeUninit::uninit(); EVENTS_PER_TURN];
        loop {
            let timeout = self.until_next().map(timespec);
            let ready: Vec<Readable> = match epoll::wait(&self.epoll, &mut events, timeout.as_ref())
            {
                Ok((events, _)) => events
                    .iter()
                    .map(|event| Readable::from_token(event.data.u64()))
                    .collect(),
                Err(rustix::io::Errno::INTR) => Vec::new(),
                Err(error) => return Err(error).context("the relay cannot wait for packets"),
            };
            for readable in ready {
                match readable {
                    Readable::Wake => {
                        if self.obey() == Outcome::Stop {
                            return Ok(());
                        }
                    }
                    Readable::Service(service) => self.read_service(service),
                    Readable::Flow(flow) => self.read_flow(flow),
                }
            }
            self.deliver_due();
            let silent = self.flows.expire(self.now());
            self.closing(&silent);
        }
    }

    fn until_next(&mut self) -> Option<Duration> {
        let next = [self.network.next_due(), self.flows.next_expiry()]
            .into_iter()
            .flatten()
            .min()?;
        Some(next.saturating_sub(self.now()))
    }

    fn deliver_due(&mut self) {
        while let Some(delivery) = self.network.poll(self.start.elapsed()) {
            self.deliver(delivery);
        }
    }

    fn deliver(&mut self, delivery: Delivery<Parcel>) {
        let Delivery {
            link,
            due,
            bytes,
            payload,
        } = delivery;
        let late = self.now().saturating_sub(due);
        match self.send(&payload) {
            Ok(()) => self.lateness.record(late),
            Err(cause) => self.network.not_delivered(link, bytes, cause),
        }
    }

    fn send(&self, parcel: &Parcel) -> Result<(), DropCause> {
        let flow = self.flows.get(parcel.flow).ok_or(DropCause::NoMapping)?;
        let service = &self.services[flow.key.service];
        let (socket, to) = match parcel.direction {
            Direction::Forward => (&flow.socket, service.target.ok_or(DropCause::NoTarget)?),
            Direction::Back => (&service.socket, flow.key.source),
        };
        socket
            .send_to(&parcel.data, to)
            .map(|_| ())
            .map_err(|_| DropCause::SendFailed)
    }

    /// Datagrams from nodes that dialled a service.
    fn read_service(&mut self, service: usize) {
        for _ in 0..READS_PER_TURN {
            let mut buffer = std::mem::take(&mut self.buffer);
            let received = receive(&self.services[service].socket, &mut buffer);
            self.buffer = buffer;
            let Some((bytes, source)) = received else {
                return;
            };
            self.forward(service, source, bytes);
        }
    }

    fn forward(&mut self, service: usize, source: SocketAddr, bytes: usize) {
        let now = self.now();
        let IpAddr::V4(ip) = source.ip() else {
            return;
        };
        let Some(&from) = self.node_at.get(&ip) else {
            self.counters.unknown_source += Count::one(bytes);
            return;
        };
        let Some(path) = self.paths.get(&(from, self.services[service].node)) else {
            self.counters.no_path += Count::one(bytes);
            return;
        };
        let link = path.link;
        let key = FlowKey { source, service };
        let Some(flow) = self
            .flows
            .find(key)
            .or_else(|| self.open_flow(now, key, from))
        else {
            self.counters.flow_limit += Count::one(bytes);
            return;
        };
        self.flows.touch(now, flow);
        let data = self.buffer[..bytes].to_vec();
        self.network.offer(
            now,
            link,
            bytes,
            Parcel {
                flow,
                direction: Direction::Forward,
                data,
            },
        );
    }

    /// Makes the socket from which a service sees a new flow: at the address of the relay that stands for its source.
    fn open_flow(&mut self, now: Duration, key: FlowKey, source_node: usize) -> Option<FlowId> {
        if !self.flows.has_room() {
            return None;
        }
        let address = SocketAddrV4::new(self.nodes[source_node].relay, 0);
        let socket = sockets::bind(address, &mut self.granted).ok()?;
        self.watch(&socket, Readable::Flow(self.flows.next_id()))
            .ok()?;
        Some(self.flows.insert(now, key, source_node, socket))
    }

    /// Datagrams that a service sends back to a flow.
    fn read_flow(&mut self, id: FlowId) {
        for _ in 0..READS_PER_TURN {
            let Some(flow) = self.flows.get(id) else {
                return;
            };
            let Some((bytes, source)) = receive(&flow.socket, &mut self.buffer) else {
                return;
            };
            let (now, to) = (self.start.elapsed(), flow.source_node);
            let from = self.services[flow.key.service].node;
            if source.ip() != IpAddr::V4(self.nodes[from].address) {
                self.counters.stray += Count::one(bytes);
                continue;
            }
            let Some(path) = self.paths.get(&(from, to)) else {
                self.counters.no_path += Count::one(bytes);
                continue;
            };
            let link = path.link;
            self.flows.touch(now, id);
            let data = self.buffer[..bytes].to_vec();
            self.network.offer(
                now,
                link,
                bytes,
                Parcel {
                    flow: id,
                    direction: Direction::Back,
                    data,
                },
            );
        }
    }

    /// Before the sockets of forgotten flows are closed, what the kernel dropped there is kept.
    fn closing(&mut self, flows: &[Flow<UdpSocket>]) {
        if !flows.is_empty() {
            let addresses = flows
                .iter()
                .filter_map(|flow| local_v4(&flow.socket).ok())
                .collect();
            self.kernel_drops_before += sockets::kernel_drops(&addresses);
        }
    }

    /// Carries out the commands that wait.
    fn obey(&mut self) -> Outcome {
        let mut bytes = [0; 64];
        while matches!((&self.woken).read(&mut bytes), Ok(read) if read > 0) {}
        while let Ok(command) = self.inbox.try_recv() {
            match command {
                Command::Stop => return Outcome::Stop,
                Command::Request {
                    request,
                    pipe,
                    answer,
                } => {
                    let response = self.answer(request, pipe);
                    let response =
                        response.unwrap_or_else(|error| Response::Refused(format!("{error:#}")));
                    // Whoever asked may have gone away.
                    let _gone = answer.send(response);
                }
            }
        }
        Outcome::GoOn
    }

    fn answer(&mut self, request: Request, pipe: Option<ResolvedPipe>) -> anyhow::Result<Response> {
        // What is due by now leaves under the rules that held until now.
        self.deliver_due();
        let now = self.now();
        match request {
            Request::Describe => return Ok(Response::Description(self.describe())),
            Request::Counters => return Ok(Response::Counters(self.count())),
            Request::Lateness => return Ok(Response::Lateness(self.lateness.clone().into())),
            Request::SetPipe { name, .. } => {
                let entry = self.pipes.get_mut(&name).with_context(|| no_pipe(&name))?;
                let resolved = pipe.expect("the handle resolves the shape of every SetPipe");
                self.network.set_pipe(now, entry.0, resolved.model(now));
                entry.1 = resolved.shape;
            }
            Request::SetPath { from, to, shape } => {
                shape.check()?;
                let ends = (self.node(&from)?, self.node(&to)?);
                let link = self
                    .paths
                    .get(&ends)
                    .with_context(|| no_path(&from, &to))?
                    .link;
                self.network.set_link(now, link, shape);
            }
            Request::SetTarget {
                node,
                service,
                target,
            } => {
                let index = self.node(&node)?;
                check_target(self.nodes[index].address, target)?;
                self.service_mut(index, service.as_deref())?.target = Some(target);
            }
            Request::ForgetFlows { node } => {
                let node = node.map(|node| self.node(&node)).transpose()?;
                let forgotten = self.flows.forget(node);
                self.closing(&forgotten);
            }
        }
        Ok(Response::Done)
    }

    fn node(&self, name: &str) -> anyhow::Result<usize> {
        self.nodes
            .iter()
            .position(|node| node.name == name)
            .with_context(|| no_node(name))
    }

    fn service_mut(&mut self, node: usize, name: Option<&str>) -> anyhow::Result<&mut Service> {
        let wanted = |service: &&mut Service| {
            service.node == node && name.is_none_or(|name| service.name == name)
        };
        match self.services.iter_mut().find(wanted) {
            Some(service) => Ok(service),
            None => bail!(
                "node `{}` has no service `{}`",
                self.nodes[node].name,
                name.unwrap_or_default()
            ),
        }
    }

    fn describe(&self) -> Description {
        let services_of = |node| {
            let services = self
                .services
                .iter()
                .filter(move |service| service.node == node);
            services.map(|service| ServiceDescription {
                name: service.name.clone(),
                advertised: SocketAddr::V4(service.advertised),
                target: service.target,
            })
        };
        let nodes = self
            .nodes
            .iter()
            .enumerate()
            .map(|(index, node)| NodeDescription {
                name: node.name.clone(),
                address: node.address,
                services: services_of(index).collect(),
            });
        let paths = self.paths.iter().map(|((from, to), path)| PathDescription {
            from: self.nodes[*from].name.clone(),
            to: self.nodes[*to].name.clone(),
            pipes: path.pipes.clone(),
            shape: self.network.link_shape(path.link),
        });
        Description {
            nodes: nodes.collect(),
            pipes: self
                .pipes
                .iter()
                .map(|(name, (_, shape))| (name.clone(), shape.clone()))
                .collect(),
            paths: paths.collect(),
            socket_buffers: self.granted,
        }
    }

    fn count(&self) -> RelayCounters {
        let links = self
            .paths
            .iter()
            .map(|((from, to), path)| NamedLinkCounters {
                from: self.nodes[*from].name.clone(),
                to: self.nodes[*to].name.clone(),
                counters: self.network.link_counters(path.link).clone(),
            });
        let pipes = self
            .pipes
            .iter()
            .map(|(name, (id, _))| (name.clone(), self.network.pipe_counters(*id)));
        let service_addresses = self.services.iter().map(|service| service.advertised);
        let flow_addresses = self
            .flows
            .iter()
            .filter_map(|flow| local_v4(&flow.socket).ok());
        let addresses: HashSet<SocketAddrV4> = service_addresses.chain(flow_addresses).collect();
        RelayCounters {
            links: links.collect(),
            pipes: pipes.collect(),
            flows_open: self.flows.open(),
            flows_forgotten: self.flows.forgotten(),
            kernel_dropped_packets: self.kernel_drops_before + sockets::kernel_drops(&addresses),
            ..self.counters.clone()
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    GoOn,
    Stop,
}

impl Readable {
    /// Flow ids count up from zero and never come near the two top bits.
    const SERVICE_BIT: u64 = 1 << 63;
    const WAKE: u64 = 1 << 62;

    fn token(self) -> u64 {
        match self {
            Self::Wake => Self::WAKE,
            Self::Service(index) => Self::SERVICE_BIT | index as u64,
            Self::Flow(FlowId(id)) => id,
        }
    }

    fn from_token(token: u64) -> Self {
        if token == Self::WAKE {
            Self::Wake
        } else if token & Self::SERVICE_BIT != 0 {
            Self::Service((token & !Self::SERVICE_BIT) as usize)
        } else {
            Self::Flow(FlowId(token))
        }
    }
}

/// One datagram, if one waits. What the kernel reports instead of one (a peer's port is closed) is not a datagram's loss.
fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Option<(usize, SocketAddr)> {
    loop {
        match socket.recv_from(buffer) {
            Ok(received) => return Some(received),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Interrupted | ErrorKind::ConnectionRefused
                ) => {}
            Err(_) => return None,
        }
    }
}

fn local_v4(socket: &UdpSocket) -> anyhow::Result<SocketAddrV4> {
    match socket.local_addr()? {
        SocketAddr::V4(address) => Ok(address),
        SocketAddr::V6(address) => bail!("{address} is not an IPv4 address"),
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
