//! TLS as Compass uses it: version 1.3, ring, no resumption and no early data.
//!
//! A server asks for a client certificate and takes any whose key the client proves to hold; `authorise` judges it
//! afterwards, so that the reason for a refusal reaches the peer in words. A client is stricter: the handshake fails
//! unless the server is exactly the role it dialled, see [`ServerTrust`].

use std::sync::Arc;

use compass_shared::ids::Digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

use crate::authorise::{Alpn, Trust};
use crate::identity::{CertificateFacts, Identity, Role, Standing, key_fingerprint, standing};

/// What a dialler takes as proof that the peer is who it should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerTrust {
    /// A valid certificate of this process's own authority.
    Authority,
    /// The key with this fingerprint, whatever the certificate's dates: between neighbours that the target names.
    Key(Digest),
    /// A valid certificate of the authority with this fingerprint, which the server shows along with its own: for
    /// newcomers, who know it from a token.
    AuthorityFingerprint(Digest),
}

/// The crypto provider, passed explicitly everywhere so that no process-wide default is needed.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    rustls::crypto::ring::default_provider().signature_verification_algorithms
}

/// What this process shows and accepts as a server.
pub(crate) fn server_config(
    identity: &Identity,
    accept: &[Alpn],
    trust: &Trust,
) -> Result<quinn::crypto::rustls::QuicServerConfig, Error> {
    let mut config = rustls::ServerConfig::builder_with_details(provider(), trust.clock().clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(KeyProof))
        .with_single_cert(identity.chain(), identity.key().to_der())?;
    config.alpn_protocols = accept
        .iter()
        .map(|alpn| alpn.name().as_bytes().to_vec())
        .collect();
    // Resumption would let a peer in without showing its certificate again; early data can be replayed.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
    config.max_early_data_size = 0;
    quinn::crypto::rustls::QuicServerConfig::try_from(config)
        .map_err(|error| Error::General(error.to_string()))
}

/// What this process shows and demands when it dials.
pub(crate) fn client_config(
    identity: Option<&Identity>,
    alpn: Alpn,
    expected: Role,
    server_trust: ServerTrust,
    trust: &Arc<Trust>,
) -> Result<quinn::crypto::rustls::QuicClientConfig, Error> {
    let verifier = ExactRole {
        expected,
        server_trust,
        trust: Arc::clone(trust),
    };
    let builder = rustls::ClientConfig::builder_with_details(provider(), trust.clock().clone())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match identity {
        Some(identity) => {
            builder.with_client_auth_cert(identity.chain(), identity.key().to_der())?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.name().as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    config.enable_early_data = false;
    quinn::crypto::rustls::QuicClientConfig::try_from(config)
        .map_err(|error| Error::General(error.to_string()))
}

/// Server side: takes any certificate whose key the peer proves to hold.
#[derive(Debug)]
struct KeyProof;

impl ClientCertVerifier for KeyProof {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

/// Client side: the server must be exactly the role dialled, by the kind of proof asked for.
#[derive(Debug)]
struct ExactRole {
    expected: Role,
    server_trust: ServerTrust,
    trust: Arc<Trust>,
}

impl ExactRole {
    fn check(
        &self,
        leaf: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now_unix_s: u64,
    ) -> Result<(), String> {
        let facts = CertificateFacts::read(leaf).map_err(|error| error.to_string())?;
        if facts.role != self.expected {
            return Err(format!(
                "the peer is {}, expected {}",
                facts.role, self.expected
            ));
        }
        let authority = match self.server_trust {
            ServerTrust::Key(key) if facts.key == key => return Ok(()),
            ServerTrust::Key(key) => {
                return Err(format!(
                    "{} shows key {}, expected key {}",
                    facts.role,
                    facts.key.short(),
                    key.short()
                ));
            }
            ServerTrust::Authority => self
                .trust
                .authority()
                .ok_or("this side has not joined a fleet yet")?,
            ServerTrust::AuthorityFingerprint(fingerprint) => others
                .iter()
                .find(|other| key_fingerprint(other) == Some(fingerprint))
                .ok_or_else(|| {
                    format!(
                        "the peer does not belong to the fleet of authority {}",
                        fingerprint.short()
                    )
                })?
                .clone()
                .into_owned(),
        };
        match standing(leaf, &facts, &authority, now_unix_s)
            .map_err(|reason| format!("certificate of {}: {reason}", facts.role))?
        {
            Standing::Valid => Ok(()),
            Standing::Expired { since_unix_s } => Err(format!(
                "certificate of {} expired {} s ago by this side's clock",
                facts.role,
                now_unix_s - since_unix_s
            )),
            Standing::NotYetValid { from_unix_s } => Err(format!(
                "certificate of {} begins to hold in {} s by this side's clock: one of the clocks is wrong",
                facts.role,
                from_unix_s - now_unix_s
            )),
        }
    }
}

impl ServerCertVerifier for ExactRole {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end_entity, intermediates, now.as_secs())
            .map(|()| ServerCertVerified::assertion())
            .map_err(Error::General)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}
