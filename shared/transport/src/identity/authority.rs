//! The coordinator's certificate authority.
//!
//! Start at [`CertificateAuthority::open_or_create`] and [`CertificateAuthority::issue`]. Names, usages and validity of
//! every certificate are decided here; from a signing request only the public key is taken, after its signature has
//! shown that the sender holds the private key.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::Digest;
use rand::TryRngCore;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose, PublicKeyData, SanType,
    SerialNumber,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer};

use super::certificate::key_fingerprint;
use super::files::{self, Access};
use super::folder::to_pem;
use super::{Identity, IdentityError, PrivateKey, Role};
use crate::clock::WallClock;
use crate::restart::RestartKey;

const KEY_FILE: &str = "authority-key.pem";
const CERTIFICATE_FILE: &str = "authority.pem";

/// The authority itself holds for twenty years: longer than the fleets it serves.
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(20 * 365 * 24 * 3600);

/// Largest signing request looked at, in bytes; a real one has about 250.
const REQUEST_BYTES_MAX: usize = 8 * 1024;

/// How long certificates hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthoritySettings {
    /// Of nodes; they renew after a third.
    pub node_lifetime: Duration,
    /// Of apps.
    pub app_lifetime: Duration,
    /// Of the coordinator, which issues itself a new one at each start.
    pub coordinator_lifetime: Duration,
    /// How far before the moment of issue a certificate begins to hold: nodes' clocks may be this far behind.
    pub backdate: Duration,
}

impl Default for AuthoritySettings {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 3600);
        Self {
            node_lifetime: 30 * DAY,
            app_lifetime: 2 * DAY,
            coordinator_lifetime: 365 * DAY,
            backdate: 2 * DAY,
        }
    }
}

/// Issues certificates for the roles of one fleet.
pub struct CertificateAuthority {
    issuer: Issuer<'static, rcgen::KeyPair>,
    certificate: CertificateDer<'static>,
    fingerprint: Digest,
    clock: Arc<WallClock>,
    settings: AuthoritySettings,
}

impl std::fmt::Debug for CertificateAuthority {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("CertificateAuthority")
            .field("fingerprint", &self.fingerprint)
            .finish_non_exhaustive()
    }
}

impl CertificateAuthority {
    /// Opens the authority kept in `folder`, or makes one on the first start.
    ///
    /// # Errors
    /// When a file is damaged, missing beside its sibling, or can be read by others: a second authority is never made
    /// silently, it would lock every node out.
    pub fn open_or_create(
        folder: &Path,
        clock: Arc<WallClock>,
        settings: AuthoritySettings,
    ) -> Result<Self, IdentityError> {
        let key_path = folder.join(KEY_FILE);
        let certificate_path = folder.join(CERTIFICATE_FILE);
        let stored = (
            files::read_private(&key_path)?,
            files::read(&certificate_path)?,
        );
        match stored {
            (None, None) => {
                let key = PrivateKey::generate();
                let certificate = self_signed(&key, &clock, settings)?;
                files::write(&key_path, key.to_pem().as_bytes(), Access::Private)?;
                files::write(
                    &certificate_path,
                    to_pem(&certificate).as_bytes(),
                    Access::Public,
                )?;
                Self::from_parts(key, certificate, clock, settings)
            }
            (Some(key), Some(certificate)) => {
                let key =
                    PrivateKey::from_pem(&key).map_err(|error| files::damaged(&key_path, error))?;
                let certificate = CertificateDer::from_pem_slice(certificate.as_bytes())
                    .map_err(|error| files::damaged(&certificate_path, error))?;
                if key_fingerprint(&certificate) != Some(key.fingerprint()) {
                    return Err(files::damaged(
                        &certificate_path,
                        "it does not belong to the key beside it",
                    ));
                }
                Self::from_parts(key, certificate, clock, settings)
                    .map_err(|error| files::damaged(&certificate_path, error))
            }
            (Some(key), None) => {
                // What an interrupted first start leaves. Peers know the authority by its key, so the certificate can
                // be made anew.
                let key =
                    PrivateKey::from_pem(&key).map_err(|error| files::damaged(&key_path, error))?;
                let certificate = self_signed(&key, &clock, settings)?;
                files::write(
                    &certificate_path,
                    to_pem(&certificate).as_bytes(),
                    Access::Public,
                )?;
                Self::from_parts(key, certificate, clock, settings)
            }
            (None, Some(_)) => Err(files::damaged(
                &key_path,
                "it is missing, but the authority's certificate exists",
            )),
        }
    }

    /// An authority that lives only in memory, for tests and simulations.
    pub fn in_memory(clock: Arc<WallClock>, settings: AuthoritySettings) -> Self {
        let key = PrivateKey::generate();
        let certificate =
            self_signed(&key, &clock, settings).expect("a fresh key signs its own certificate");
        Self::from_parts(key, certificate, clock, settings)
            .expect("a certificate just signed can be read")
    }

    /// SHA-256 of the authority's public key: what join tokens carry.
    pub fn fingerprint(&self) -> Digest {
        self.fingerprint
    }

    /// For the coordinator's endpoint, whose own key is drawn anew at each start.
    pub fn restart_key(&self) -> RestartKey {
        RestartKey::derive(self.issuer.key().serialized_der())
    }

    /// The authority's certificate (DER): what peers verify each other with.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The clock that certificates are dated by.
    pub fn clock(&self) -> &Arc<WallClock> {
        &self.clock
    }

