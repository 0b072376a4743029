//! Who a process is: roles, keys, certificates, and the files they live in.
//!
//! Start at [`Identity`] (what a process presents), [`CertificateAuthority`] (the coordinator's, which issues
//! identities) and [`IdentityFolder`] (where an agent keeps its own). A name is a role, not a host: see [`Role`].
//!
//! Deliberately absent: deciding what a role may do (see `authorise`), and getting a first certificate (see `join`).

mod authority;
mod certificate;
pub(crate) mod files;
mod folder;
mod role;

use std::fmt;

use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

pub use authority::{AuthoritySettings, CertificateAuthority, request_fingerprint};
pub use certificate::{CertificateFacts, Standing};
pub(crate) use certificate::{key_fingerprint, standing};
pub use folder::IdentityFolder;
pub use role::Role;

use compass_shared::ids::Digest;

use crate::restart::RestartKey;

/// What can go wrong with keys, certificates and their files.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file exists but does not hold what it should. It is left as it is: silently making a new identity would turn
    /// one node into two.
    #[error(
        "identity damaged: {path}: {reason}; restore the file, or remove the folder to join as a new node"
    )]
    Damaged {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A private key that others can read.
    #[error("{path} can be read by others (mode {mode:04o}): run chmod 600 on it")]
    Exposed {
        /// The file.
        path: String,
        /// Its permission bits.
        mode: u32,
    },
    /// A certificate that this program cannot use.
    #[error("certificate not usable: {0}")]
    Certificate(String),
    /// A signing request that is damaged or not signed by its own key.
    #[error("signing request refused: {0}")]
    Request(String),
    /// A role whose name cannot stand in a certificate.
    #[error("{name} cannot stand in a certificate: {reason}")]
    Name {
        /// The role's name.
        name: String,
        /// Why not.
        reason: String,
    },
    /// The certificate does not belong to the key, role or authority it was expected to belong to.
    #[error("certificate does not fit: {0}")]
    Mismatch(String),
}

/// A private key that never shows itself.
pub struct PrivateKey {
    pair: rcgen::KeyPair,
}

impl PrivateKey {
    /// Draws a new key (ECDSA on P-256).
    pub fn generate() -> Self {
        let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256)
            .expect("the algorithm is supported and the system gives entropy");
        Self { pair }
    }

    /// Reads a key from PEM.
    ///
    /// # Errors
    /// A message without the key's content.
    pub fn from_pem(pem: &str) -> Result<Self, IdentityError> {
        rcgen::KeyPair::from_pem(pem)
            .map(|pair| Self { pair })
            .map_err(|error| IdentityError::Certificate(format!("not a private key: {error}")))
    }

    /// The key as PEM, for its file.
    pub fn to_pem(&self) -> zeroize::Zeroizing<String> {
        zeroize::Zeroizing::new(self.pair.serialize_pem())
    }

    /// SHA-256 of the public key (its SPKI): what peers know the key by.
    pub fn fingerprint(&self) -> Digest {
        use rcgen::PublicKeyData as _;
        Digest::of(&self.pair.subject_public_key_info())
    }

    /// A signing request (DER) that proves possession of the key and says nothing else.
    pub fn signing_request(&self) -> Vec<u8> {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .serialize_request(&self.pair)
            .expect("a request without names can always be signed")
            .der()
            .to_vec()
    }

    /// For endpoints of this key's holder: the same in every process that holds it.
    pub(crate) fn restart_key(&self) -> RestartKey {
        RestartKey::derive(self.pair.serialized_der())
    }

    pub(crate) fn pair(&self) -> &rcgen::KeyPair {
        &self.pair
    }

    pub(crate) fn into_pair(self) -> rcgen::KeyPair {
        self.pair
    }

    pub(crate) fn to_der(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.pair.serialize_der()))
    }
}

impl Clone for PrivateKey {
    fn clone(&self) -> Self {
        let pair = rcgen::KeyPair::try_from(self.pair.serialized_der())
            .expect("a key reads back what it wrote");
        Self { pair }
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PrivateKey({})", self.fingerprint().short())
    }
}

/// What a process presents to its peers: a key, its certificate, and the authority that issued it.
#[derive(Debug, Clone)]
pub struct Identity {
    key: PrivateKey,
    certificate: CertificateDer<'static>,
    authority: CertificateDer<'static>,
    facts: CertificateFacts,
}

impl Identity {
    /// Puts the parts together.
    ///
    /// # Errors
    /// When the certificate is not the key's, or was not issued by `authority`.
    pub fn new(
        key: PrivateKey,
        certificate_der: Vec<u8>,
        authority_der: Vec<u8>,
    ) -> Result<Self, IdentityError> {
        let certificate = CertificateDer::from(certificate_der);
        let authority = CertificateDer::from(authority_der);
        let facts = CertificateFacts::read(&certificate)?;
        if facts.key != key.fingerprint() {
            return Err(IdentityError::Mismatch(
                "it was issued for another key".to_owned(),
            ));
        }
        // Any time within its validity will do: only the issuer is in question here.
        standing(&certificate, &facts, &authority, facts.not_before_unix_s).map_err(|reason| {
            IdentityError::Mismatch(format!("it was not issued by this authority: {reason}"))
        })?;
        Ok(Self {
            key,
            certificate,
            authority,
            facts,
        })
    }

    /// From a chain as messages carry it: leaf first, authority last.
    ///
    /// # Errors
    /// As [`Identity::new`], and when the chain has fewer than two certificates.
    pub fn from_chain(key: PrivateKey, chain_der: Vec<Vec<u8>>) -> Result<Self, IdentityError> {
        let mut chain = chain_der.into_iter();
        match (chain.next(), chain.next_back()) {
            (Some(leaf), Some(authority)) => Self::new(key, leaf, authority),
            _ => Err(IdentityError::Certificate(
                "the chain needs a leaf and its authority".to_owned(),
            )),
        }
    }

    /// The same key and role with a newer certificate, as a renewal brings it.
    ///
    /// # Errors
    /// When the certificate is for another key or role, or of another authority.
    pub fn renewed(&self, chain_der: Vec<Vec<u8>>) -> Result<Self, IdentityError> {
        let renewed = Self::from_chain(self.key.clone(), chain_der)?;
        if renewed.facts.role != self.facts.role {
            return Err(IdentityError::Mismatch(format!(
                "it is for {}, this is {}",
                renewed.facts.role, self.facts.role
            )));
        }
        // The authority is its key: its certificate may have been made anew.
        if key_fingerprint(&renewed.authority) != key_fingerprint(&self.authority) {
            return Err(IdentityError::Mismatch(
                "it comes from another authority".to_owned(),
            ));
        }
        Ok(renewed)
    }

    /// Role, key and validity.
    pub fn facts(&self) -> &CertificateFacts {
        &self.facts
    }

    /// The role its certificate names.
    pub fn role(&self) -> &Role {
        &self.facts.role
    }

    /// The private key.
    pub fn key(&self) -> &PrivateKey {
        &self.key
    }

    /// The leaf certificate (DER).
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The authority's certificate (DER).
    pub fn authority(&self) -> &CertificateDer<'static> {
        &self.authority
    }

    /// Leaf first, authority last.
    pub(crate) fn chain(&self) -> Vec<CertificateDer<'static>> {
        vec![self.certificate.clone(), self.authority.clone()]
    }
}

#[cfg(test)]
mod tests;
