//! `compass-testbed role relay --config FILE`: a relay as a process of its own.
//!
//! Prints `ready control=ADDRESS` once every socket is bound; the address takes the requests of [`super::control`].

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;

use anyhow::Context;

use super::config::RelayConfig;
use super::control;
use super::engine::Relay;

/// Runs until the process is ended.
pub fn run(config: &Path) -> anyhow::Result<()> {
    let config = RelayConfig::load(config)?;
    let address = config.control;
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot bind the control at {address}"))?;
    let relay = Relay::start(config)?;
    let control = listener.local_addr()?;
    control::serve(listener, relay.clone())?;
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready control={control}")?;
    stdout.flush()?;
    relay.join()
}
