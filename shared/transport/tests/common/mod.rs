//! A small fleet on the loopback interface, for the tests of this crate.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test binary uses a part, and all of it is test code"
)]

pub mod relay;

use std::net::SocketAddr;
use std::sync::Arc;

use compass_shared::ids::{NodeId, QueryId};
use compass_transport::identity::AuthoritySettings;
use compass_transport::{
    Alpn, CertificateAuthority, Deadline, Dial, Endpoint, EndpointConfig, Principal, Role, Session,
    Trust, WallClock,
};

/// Only ever reached on failure.
pub fn patience() -> Deadline {
    Deadline::after_s(30)
}

pub fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

pub fn query(name: &str) -> QueryId {
    QueryId::new(name).unwrap()
}

pub struct Fleet {
    pub authority: CertificateAuthority,
    pub clock: Arc<WallClock>,
}

impl Fleet {
    pub fn new() -> Self {
        let clock = WallClock::system();
        let authority =
            CertificateAuthority::in_memory(Arc::clone(&clock), AuthoritySettings::default());
        Self { authority, clock }
    }

    pub fn trust(&self) -> Arc<Trust> {
        Trust::new(
            self.authority.certificate().clone(),
            Arc::clone(&self.clock),
        )
    }

    pub fn endpoint(&self, role: &Role, config: EndpointConfig) -> Endpoint {
        let identity = self.authority.identity(role).unwrap();
        Endpoint::bind(config, self.trust(), Some(identity)).unwrap()
    }

    pub fn coordinator(&self) -> Endpoint {
        let accept = [Alpn::Agent, Alpn::App, Alpn::Join];
        self.endpoint(&Role::Coordinator, EndpointConfig::new(local(), &accept))
    }

    pub fn agent(&self, name: &str) -> Endpoint {
        self.endpoint(
            &Role::Node(node(name)),
            EndpointConfig::new(local(), &[Alpn::Data]),
        )
    }

    /// A connected pair: the agent's side, then the coordinator's.
    pub async fn pair(&self) -> Pair {
        let coordinator = self.coordinator();
        let agent = self.agent("edge-1");
        Pair::connect(agent, coordinator).await
    }
}

pub struct Pair {
    pub agent: Endpoint,
    pub coordinator: Endpoint,
    pub near: Arc<dyn Session>,
    pub far: Arc<dyn Session>,
    pub principal: Principal,
}

impl Pair {
    pub async fn connect(agent: Endpoint, coordinator: Endpoint) -> Self {
        let addresses = coordinator.local_addresses();
        Self::connect_via(&addresses, agent, coordinator).await
    }

    pub async fn connect_via(
        addresses: &[SocketAddr],
        agent: Endpoint,
        coordinator: Endpoint,
    ) -> Self {
        let dial = Dial::new(Alpn::Agent, Role::Coordinator);
        let (near, accepted) = tokio::join!(
            agent.connect(addresses, &dial, patience()),
            coordinator.accept()
        );
        let (principal, far) = accepted.unwrap();
        Self {
            agent,
            coordinator,
            near: near.unwrap(),
            far,
            principal,
        }
    }
}
