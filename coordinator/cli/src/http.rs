//! Requests to the coordinator's API.

use anyhow::{Context, anyhow, bail};
use compass_shared::api::ErrorBody;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::arguments::Global;
use crate::context::{self, Target};

/// Largest answer read.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// A coordinator.
pub(crate) struct Api {
    agent: Agent,
    target: Target,
}

impl Api {
    pub(crate) fn new(global: &Global) -> anyhow::Result<Self> {
        let target = context::resolve(global)?;
        let config = Agent::config_builder()
            .timeout_global(Some(global.timeout))
            .http_status_as_error(false)
            .build();
        Ok(Self {
            agent: config.into(),
            target,
        })
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let request = self
            .agent
            .get(self.url(path))
            .header("authorization", self.bearer());
        self.read(request.call())
    }

    pub(crate) fn delete(&self, path: &str) -> anyhow::Result<()> {
        let request = self
            .agent
            .delete(self.url(path))
            .header("authorization", self.bearer());
        self.checked(request.call()).map(drop)
    }

    pub(crate) fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let request = self
            .agent
            .post(self.url(path))
            .header("authorization", self.bearer());
        self.read(request.send_json(body))
    }

    pub(crate) fn post_yaml<T: DeserializeOwned>(
        &self,
        path: &str,
        yaml: &str,
    ) -> anyhow::Result<T> {
        let request = self
            .agent
            .post(self.url(path))
            .header("authorization", self.bearer())
            .content_type("application/yaml");
        self.read(request.send(yaml))
    }

    pub(crate) fn put<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let request = self
            .agent
            .put(self.url(path))
            .header("authorization", self.bearer());
        self.read(request.send_json(body))
    }

    pub(crate) fn put_bytes<T: DeserializeOwned>(
        &self,
        path: &str,
        bytes: &[u8],
    ) -> anyhow::Result<T> {
        let request = self
            .agent
            .put(self.url(path))
            .header("authorization", self.bearer())
            .content_type("application/octet-stream");
        self.read(request.send(bytes))
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.target.addr)
    }

    fn bearer(&self) -> String {
        format!(
            "Bearer {}",
            self.target.token.as_deref().unwrap_or_default()
        )
    }

    fn read<T: DeserializeOwned>(
        &self,
        answer: Result<Response<Body>, ureq::Error>,
    ) -> anyhow::Result<T> {
        let mut answer = self.checked(answer)?;
        let text = answer
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_string()?;
        serde_json::from_str(&text).with_context(|| {
            format!(
                "{} answered something that is not understood",
                self.target.addr
            )
        })
    }

    fn checked(
        &self,
        answer: Result<Response<Body>, ureq::Error>,
    ) -> anyhow::Result<Response<Body>> {
        let mut answer = answer.map_err(|error| {
            anyhow!(
                "the coordinator at {} does not answer: {error}",
                self.target.addr
            )
        })?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        if status == 401 && self.target.token.is_none() {
            bail!(
                "the coordinator wants a token: set COMPASS_TOKEN or pass --token-file (it wrote one for the administrator into its data folder)"
            );
        }
        let text = answer
            .body_mut()
            .with_config()
            .limit(ANSWER_BYTES_MAX)
            .read_to_string()
            .unwrap_or_default();
        match serde_json::from_str::<ErrorBody>(&text) {
            Ok(body) => {
                let object = body
                    .object
                    .map(|object| format!("{object}: "))
                    .unwrap_or_default();
                let hint = body
                    .hint
                    .map(|hint| format!("\nhint: {hint}"))
                    .unwrap_or_default();
                bail!("{object}{}{hint}", body.error)
            }
            Err(_) => bail!(
                "the coordinator at {} answered {status}: {}",
                self.target.addr,
                text.chars().take(200).collect::<String>()
            ),
        }
    }
}
