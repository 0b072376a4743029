//! What others hold of a relay: starts its thread, sends it commands, stops it with the last clone.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::{Context, bail};

use super::Engine;
use crate::relay::config::{PipeConfig, RelayConfig};
use crate::relay::control::{RelayControl, Request, Response};
use crate::relay::shape::ResolvedPipe;

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
    let resolve = |pipe: &PipeConfig| {
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
pub(super) enum Command {
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
