//! A coordinator in this process, and agents and apps that say exactly what a test wants them to say.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "test code; each test binary uses a part of it"
)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use compass_coordinator::run::Coordinator;
use compass_coordinator::settings::{Overrides, Settings};
use compass_shared::ids::{Commit, NodeId, SiteId};
use compass_shared::model::cluster::{NodeDescription, Resources, Tier};
use compass_shared::model::telemetry::NodeTelemetry;
use compass_shared::units::Millicores;
use compass_shared::wire::v1::{
    AgentReport, AgentToCoordinator, AppToCoordinator, CoordinatorToAgent, CoordinatorToApp,
    InstanceStatus, LinkReport, Registration,
};
use compass_transport::join::{JoinError, join};
use compass_transport::{
    Alpn, Deadline, Dial, Endpoint, EndpointConfig, Identity, JoinToken, PrivateKey, Role,
    SendStream, ServerTrust, Session, Trust, WallClock,
};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

/// Far more than anything here takes; only a failing test waits this long.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn patience() -> Deadline {
    Deadline::after(PATIENCE)
}

pub fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

/// Runs a test against a coordinator on a fresh data folder.
pub fn with_coordinator(test: impl AsyncFnOnce(&mut Rig)) {
    with_settings("", test);
}

/// The same with settings of the test's own (TOML).
pub fn with_settings(toml: &str, test: impl AsyncFnOnce(&mut Rig)) {
    let folder = tempfile::tempdir().unwrap();
    let system = system();
    system.block_on(async {
        let mut rig = Rig::start(folder.path(), toml).await;
        test(&mut rig).await;
        rig.coordinator.shut_down().await;
    });
}

pub fn system() -> actix::SystemRunner {
    actix::System::with_tokio_rt(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap()
    })
}

/// Waits until something holds.
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let waiting = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting)
        .await
        .unwrap_or_else(|_| panic!("still waiting for: {what}"))
}

pub struct Rig {
    pub coordinator: Coordinator,
    pub api: Api,
}

impl Rig {
    pub async fn start(data_dir: &std::path::Path, toml: &str) -> Self {
        let overrides = Overrides {
            listen: Some(local()),
            http: Some(local()),
            data_dir: Some(data_dir.to_owned()),
            ..Overrides::default()
        };
        let settings = Settings::parse("test", toml, overrides).unwrap();
        let coordinator = Coordinator::start(settings).await.unwrap();
        let token = std::fs::read_to_string(&coordinator.admin_token_file).unwrap();
        let api = Api {
            address: coordinator.http,
            token: token.trim().to_owned(),
        };
        Self { coordinator, api }
    }

    pub fn quic(&self) -> SocketAddr {
        self.coordinator.quic
    }

    /// A node that has joined.
    pub async fn joined(&self, name: &str) -> Member {
        let token = self.api.join_token(name).await;
        Member::join(self.quic(), &token, name, &PrivateKey::generate())
            .await
            .unwrap()
    }

    /// A node that has joined and is connected.
    pub async fn agent(&self, name: &str) -> Agent {
        self.joined(name).await.connect().await.unwrap()
    }
}

/// The HTTP API, as a client sees it.
#[derive(Clone)]
pub struct Api {
    pub address: SocketAddr,
    pub token: String,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
}

impl Answer {
    pub fn json<T: DeserializeOwned>(&self) -> T {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The error's text and hint, together.
    pub fn error(&self) -> String {
        let body: compass_shared::api::ErrorBody = self.json();
        format!("{} | {}", body.error, body.hint.unwrap_or_default())
    }
}

impl Api {
    pub fn with_token(&self, token: &str) -> Self {
        Self {
            token: token.to_owned(),
            ..self.clone()
        }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, "", Vec::new()).await
    }

    pub async fn post(&self, path: &str, content_type: &'static str, body: &str) -> Answer {
        self.send("POST", path, content_type, body.as_bytes().to_vec())
            .await
    }

