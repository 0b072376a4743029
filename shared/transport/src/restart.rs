//! Telling peers of an earlier life of this process that it is over.
//!
//! A process that was killed says no farewell, and its peers would wait for the idle timeout. QUIC lets the next process on the same address
//! answer packets of sessions it does not know with a reset that only the earlier process could have made: both derive it from a key that
//! outlives them. Then a restart is noticed with the first packet.

use std::fmt;
use std::sync::Arc;

use compass_shared::ids::Digest;
use quinn_proto::HashedConnectionIdGenerator;
use ring::hmac;

/// A secret that is the same before and after a restart.
#[derive(Clone)]
pub struct RestartKey(Digest);

impl fmt::Debug for RestartKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("RestartKey(secret hidden)")
    }
}

impl RestartKey {
    /// Derives it from a private key that outlives the process.
    pub(crate) fn derive(private_key_der: &[u8]) -> Self {
        Self(purpose(b"compass restart", private_key_der))
    }

    /// QUIC's settings of a socket whose sessions can be reset by the next process with the same key.
    pub(crate) fn quic_config(&self) -> quinn::EndpointConfig {
        let secret = self.0.as_bytes();
        let reset = purpose(b"compass stateless reset", secret);
        let reset = hmac::Key::new(hmac::HMAC_SHA256, reset.as_bytes());
        let mut config = quinn::EndpointConfig::new(Arc::new(reset));
        // Connection ids of the earlier process must look like our own, else their packets are dropped without an answer.
        let ids = purpose(b"compass connection ids", secret);
        let mut number = [0; 8];
        number.copy_from_slice(&ids.as_bytes()[..8]);
        let number = u64::from_le_bytes(number);
        config.cid_generator(move || Box::new(HashedConnectionIdGenerator::from_key(number)));
        config
    }
}

/// A secret of its own for each purpose.
fn purpose(name: &[u8], secret: &[u8]) -> Digest {
    Digest::of(&[name, secret].concat())
}
