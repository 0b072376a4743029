//! How a relay is steered: the same requests inside a process and over a loopback TCP connection.
//!
//! On the connection each request is one line of JSON (`{"op":"set_pipe","name":"plant uplink up","shape":{"rate_bps":1000000}}`)
//! and is answered by one line: `"done"`, `{"counters":…}`, … or `{"refused":"why"}`. A line that is too long ends the
//! connection; one that is not understood is refused and the next is read.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::counters::RelayCounters;
use super::lateness::Lateness;
use super::shape::{PathShape, PipeShape};
use super::sockets::SocketBuffers;

/// No request is longer; a foreign client cannot make the relay hold more.
const REQUEST_BYTES_MAX: u64 = 64 << 10;

/// A relay answers within a millisecond; this is only met when it is gone.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// More than any testbed opens.
const CONNECTIONS_MAX: usize = 16;

/// What can be asked of a relay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Nodes, pipes and paths as they are now.
    Describe,
    /// Everything counted since the start.
    Counters,
    /// How late packets left.
    Lateness,
    /// Changes a pipe from now on.
    SetPipe {
        /// The pipe.
        name: String,
        /// Its whole new shape.
        shape: PipeShape,
    },
    /// Changes a path from now on.
    SetPath {
        /// Source node.
        from: String,
        /// Destination node.
        to: String,
        /// Its whole new shape.
        shape: PathShape,
    },
    /// Says where a node really listens.
    SetTarget {
        /// The node.
        node: String,
        /// Its service; absent means its first.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<String>,
        /// The node's real address.
        target: SocketAddr,
    },
    /// Forgets flows as a NAT does that is restarted.
    ForgetFlows {
        /// Those of this source node; absent means all.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<String>,
    },
}

/// What a relay answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Response {
    /// It is done.
    Done,
    /// To [`Request::Describe`].
    Description(Description),
    /// To [`Request::Counters`].
    Counters(RelayCounters),
    /// To [`Request::Lateness`].
    Lateness(LatenessReport),
    /// It cannot be done, and why.
    Refused(String),
}

/// How late packets left, with the usual figures beside the histogram they come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LatenessReport {
    /// Packets measured.
    pub packets: u64,
    /// Median, in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile, in milliseconds.
    pub p99_ms: f64,
    /// Largest, in milliseconds.
    pub max_ms: f64,
    /// The whole.
    pub histogram: Lateness,
}

impl From<Lateness> for LatenessReport {
    fn from(histogram: Lateness) -> Self {
        Self {
            packets: histogram.count(),
            p50_ms: histogram.p50_ms(),
            p99_ms: histogram.p99_ms(),
            max_ms: histogram.max_us as f64 / 1e3,
            histogram,
        }
    }
}

/// A relay as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// All nodes.
    pub nodes: Vec<NodeDescription>,
    /// All pipes.
    pub pipes: Vec<(String, PipeShape)>,
    /// All directions that have a path.
    pub paths: Vec<PathDescription>,
    /// What the kernel granted.
    pub socket_buffers: SocketBuffers,
}

/// A node as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeDescription {
    /// Its name.
    pub name: String,
    /// Where it sends from.
    pub address: Ipv4Addr,
    /// What of it can be reached, in the order of the configuration.
    pub services: Vec<ServiceDescription>,
}

/// A service as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServiceDescription {
    /// Its name.
    pub name: String,
    /// Where others dial it.
    pub advertised: SocketAddr,
    /// Where it really is, if known.
    pub target: Option<SocketAddr>,
}

/// A path as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathDescription {
    /// Source node.
    pub from: String,
    /// Destination node.
    pub to: String,
    /// The pipes it crosses.
    pub pipes: Vec<String>,
    /// Its shape.
    pub shape: PathShape,
}

/// Steers a relay, wherever it runs.
pub trait RelayControl {
    /// Puts a request and waits for its answer; an error means that the relay is gone.
    fn request(&self, request: Request) -> anyhow::Result<Response>;

