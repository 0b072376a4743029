//! As much of a coordinator as an agent needs to hear: lets nodes join, takes registrations, gives targets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use compass_shared::ids::{Digest, NodeId, QueryId};
use compass_shared::wire::v1::{AgentToCoordinator, CoordinatorToAgent, Registration};
use compass_transport::identity::AuthoritySettings;
use compass_transport::join::{self, JoinAuthority, JoinRefusal, JoinToken, TokenHash};
use compass_transport::{
    Alpn, BindError, CertificateAuthority, Deadline, Endpoint, EndpointConfig, Principal,
    RecvStream, Role, SendStream, Session, Trust, WallClock,
};
use tokio::sync::Mutex;

/// Only ever reached on failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

const MESSAGE_BYTES_MAX: usize = 4 << 20;

pub(crate) struct Coordinator {
    authority: Arc<CertificateAuthority>,
    endpoint: Mutex<Endpoint>,
    token: JoinToken,
}

struct Registrar;

#[async_trait]
impl JoinAuthority for Registrar {
    async fn consume(
        &self,
        _token: &TokenHash,
        wanted: Option<&NodeId>,
        _key: Digest,
    ) -> Result<NodeId, JoinRefusal> {
        wanted.cloned().ok_or(JoinRefusal::NameNeeded)
    }

    async fn registered_key(&self, _node: &NodeId) -> Result<Option<Digest>, JoinRefusal> {
        Ok(None)
    }
}

impl Coordinator {
    pub(crate) fn start() -> Self {
        let settings = AuthoritySettings::default();
        let authority = Arc::new(CertificateAuthority::in_memory(
            WallClock::system(),
            settings,
        ));
        let token = JoinToken::mint(authority.fingerprint());
        let endpoint = Mutex::new(try_bind(&authority, "127.0.0.1:0".parse().unwrap()).unwrap());
        Self {
            authority,
            endpoint,
            token,
        }
    }

    pub(crate) async fn address(&self) -> SocketAddr {
        self.endpoint.lock().await.local_addresses()[0]
    }

    pub(crate) fn token(&self) -> String {
        self.token.reveal().to_string()
    }

    /// An endpoint for the app of a query, and the key by which a target names it.
    pub(crate) fn app(&self, query: &QueryId) -> (Endpoint, Digest) {
        let trust = Trust::new(self.authority.certificate().clone(), WallClock::system());
        let identity = self.authority.identity(&Role::App(query.clone())).unwrap();
        let key = identity.key().fingerprint();
        let config = EndpointConfig::new("127.0.0.1:0".parse().unwrap(), &[]);
        (Endpoint::bind(config, trust, Some(identity)).unwrap(), key)
    }

    /// Goes away without a word to come back later at the same address.
    pub(crate) async fn restart(&self) {
        let mut endpoint = self.endpoint.lock().await;
        let address = endpoint.local_addresses()[0];
        let code = compass_transport::CloseCode::SHUTDOWN;
        endpoint.close(code, "restart", Deadline::after_s(1)).await;
        *endpoint = try_bind(&self.authority, "127.0.0.1:0".parse().unwrap()).unwrap();
        // The address is free once the last task of the old endpoint is gone.
        let free = async {
            loop {
                match try_bind(&self.authority, address) {
                    Ok(bound) => return bound,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        *endpoint = tokio::time::timeout(PATIENCE, free).await.unwrap();
    }

    /// Serves whoever joins until a node registers; gives its registration and the session, welcomed.
    pub(crate) async fn registration(&self) -> (Registration, Seat) {
        let endpoint = self.endpoint.lock().await;
        loop {
            let accepted = tokio::time::timeout(PATIENCE, endpoint.accept()).await;
            let (principal, session) = accepted.expect("an agent comes in time").unwrap();
            if session.alpn() == Alpn::Join {
                let deadline = Deadline::after(PATIENCE);
                join::serve(&*session, &self.authority, &Registrar, deadline)
                    .await
                    .unwrap();
                continue;
            }
            let Principal::Agent { node, .. } = principal else {
                panic!("{principal} at the agents' protocol");
            };
            let (send, receive) = session.take_control().unwrap();
            let mut seat = Seat {
                node,
                session,
                send,
                receive,
            };
            let AgentToCoordinator::Register(registration) = seat.hear().await else {
                panic!("something before the registration");
            };
            seat.say(CoordinatorToAgent::Welcome {
                term: 1,
                report_every: Duration::from_millis(100),
            })
            .await;
            return (registration, seat);
        }
    }

    /// Serves one node that joins.
    pub(crate) async fn let_join(&self) {
        let endpoint = self.endpoint.lock().await;
        let (_, session) = endpoint.accept().await.unwrap();
        let deadline = Deadline::after(PATIENCE);
        // A node may hang up with its certificate before all is said; whether it has joined, it says itself.
        let _ = join::serve(&*session, &self.authority, &Registrar, deadline).await;
    }
}

fn try_bind(authority: &CertificateAuthority, address: SocketAddr) -> Result<Endpoint, BindError> {
    let trust = Trust::new(authority.certificate().clone(), WallClock::system());
    let identity = authority.identity(&Role::Coordinator).unwrap();
    let config = EndpointConfig::new(address, &[Alpn::Agent, Alpn::Join]);
    Endpoint::bind(config, trust, Some(identity))
}

/// A registered node's session.
pub(crate) struct Seat {
    pub(crate) node: NodeId,
    pub(crate) session: Arc<dyn Session>,
    send: SendStream,
    receive: RecvStream,
}

impl Seat {
    pub(crate) async fn say(&mut self, message: CoordinatorToAgent) {
        let deadline = Deadline::after(PATIENCE);
        self.send.write_frame(&message, deadline).await.unwrap();
    }

    pub(crate) async fn hear(&mut self) -> AgentToCoordinator {
        let deadline = Deadline::after(PATIENCE);
        self.receive
            .read_frame(MESSAGE_BYTES_MAX, deadline)
            .await
            .unwrap()
    }

    /// Hears on until something fits.
    pub(crate) async fn hear_until(
        &mut self,
        fits: impl Fn(&AgentToCoordinator) -> bool,
    ) -> AgentToCoordinator {
        loop {
            let message = self.hear().await;
            if fits(&message) {
                return message;
            }
        }
    }
}
