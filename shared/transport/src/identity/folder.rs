//! Where a node keeps its identity: three small files in a folder of its own.

use std::path::{Path, PathBuf};

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::files::{self, Access};
use super::{Identity, IdentityError, PrivateKey};

const KEY_FILE: &str = "key.pem";
const CERTIFICATE_FILE: &str = "certificate.pem";
const AUTHORITY_FILE: &str = "authority.pem";

/// The folder with a node's key (0600), certificate and authority.
#[derive(Debug, Clone)]
pub struct IdentityFolder {
    path: PathBuf,
}

impl IdentityFolder {
    /// Names the folder; it is made when something is first written.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The node's key; drawn and stored when there is none yet, so that a repeated join uses the same key.
    ///
    /// # Errors
    /// When the key file is damaged, can be read by others, or is missing beside a certificate.
    pub fn key_or_create(&self) -> Result<PrivateKey, IdentityError> {
        if let Some(key) = self.key()? {
            return Ok(key);
        }
        if self.path.join(CERTIFICATE_FILE).exists() {
            return Err(self.key_missing());
        }
        let key = PrivateKey::generate();
        files::write(
            &self.path.join(KEY_FILE),
            key.to_pem().as_bytes(),
            Access::Private,
        )?;
        Ok(key)
    }

    /// The stored identity; `None` when the node has not joined yet.
    ///
    /// # Errors
    /// When any file is damaged or the files do not belong together.
    pub fn load(&self) -> Result<Option<Identity>, IdentityError> {
        let certificate_path = self.path.join(CERTIFICATE_FILE);
        let authority_path = self.path.join(AUTHORITY_FILE);
        let Some(certificate) = read_certificate(&certificate_path)? else {
            return Ok(None);
        };
        let Some(key) = self.key()? else {
            return Err(self.key_missing());
        };
        let Some(authority) = read_certificate(&authority_path)? else {
            return Err(files::damaged(
                &authority_path,
                "it is missing, but the node has a certificate",
            ));
        };
        Identity::new(key, certificate.to_vec(), authority.to_vec())
            .map(Some)
            .map_err(|error| files::damaged(&certificate_path, error))
    }

    /// Stores an identity. The certificate comes last: until it stands, the node has not joined.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn save(&self, identity: &Identity) -> Result<(), IdentityError> {
        let write = |name: &str, content: &str, access| {
            files::write(&self.path.join(name), content.as_bytes(), access)
        };
        if self.key()?.map(|key| key.fingerprint()) != Some(identity.key().fingerprint()) {
            write(KEY_FILE, &identity.key().to_pem(), Access::Private)?;
        }
        write(
            AUTHORITY_FILE,
            &to_pem(identity.authority()),
            Access::Public,
        )?;
        write(
            CERTIFICATE_FILE,
            &to_pem(identity.certificate()),
            Access::Public,
        )
    }

    fn key(&self) -> Result<Option<PrivateKey>, IdentityError> {
        let path = self.path.join(KEY_FILE);
        files::read_private(&path)?
            .map(|pem| PrivateKey::from_pem(&pem).map_err(|error| files::damaged(&path, error)))
            .transpose()
    }

    fn key_missing(&self) -> IdentityError {
        files::damaged(
            &self.path.join(KEY_FILE),
            "it is missing, but the node has a certificate",
        )
    }
}

fn read_certificate(path: &Path) -> Result<Option<CertificateDer<'static>>, IdentityError> {
    files::read(path)?
        .map(|pem| {
            CertificateDer::from_pem_slice(pem.as_bytes())
                .map_err(|error| files::damaged(path, error))
        })
        .transpose()
}

/// PEM of a certificate (RFC 7468: 64 characters a line).
pub(crate) fn to_pem(certificate: &CertificateDer<'_>) -> String {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(certificate);
    let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let (line, after) = rest.split_at(rest.len().min(64));
        pem.push_str(line);
        pem.push('\n');
        rest = after;
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}
