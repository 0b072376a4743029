//! The shell around [`Network`]: sockets, one timer, and commands, on one thread of its own.
//!
//! The thread sleeps in `epoll` until a datagram comes, a packet is due (nanosecond timeout) or a command wakes it. A
//! datagram is read, given its path by source and destination, offered to the network, and when it is due it is sent from
//! the socket of its flow. How late that was is recorded: it is the emulator's own error.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use compass_shared::seed::Seed;
use rustix::event::{Timespec, epoll};

use super::config::RelayConfig;
use super::control::{Response, no_pipe};
use super::counters::{Count, DropCause, RelayCounters};
use super::flows::{Flow, FlowId, FlowKey, FlowTable};
use super::lateness::Lateness;
use super::network::{Delivery, LinkId, Network, PipeId};
use super::shape::{PathShape, PipeShape, ResolvedPipe};
use super::sockets::{self, SocketBuffers};
use handle::Command;
pub use handle::{Relay, RelayHandle};

mod answers;
mod handle;

/// The largest UDP payload and a little more.
const DATAGRAM_BYTES_MAX: usize = 64 << 10;

/// Datagrams read from one socket before deliveries that are due get their turn.
const READS_PER_TURN: usize = 64;

/// Sockets reported by one call of `epoll`; the others wait for the next.
const EVENTS_PER_TURN: usize = 64;

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
