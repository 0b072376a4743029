//! What the two sides of the joining protocol say, in protocol version 1.

use compass_shared::ids::NodeId;
use serde::{Deserialize, Serialize};

use super::token::Presented;

/// Node to coordinator, on the control stream.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum JoinRequest {
    /// A newcomer asks for its first certificate.
    Join {
        token: Presented,
        wanted: Option<NodeId>,
        request_der: Vec<u8>,
    },
    /// A member asks for a newer one.
    Renew { request_der: Vec<u8> },
}

/// Coordinator to node, on the same stream.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum JoinResponse {
    /// Leaf first, authority last.
    Issued { chain_der: Vec<Vec<u8>> },
    /// No.
    Refused(JoinRefusal),
}

/// Why a request to join or renew is refused; travels to the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum JoinRefusal {
    /// Never made here, or its secret is wrong.
    #[error("this token is not known here; make one with `compass token create`")]
    UnknownToken,
    /// Made here, too long ago.
    #[error("this token has expired; make a new one with `compass token create`")]
    ExpiredToken,
    /// Every use of it is spent, by other keys.
    #[error(
        "this token was already used by another node; make a new one with `compass token create`"
    )]
    UsedToken,
    /// Taken back.
    #[error("this token was revoked")]
    RevokedToken,
    /// Made for another node.
    #[error("this token is for node {expected}")]
    OtherNode {
        /// The node it is for.
        expected: NodeId,
    },
    /// Made for any node, and the newcomer did not say its name.
    #[error("this token is for any node: say the node's name")]
    NameNeeded,
    /// The name belongs to a member with another key.
    #[error(
        "node {node} is registered with another key; remove it first if this machine replaces it"
    )]
    OtherKey {
        /// The node.
        node: NodeId,
    },
    /// Not (or no longer) registered.
    #[error("node {node} is not a member of this fleet; join it again with a token")]
    NotAMember {
        /// The node.
        node: NodeId,
    },
    /// The request itself cannot be served.
    #[error("{0}")]
    BadRequest(String),
    /// The coordinator cannot answer at the moment.
    #[error("the coordinator cannot answer now: {0}")]
    Unavailable(String),
}

#[cfg(test)]
mod tests {
    use compass_shared::codec;

    use super::*;
    use crate::join::token::JoinToken;

    #[test]
    fn golden_bytes_of_version_1() {
        let node = NodeId::new("edge-7").unwrap();
        let request = JoinRequest::Join {
            token: JoinToken::from_parts([0xca; 32], [1; 8], [2; 24]).presented(),
            wanted: Some(node.clone()),
            request_der: vec![0x30, 0x00],
        };
        let expected = format!(
            "00{}{}0106656467652d37023000",
            "01".repeat(8),
            "02".repeat(24)
        );
        let cases = [
            (codec::encode(&request).unwrap(), expected.as_str()),
            (
                codec::encode(&JoinRequest::Renew {
                    request_der: vec![0x30],
                })
                .unwrap(),
                "010130",
            ),
            (
                codec::encode(&JoinResponse::Issued {
                    chain_der: vec![vec![1], vec![2, 3]],
                })
                .unwrap(),
                "00020101020203",
            ),
        ];
        for (bytes, expected) in cases {
            assert_eq!(hex::encode(bytes), expected);
        }
        let refusals = [
            (JoinRefusal::UnknownToken, "0100"),
            (JoinRefusal::ExpiredToken, "0101"),
            (JoinRefusal::UsedToken, "0102"),
            (JoinRefusal::RevokedToken, "0103"),
            (
                JoinRefusal::OtherNode {
                    expected: node.clone(),
                },
                "010406656467652d37",
            ),
            (JoinRefusal::NameNeeded, "0105"),
            (
                JoinRefusal::OtherKey { node: node.clone() },
                "010606656467652d37",
            ),
            (JoinRefusal::NotAMember { node }, "010706656467652d37"),
            (JoinRefusal::BadRequest("a".to_owned()), "01080161"),
            (JoinRefusal::Unavailable("b".to_owned()), "01090162"),
        ];
        for (refusal, expected) in refusals {
            let bytes = codec::encode(&JoinResponse::Refused(refusal)).unwrap();
            assert_eq!(hex::encode(&bytes), expected);
            assert!(codec::decode::<JoinResponse>(&bytes).is_ok());
        }
    }
}
