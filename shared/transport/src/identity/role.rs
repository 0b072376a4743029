//! Names in certificates: roles, not hosts.

use std::fmt;

use compass_shared::ids::{NodeId, QueryId};
use rustls_pki_types::ServerName;

use super::IdentityError;

const COORDINATOR: &str = "coordinator.compass";
const NODE_SUFFIX: &str = ".node.compass";
const APP_SUFFIX: &str = ".app.compass";

/// Who the holder of a certificate is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// `coordinator.compass`
    Coordinator,
    /// `<node>.node.compass`
    Node(NodeId),
    /// `<query>.app.compass`
    App(QueryId),
}

impl Role {
    /// Reads a name from a certificate; `None` when it is none of ours.
    pub fn parse(name: &str) -> Option<Self> {
        if name == COORDINATOR {
            return Some(Self::Coordinator);
        }
        if let Some(node) = name.strip_suffix(NODE_SUFFIX) {
            return NodeId::new(node).ok().map(Self::Node);
        }
        let query = name.strip_suffix(APP_SUFFIX)?;
        QueryId::new(query).ok().map(Self::App)
    }

    /// The name as it stands in a certificate and as a dialler states it.
    ///
    /// # Errors
    /// When the id, though a valid id, is not a valid host name (say, it ends in `-`).
    pub fn server_name(&self) -> Result<String, IdentityError> {
        let name = self.to_string();
        match ServerName::try_from(name.as_str()) {
            Ok(ServerName::DnsName(_)) => Ok(name),
            _ => Err(IdentityError::Name {
                name,
                reason: "not a valid host name (parts between dots must not be empty and not begin or end with '-')"
                    .to_owned(),
            }),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinator => formatter.write_str(COORDINATOR),
            Self::Node(node) => write!(formatter, "{node}{NODE_SUFFIX}"),
            Self::App(query) => write!(formatter, "{query}{APP_SUFFIX}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        let node = |name: &str| Role::Node(NodeId::new(name).unwrap());
        let app = |name: &str| Role::App(QueryId::new(name).unwrap());
        for role in [
            Role::Coordinator,
            node("edge-1"),
            node("1.10"),
            node("on"),
            node("a_b"),
            node("coordinator.compass"),
            node("x.app.compass"),
            app("plant"),
            app("x.node.compass"),
        ] {
            let name = role.server_name().unwrap();
            assert_eq!(Role::parse(&name), Some(role), "{name}");
        }
    }

    #[test]
    fn other_names_are_nobody() {
        for name in [
            "",
            "compass",
            "coordinator.compass.example",
            "x.coordinator.compass",
            ".node.compass",
            "node.compass",
            "edge 1.node.compass",
            "Coordinator.compass",
            "*.node.compass",
        ] {
            assert_eq!(Role::parse(name), None, "{name}");
        }
    }

    #[test]
    fn ids_that_are_no_host_names_are_refused() {
        for id in ["-edge", "edge-", "a..b"] {
            let role = Role::Node(NodeId::new(id).unwrap());
            let message = role.server_name().unwrap_err().to_string();
            assert!(message.contains(id), "{message}");
        }
    }
}