    pub async fn put(&self, path: &str, content_type: &'static str, body: Vec<u8>) -> Answer {
        self.send("PUT", path, content_type, body).await
    }

    pub async fn delete(&self, path: &str) -> Answer {
        self.send("DELETE", path, "", Vec::new()).await
    }

    /// The text of a new join token for a node.
    pub async fn join_token(&self, name: &str) -> String {
        let body = format!(r#"{{"purpose":{{"join":"{name}"}},"ttl_s":600,"uses":1}}"#);
        let answer = self.post("/v1/tokens", "application/json", &body).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        let created: compass_shared::api::TokenCreated = answer.json();
        created.token
    }

    /// The text of a new API token.
    pub async fn api_token(&self, role: &str) -> String {
        let body = format!(r#"{{"purpose":{{"api":"{role}"}},"ttl_s":600,"uses":null}}"#);
        let answer = self.post("/v1/tokens", "application/json", &body).await;
        assert_eq!(answer.status, 201, "{answer:?}");
        let created: compass_shared::api::TokenCreated = answer.json();
        created.token
    }

    async fn send(
        &self,
        method: &'static str,
        path: &str,
        content_type: &'static str,
        body: Vec<u8>,
    ) -> Answer {
        self.try_send(method, path, content_type, body)
            .await
            .unwrap()
    }

    async fn try_send(
        &self,
        method: &'static str,
        path: &str,
        content_type: &'static str,
        body: Vec<u8>,
    ) -> Result<Answer, ureq::Error> {
        let url = format!("http://{}{path}", self.address);
        let bearer = format!("Bearer {}", self.token);
        tokio::task::spawn_blocking(move || {
            let agent: ureq::Agent = ureq::Agent::config_builder()
                .http_status_as_error(false)
                .timeout_global(Some(PATIENCE))
                .build()
                .into();
            let answer = match method {
                "GET" => agent.get(&url).header("authorization", &bearer).call(),
                "DELETE" => agent.delete(&url).header("authorization", &bearer).call(),
                "PUT" => agent
                    .put(&url)
                    .header("authorization", &bearer)
                    .content_type(content_type)
                    .send(&body[..]),
                _ => agent
                    .post(&url)
                    .header("authorization", &bearer)
                    .content_type(content_type)
                    .send(&body[..]),
            };
            let mut answer = answer?;
            Ok(Answer {
                status: answer.status().as_u16(),
                body: answer.body_mut().read_to_string()?,
            })
        })
        .await
        .unwrap()
    }
}

/// A node's identity and socket.
pub struct Member {
    pub name: String,
    pub endpoint: Endpoint,
    pub coordinator: SocketAddr,
    pub boot: u64,
    pub applied: Option<Commit>,
    pub instances: Vec<InstanceStatus>,
    pub tier: Tier,
    pub site: &'static str,
}

impl Member {
    pub async fn join(
        coordinator: SocketAddr,
        token: &str,
        name: &str,
        key: &PrivateKey,
    ) -> Result<Self, JoinError> {
        let endpoint = dialler();
        let token = JoinToken::parse(token).unwrap();
        let wanted = Some(node(name));
        let identity = join(&endpoint, &[coordinator], &token, wanted, key, patience()).await?;
        Ok(Self::with_identity(coordinator, name, identity))
    }

    pub fn with_identity(coordinator: SocketAddr, name: &str, identity: Identity) -> Self {
        let authority = identity.authority().clone();
        let trust = Trust::new(authority, WallClock::system());
        let config = EndpointConfig::new(local(), &[]);
        Self {
            name: name.to_owned(),
            endpoint: Endpoint::bind(config, trust, Some(identity)).unwrap(),
            coordinator,
            boot: 1,
            applied: None,
            instances: vec![],
            tier: Tier::Edge,
            site: "plant",
        }
    }

    pub fn identity(&self) -> Identity {
        (*self.endpoint.identity().unwrap()).clone()
    }

    pub fn registration(&self) -> Registration {
        let identity = self.identity();
        Registration {
            description: NodeDescription {
                tier: self.tier,
                site: SiteId::new(self.site).unwrap(),
                device_class: "test".to_owned(),
                emulated_speed: None,
                capacity: Resources {
                    cpu: Millicores(1000),
                    memory_mib: 1024,
                    gpu_percent: 0,
                },
                labels: BTreeMap::new(),
                advertised: vec![self.endpoint.local_addresses()[0]],
                fingerprint: identity.key().fingerprint(),
            },
            boot: self.boot,
            applied: self.applied,
            instances: self.instances.clone(),
            artifacts: vec![],
        }
    }

    pub async fn session(&self) -> Arc<dyn Session> {
        let dial = Dial::new(Alpn::Agent, Role::Coordinator);
        self.endpoint
            .connect(&[self.coordinator], &dial, patience())
            .await
            .unwrap()
    }

    /// Connects and registers; the reason when that is refused.
    pub async fn connect(self) -> Result<Agent, String> {
        let session = self.session().await;
        let (mut send, mut receive) = session.take_control().unwrap();
        let registration = AgentToCoordinator::Register(self.registration());
        send.write_frame(&registration, patience()).await.unwrap();
        match receive.read_frame(1 << 20, patience()).await {
            Ok(CoordinatorToAgent::Welcome { .. }) => {}
            Ok(CoordinatorToAgent::Refused { reason }) => return Err(reason),
            Ok(other) => panic!("{other:?}"),
            Err(error) => return Err(error.to_string()),
        }
        let (heard, messages) = mpsc::unbounded_channel();
        let answers = Arc::new(AtomicBool::new(true));
        let send = Arc::new(tokio::sync::Mutex::new(send));
        let (pong, answering) = (send.clone(), answers.clone());
        tokio::spawn(async move {
            while let Ok(Some(message)) = receive.next_frame(16 << 20, Deadline::never()).await {
                if let CoordinatorToAgent::Ping(number) = message {
                    if answering.load(Ordering::Relaxed) {
                        let pong_message = AgentToCoordinator::Pong(number);
                        let _ = pong
                            .lock()
                            .await
                            .write_frame(&pong_message, patience())
                            .await;
                    }
                    continue;
                }
                if heard.send(message).is_err() {
                    return;
                }
            }
        });
        Ok(Agent {
            member: self,
            session,
            send,
            messages,
            answers,
            sequence: 0,
        })
    }
}

/// An endpoint that only dials and knows nobody.
pub fn dialler() -> Endpoint {
    let trust = Trust::none(WallClock::system());
    Endpoint::bind(EndpointConfig::new(local(), &[]), trust, None).unwrap()
}

/// A connected node.
pub struct Agent {
    pub member: Member,
    pub session: Arc<dyn Session>,
    pub send: Arc<tokio::sync::Mutex<SendStream>>,
    pub messages: mpsc::UnboundedReceiver<CoordinatorToAgent>,
    /// Whether it answers pings.
    pub answers: Arc<AtomicBool>,
    pub sequence: u64,
}

impl Agent {
    pub async fn tell(&self, message: &AgentToCoordinator) {
        let mut send = self.send.lock().await;
        send.write_frame(message, patience()).await.unwrap();
    }

    pub async fn report(&mut self, telemetry: NodeTelemetry) {
        self.report_all(telemetry, vec![]).await;
    }

    pub async fn report_links(&mut self, links: Vec<LinkReport>) {
        self.report_all(NodeTelemetry::default(), links).await;
    }

    async fn report_all(&mut self, telemetry: NodeTelemetry, links: Vec<LinkReport>) {
        self.sequence += 1;
        let report = AgentReport {
            sequence: self.sequence,
            telemetry,
            links,
            instances: vec![],
            content: vec![],
            applied: None,
            sent_bytes: 0,
            received_bytes: 0,
        };
        let mut stream = self.session.open_uni(patience()).await.unwrap();
        stream.write_frame(&report, patience()).await.unwrap();
        stream.finish().unwrap();
    }

    /// The next message that `wanted` picks; others are passed over.
    pub async fn hear<T>(&mut self, wanted: impl Fn(CoordinatorToAgent) -> Option<T>) -> T {
        let waiting = async {
            loop {
                let message = self.messages.recv().await.expect("the session is alive");
                if let Some(found) = wanted(message) {
                    return found;
                }
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap()
    }
}

/// A query over the built-in pipeline.
pub fn query_yaml(name: &str, entry: &str) -> String {
    format!(
        "apiVersion: compass/v1\nkind: Query\nmetadata: {{name: {name}}}\nspec:\n  pipeline: live-video\n  source: {{node: {entry}, rate: 10/s}}\n  slo:\n    latency: {{p95: 400ms}}\n    accuracy: {{min: 0.5}}\n    cost: {{max: 1 USD/h}}\n"
    )
}

/// An app's session.
pub struct App {
    pub session: Arc<dyn Session>,
    pub send: SendStream,
    pub receive: compass_transport::RecvStream,
    pub registered: CoordinatorToApp,
    pub key: PrivateKey,
}

impl App {
    /// Registers a query; the reason when that is refused.
    pub async fn register(rig: &Rig, token: &str, yaml: &str) -> Result<Self, String> {
        let key = PrivateKey::generate();
        let endpoint = dialler();
        let fingerprint = rig.coordinator.plane.authority.fingerprint();
        let dial = Dial::new(Alpn::App, Role::Coordinator)
            .trusting(ServerTrust::AuthorityFingerprint(fingerprint))
            .anonymous();
        let session = endpoint
            .connect(&[rig.quic()], &dial, patience())
            .await
            .unwrap();
        let message = AppToCoordinator::Register {
            token: token.to_owned(),
            query_yaml: yaml.to_owned(),
            request_der: key.signing_request(),
        };
        Self::begin(session, &message, key, endpoint).await
    }

    /// Takes the query up again with the certificate it got.
    pub async fn attach(rig: &Rig, identity: Identity) -> Result<Self, String> {
        let key = identity.key().clone();
        let trust = Trust::new(identity.authority().clone(), WallClock::system());
        let config = EndpointConfig::new(local(), &[]);
        let endpoint = Endpoint::bind(config, trust, Some(identity)).unwrap();
        let dial = Dial::new(Alpn::App, Role::Coordinator);
        let session = endpoint
            .connect(&[rig.quic()], &dial, patience())
            .await
            .map_err(|error| error.to_string())?;
        Self::begin(session, &AppToCoordinator::Attach, key, endpoint).await
    }

    async fn begin(
        session: Arc<dyn Session>,
        first: &AppToCoordinator,
        key: PrivateKey,
        endpoint: Endpoint,
    ) -> Result<Self, String> {
        let (mut send, mut receive) = session.take_control().unwrap();
        send.write_frame(first, patience()).await.unwrap();
        let registered = receive
            .read_frame(1 << 20, patience())
            .await
            .map_err(|error| error.to_string())?;
        // The endpoint only dials: its sessions outlive it.
        drop(endpoint);
        match registered {
            CoordinatorToApp::Registered { .. } => Ok(Self {
                session,
                send,
                receive,
                registered,
                key,
            }),
            CoordinatorToApp::Rejected { reason } => Err(reason),
            other => panic!("{other:?}"),
        }
    }

    pub fn identity(&self) -> Identity {
        let CoordinatorToApp::Registered { chain_der, .. } = &self.registered else {
            panic!("registered");
        };
        Identity::from_chain(self.key.clone(), chain_der.clone()).unwrap()
    }

    pub async fn tell(&mut self, message: &AppToCoordinator) {
        self.send.write_frame(message, patience()).await.unwrap();
    }

    pub async fn hear<T>(&mut self, wanted: impl Fn(CoordinatorToApp) -> Option<T>) -> T {
        loop {
            let message = self.receive.read_frame(1 << 20, patience()).await.unwrap();
            if let Some(found) = wanted(message) {
                return found;
            }
        }
    }
}