    /// Nodes, pipes and paths as they are now.
    fn describe(&self) -> anyhow::Result<Description> {
        match self.request(Request::Describe)? {
            Response::Description(description) => Ok(description),
            other => unexpected(&other),
        }
    }

    /// The address at which others dial a node (its first service).
    fn advertised(&self, node: &str) -> anyhow::Result<SocketAddr> {
        let description = self.describe()?;
        let node = description
            .nodes
            .iter()
            .find(|known| known.name == node)
            .with_context(|| no_node(node))?;
        let service = node
            .services
            .first()
            .with_context(|| format!("node `{}` has no service", node.name))?;
        Ok(service.advertised)
    }

    /// Says where a node's first service really is.
    fn set_target(&self, node: &str, target: SocketAddr) -> anyhow::Result<()> {
        done(self.request(Request::SetTarget {
            node: node.to_owned(),
            service: None,
            target,
        })?)
    }

    /// The shape of a pipe.
    fn pipe(&self, name: &str) -> anyhow::Result<PipeShape> {
        let pipes = self.describe()?.pipes;
        pipes
            .into_iter()
            .find(|pipe| pipe.0 == name)
            .map(|pipe| pipe.1)
            .with_context(|| no_pipe(name))
    }

    /// Changes a pipe from now on.
    fn set_pipe(&self, name: &str, shape: PipeShape) -> anyhow::Result<()> {
        done(self.request(Request::SetPipe {
            name: name.to_owned(),
            shape,
        })?)
    }

    /// The shape of a path.
    fn path(&self, from: &str, to: &str) -> anyhow::Result<PathShape> {
        let paths = self.describe()?.paths;
        let path = paths
            .into_iter()
            .find(|path| path.from == from && path.to == to);
        path.map(|path| path.shape)
            .with_context(|| no_path(from, to))
    }

    /// Changes a path from now on.
    fn set_path(&self, from: &str, to: &str, shape: PathShape) -> anyhow::Result<()> {
        done(self.request(Request::SetPath {
            from: from.to_owned(),
            to: to.to_owned(),
            shape,
        })?)
    }

    /// Lets nothing pass in one direction, what is under way included.
    fn cut(&self, from: &str, to: &str) -> anyhow::Result<()> {
        let shape = self.path(from, to)?;
        self.set_path(from, to, PathShape { cut: true, ..shape })
    }

    /// Takes a cut back.
    fn mend(&self, from: &str, to: &str) -> anyhow::Result<()> {
        let shape = self.path(from, to)?;
        self.set_path(
            from,
            to,
            PathShape {
                cut: false,
                ..shape
            },
        )
    }

    /// Cuts every path from and to a node.
    fn isolate(&self, node: &str) -> anyhow::Result<()> {
        set_cuts(self, node, |shape| PathShape { cut: true, ..shape })
    }

    /// Mends every path from and to a node.
    fn rejoin(&self, node: &str) -> anyhow::Result<()> {
        set_cuts(self, node, |shape| PathShape {
            cut: false,
            ..shape
        })
    }

    /// Forgets the flows of a source node, or all, as a NAT does that is restarted.
    fn forget_flows(&self, node: Option<&str>) -> anyhow::Result<()> {
        done(self.request(Request::ForgetFlows {
            node: node.map(str::to_owned),
        })?)
    }

    /// Everything counted since the start.
    fn counters(&self) -> anyhow::Result<RelayCounters> {
        match self.request(Request::Counters)? {
            Response::Counters(counters) => Ok(counters),
            other => unexpected(&other),
        }
    }

    /// How late packets left since the start.
    fn lateness(&self) -> anyhow::Result<Lateness> {
        match self.request(Request::Lateness)? {
            Response::Lateness(report) => Ok(report.histogram),
            other => unexpected(&other),
        }
    }
}