    /// Issues a certificate for `role` to the key in a signing request (DER). Gives the chain, leaf first, authority
    /// last.
    ///
    /// # Errors
    /// When the request is damaged or its signature is not its own key's, or the role has no valid name.
    pub fn issue(&self, role: &Role, request_der: &[u8]) -> Result<Vec<Vec<u8>>, IdentityError> {
        let key = requested_key(request_der)?;
        let leaf = self.sign(role, &key)?;
        Ok(vec![leaf.to_vec(), self.certificate.to_vec()])
    }

    /// As [`CertificateAuthority::issue`], but only to the key with the given fingerprint: a renewal.
    ///
    /// # Errors
    /// As `issue`, and when the request is for another key.
    pub fn renew(
        &self,
        role: &Role,
        registered_key: Digest,
        request_der: &[u8],
    ) -> Result<Vec<Vec<u8>>, IdentityError> {
        let found = request_fingerprint(request_der)?;
        if found != registered_key {
            return Err(IdentityError::Mismatch(format!(
                "{role} is registered with key {}, the request is for {}",
                registered_key.short(),
                found.short()
            )));
        }
        self.issue(role, request_der)
    }

    /// A complete identity with a key drawn here: for the coordinator itself, and for tests.
    ///
    /// # Errors
    /// When the role has no valid name.
    pub fn identity(&self, role: &Role) -> Result<Identity, IdentityError> {
        let key = PrivateKey::generate();
        let leaf = self.sign(role, key.pair())?;
        Identity::new(key, leaf.to_vec(), self.certificate.to_vec())
    }

    fn from_parts(
        key: PrivateKey,
        certificate: CertificateDer<'static>,
        clock: Arc<WallClock>,
        settings: AuthoritySettings,
    ) -> Result<Self, IdentityError> {
        let fingerprint = key.fingerprint();
        let issuer = Issuer::from_ca_cert_der(&certificate, key.into_pair())
            .map_err(|error| IdentityError::Certificate(error.to_string()))?;
        Ok(Self {
            issuer,
            certificate,
            fingerprint,
            clock,
            settings,
        })
    }

    fn sign(
        &self,
        role: &Role,
        key: &impl PublicKeyData,
    ) -> Result<CertificateDer<'static>, IdentityError> {
        let name = role.server_name()?;
        let both = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let (lifetime, usages) = match role {
            Role::Coordinator => (self.settings.coordinator_lifetime, both),
            Role::Node(_) => (self.settings.node_lifetime, both),
            Role::App(_) => (
                self.settings.app_lifetime,
                vec![ExtendedKeyUsagePurpose::ClientAuth],
            ),
        };
        let mut params = dated(&self.clock, self.settings.backdate, lifetime);
        params
            .distinguished_name
            .push(DnType::CommonName, common_name(&name));
        let san = name
            .clone()
            .try_into()
            .map_err(|error: rcgen::Error| IdentityError::Name {
                name,
                reason: error.to_string(),
            })?;
        params.subject_alt_names = vec![SanType::DnsName(san)];
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = usages;
        params.use_authority_key_identifier_extension = true;
        params
            .signed_by(key, &self.issuer)
            .map(CertificateDer::from)
            .map_err(|error| IdentityError::Certificate(error.to_string()))
    }
}

/// The fingerprint of the key in a signing request whose signature is its own key's.
///
/// # Errors
/// When the request is damaged or signed by another key.
pub fn request_fingerprint(request_der: &[u8]) -> Result<Digest, IdentityError> {
    let key = requested_key(request_der)?;
    Ok(Digest::of(&key.subject_public_key_info()))
}

fn requested_key(request_der: &[u8]) -> Result<rcgen::PublicKey, IdentityError> {
    if request_der.len() > REQUEST_BYTES_MAX {
        return Err(IdentityError::Request(format!(
            "{} bytes, at most {REQUEST_BYTES_MAX} are looked at",
            request_der.len()
        )));
    }
    // The parser also copies names, usages and the CA flag from the request: only the key is taken from it.
    CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(request_der))
        .map(|request| request.public_key)
        .map_err(|error| IdentityError::Request(error.to_string()))
}

fn self_signed(
    key: &PrivateKey,
    clock: &WallClock,
    settings: AuthoritySettings,
) -> Result<CertificateDer<'static>, IdentityError> {
    let mut params = dated(clock, settings.backdate, AUTHORITY_LIFETIME);
    params
        .distinguished_name
        .push(DnType::CommonName, "Compass authority");
    // Several fleets' authorities must not look alike to a verifier that finds issuers by name.
    params
        .distinguished_name
        .push(DnType::OrganizationalUnitName, key.fingerprint().short());
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
        .self_signed(key.pair())
        .map(CertificateDer::from)
        .map_err(|error| IdentityError::Certificate(error.to_string()))
}

/// Parameters with validity and a random serial number, and nothing from anyone else.
fn dated(clock: &WallClock, backdate: Duration, lifetime: Duration) -> CertificateParams {
    let now = clock.now_unix_s();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let mut serial = [0_u8; 16];
    rand::rngs::OsRng
        .try_fill_bytes(&mut serial)
        .expect("the system gives entropy");
    // A serial number is positive and has no leading zero byte.
    serial[0] = (serial[0] & 0x7f) | 0x40;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = epoch + Duration::from_secs(now.saturating_sub(backdate.as_secs()));
    params.not_after = epoch + Duration::from_secs(now.saturating_add(lifetime.as_secs()));
    params
}

/// The subject for people; X.509 bounds it at 64 characters, and only the alternative name counts.
fn common_name(name: &str) -> String {
    name.chars().take(64).collect()
}
