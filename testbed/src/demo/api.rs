//! The coordinator's HTTP API, as far as the demo asks it.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use compass_shared::api::ErrorBody;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::Response;
use ureq::{Agent, Body};

/// An answer comes within milliseconds; this is met only when the coordinator is gone.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Largest answer read.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A coordinator, with a token.
#[derive(Debug, Clone)]
pub(crate) struct Api {
    agent: Agent,
    address: SocketAddr,
    bearer: String,
}

impl Api {
    pub(crate) fn new(address: SocketAddr, token: &str) -> Self {
        let config = Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .http_status_as_error(false)
            .build();
        Self {
            agent: config.into(),
            address,
            bearer: format!("Bearer {token}"),
        }
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let request = self.agent.get(self.url(path));
        read(path, request.header("authorization", &self.bearer).call())
    }

    pub(crate) fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let request = self.agent.post(self.url(path));
        let request = request.header("authorization", &self.bearer);
        read(path, request.send_json(body))
    }

    pub(crate) fn put_bytes<T: DeserializeOwned>(
        &self,
        path: &str,
        bytes: &[u8],
    ) -> anyhow::Result<T> {
        let request = self.agent.put(self.url(path));
        let request = request
            .header("authorization", &self.bearer)
            .content_type("application/octet-stream");
        read(path, request.send(bytes))
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }
}

fn read<T: DeserializeOwned>(
    path: &str,
    answer: Result<Response<Body>, ureq::Error>,
) -> anyhow::Result<T> {
    let mut answer = answer.with_context(|| format!("the coordinator does not answer {path}"))?;
    let status = answer.status();
    let text = answer
        .body_mut()
        .with_config()
        .limit(ANSWER_BYTES_MAX)
        .read_to_string()?;
    if status.is_success() {
        return serde_json::from_str(&text)
            .with_context(|| format!("the answer to {path} is not understood"));
    }
    match serde_json::from_str::<ErrorBody>(&text) {
        Ok(body) => bail!("{path}: {}", body.error),
        Err(_) => bail!("{path}: {status}"),
    }
}