fn set_cuts<C: RelayControl + ?Sized>(
    control: &C,
    node: &str,
    change: impl Fn(PathShape) -> PathShape,
) -> anyhow::Result<()> {
    let description = control.describe()?;
    if !description.nodes.iter().any(|known| known.name == node) {
        bail!(no_node(node));
    }
    for path in description
        .paths
        .iter()
        .filter(|path| path.from == node || path.to == node)
    {
        control.set_path(&path.from, &path.to, change(path.shape))?;
    }
    Ok(())
}

fn done(response: Response) -> anyhow::Result<()> {
    match response {
        Response::Done => Ok(()),
        other => unexpected(&other),
    }
}

fn unexpected<T>(response: &Response) -> anyhow::Result<T> {
    match response {
        Response::Refused(why) => bail!("the relay refused: {why}"),
        other => bail!("the relay gave the answer to another request: {other:?}"),
    }
}

pub(super) fn no_node(name: &str) -> String {
    format!("there is no node `{name}`")
}

pub(super) fn no_pipe(name: &str) -> String {
    format!("there is no pipe `{name}`")
}

pub(super) fn no_path(from: &str, to: &str) -> String {
    format!("there is no path {from} → {to}")
}

/// Steers a relay in another process.
#[derive(Debug)]
pub struct ControlClient {
    connection: Mutex<BufReader<TcpStream>>,
}

impl ControlClient {
    /// Connects to the address that `role relay` printed.
    pub fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let connect = || -> std::io::Result<TcpStream> {
            let stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
            stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
            Ok(stream)
        };
        let stream = connect()
            .with_context(|| format!("cannot connect to the relay's control at {address}"))?;
        Ok(Self {
            connection: Mutex::new(BufReader::new(stream)),
        })
    }
}

impl RelayControl for ControlClient {
    fn request(&self, request: Request) -> anyhow::Result<Response> {
        let mut line = serde_json::to_string(&request)?;
        line.push('\n');
        let mut connection = self
            .connection
            .lock()
            .map_err(|_| anyhow::anyhow!("an earlier request panicked"))?;
        connection
            .get_mut()
            .write_all(line.as_bytes())
            .context("the relay is gone")?;
        let mut answer = String::new();
        connection
            .read_line(&mut answer)
            .context("the relay did not answer")?;
        serde_json::from_str(&answer).context("the relay is gone, or its answer cannot be read")
    }
}

/// Serves a relay's control on a listener, for as long as the process lives; each connection has a thread.
pub fn serve<C: RelayControl + Clone + Send + 'static>(
    listener: TcpListener,
    relay: C,
) -> std::io::Result<()> {
    let open = Arc::new(AtomicUsize::new(0));
    std::thread::Builder::new()
        .name("relay control".to_owned())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                if open.load(Ordering::SeqCst) >= CONNECTIONS_MAX {
                    continue;
                }
                open.fetch_add(1, Ordering::SeqCst);
                let (relay, open) = (relay.clone(), Arc::clone(&open));
                std::thread::spawn(move || {
                    // The client has gone away or broken the protocol; there is nobody to tell.
                    let _gone = answer_all(&stream, &relay);
                    open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        })?;
    Ok(())
}

fn answer_all<C: RelayControl>(stream: &TcpStream, relay: &C) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    loop {
        let mut line = Vec::new();
        reader
            .by_ref()
            .take(REQUEST_BYTES_MAX)
            .read_until(b'\n', &mut line)?;
        if line.last() != Some(&b'\n') {
            return Ok(());
        }
        let response = match serde_json::from_slice(&line) {
            Ok(request) => relay
                .request(request)
                .unwrap_or_else(|error| Response::Refused(format!("{error:#}"))),
            Err(error) => Response::Refused(format!("not a request: {error}")),
        };
        let mut answer = serde_json::to_vec(&response)?;
        answer.push(b'\n');
        writer.write_all(&answer)?;
    }
}
