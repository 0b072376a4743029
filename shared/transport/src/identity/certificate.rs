//! Reading certificates: whose they are, when they hold, and who issued them.

use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::Digest;
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, RootCertStore};
use rustls_pki_types::{CertificateDer, UnixTime};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{IdentityError, Role};
use crate::tls;

/// What a certificate says, before anyone has decided to believe it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Whose it is.
    pub role: Role,
    /// SHA-256 of its public key (SPKI).
    pub key: Digest,
    /// First second it holds, since 1970.
    pub not_before_unix_s: u64,
    /// Last second it holds, since 1970.
    pub not_after_unix_s: u64,
}

impl CertificateFacts {
    /// Reads a leaf certificate of ours: exactly one name, and that a role.
    ///
    /// # Errors
    /// When it is not such a certificate.
    pub fn read(certificate: &CertificateDer<'_>) -> Result<Self, IdentityError> {
        let unusable = |reason: &str| IdentityError::Certificate(reason.to_owned());
        let (rest, parsed) = X509Certificate::from_der(certificate)
            .map_err(|error| IdentityError::Certificate(error.to_string()))?;
        if !rest.is_empty() {
            return Err(unusable("bytes after its end"));
        }
        let names = parsed
            .subject_alternative_name()
            .map_err(|error| IdentityError::Certificate(error.to_string()))?
            .ok_or_else(|| unusable("it names nobody"))?;
        let [GeneralName::DNSName(name)] = names.value.general_names.as_slice() else {
            return Err(unusable("it must carry exactly one name"));
        };
        let role = Role::parse(name).ok_or_else(|| {
            IdentityError::Certificate(format!("{name:?} is not the name of a role"))
        })?;
        let validity = parsed.validity();
        Ok(Self {
            role,
            key: Digest::of(parsed.public_key().raw),
            not_before_unix_s: unix_s(validity.not_before),
            not_after_unix_s: unix_s(validity.not_after),
        })
    }

    /// When to renew, in seconds since 1970: after a third of the lifetime, which began `backdate` after the first
    /// second the certificate holds.
    pub fn renew_at_unix_s(&self, backdate: Duration) -> u64 {
        let issued = self
            .not_before_unix_s
            .saturating_add(backdate.as_secs())
            .min(self.not_after_unix_s);
        issued + (self.not_after_unix_s - issued) / 3
    }
}

/// How a certificate of our authority stands at a given time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It holds.
    Valid,
    /// It held until `since_unix_s`.
    Expired {
        /// Last second it held.
        since_unix_s: u64,
    },
    /// It will hold from `from_unix_s`: a clock is likely wrong.
    NotYetValid {
        /// First second it holds.
        from_unix_s: u64,
    },
}

/// Checks that `authority` issued the certificate, whatever the time, and how it stands now.
///
/// The chain is verified at a time within the certificate's validity, so that "expired" and "issued by someone else"
/// cannot be taken for each other.
pub(crate) fn standing(
    certificate: &CertificateDer<'_>,
    facts: &CertificateFacts,
    authority: &CertificateDer<'_>,
    now_unix_s: u64,
) -> Result<Standing, String> {
    if facts.not_before_unix_s > facts.not_after_unix_s {
        return Err("its validity ends before it begins".to_owned());
    }
    let mut roots = RootCertStore::empty();
    roots
        .add(authority.clone().into_owned())
        .map_err(|error| format!("the authority's certificate is not usable: {error}"))?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), tls::provider())
        .build()
        .map_err(|error| error.to_string())?;
    let within = now_unix_s.clamp(facts.not_before_unix_s, facts.not_after_unix_s);
    let within = UnixTime::since_unix_epoch(Duration::from_secs(within));
    verifier
        .verify_client_cert(certificate, &[], within)
        .map_err(|error| match error {
            rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => "another authority issued it".to_owned(),
            other => other.to_string(),
        })?;
    Ok(if now_unix_s > facts.not_after_unix_s {
        Standing::Expired {
            since_unix_s: facts.not_after_unix_s,
        }
    } else if now_unix_s < facts.not_before_unix_s {
        Standing::NotYetValid {
            from_unix_s: facts.not_before_unix_s,
        }
    } else {
        Standing::Valid
    })
}

/// SHA-256 of the public key (SPKI) of any certificate; `None` when it cannot be read.
pub(crate) fn key_fingerprint(certificate: &CertificateDer<'_>) -> Option<Digest> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    Some(Digest::of(parsed.public_key().raw))
}

fn unix_s(time: x509_parser::time::ASN1Time) -> u64 {
    u64::try_from(time.timestamp()).unwrap_or(0)
}
