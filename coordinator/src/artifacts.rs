//! Model files: pushed by people, fetched by agents, named by their SHA-256, one file each beside the store.
//!
//! Start at [`Artifacts::receive`] and [`Artifacts::open_at`]. A file appears under its name only after every byte is on the disk and the
//! digest is right; what is half written lies under another name and is removed at the next start.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use compass_shared::ids::Digest;
use sha2::{Digest as _, Sha256};

/// What lies under another name until it is whole.
const PARTIAL: &str = ".partial";

/// Why an artifact was not taken or given.
#[derive(Debug, thiserror::Error)]
pub enum ArtifactError {
    /// The bytes are not what their name says.
    #[error("the bytes have SHA-256 {found}, announced was {announced}")]
    WrongDigest {
        /// As pushed.
        found: Digest,
        /// As announced.
        announced: Digest,
    },
    /// The catalogue knows the name with other contents only.
    #[error("the bytes have SHA-256 {found}, the catalogue has {} for this name", list(.known))]
    NotInCatalogue {
        /// As pushed.
        found: Digest,
        /// As the catalogue has it.
        known: Vec<Digest>,
    },
    /// The sender broke off.
    #[error("the upload broke off")]
    BrokenOff,
    /// More bytes than one artifact may have.
    #[error("larger than the limit of {limit} bytes")]
    TooLarge {
        /// In bytes.
        limit: u64,
    },
    /// No room for another.
    #[error("the artifacts would exceed their limit of {limit} bytes: remove some first")]
    Full {
        /// In bytes.
        limit: u64,
    },
    /// It is not here.
    #[error("artifact {0} is not here: push it with `compass artifact push`")]
    Unknown(Digest),
    /// An agent asked for bytes beyond the end.
    #[error("offset {offset} is beyond the end ({bytes} bytes)")]
    BeyondEnd {
        /// What was asked for.
        offset: u64,
        /// The size.
        bytes: u64,
    },
    /// The disk.
    #[error("disk: {0}")]
    Disk(#[from] std::io::Error),
}

fn list(digests: &[Digest]) -> String {
    let texts: Vec<_> = digests.iter().map(Digest::to_string).collect();
    texts.join(", ")
}

/// The folder.
#[derive(Debug)]
pub struct Artifacts {
    folder: PathBuf,
    bytes_max: u64,
    total_max: u64,
    total: AtomicU64,
    uploads: AtomicU64,
}

/// An artifact on its way in.
#[derive(Debug)]
pub struct Upload<'a> {
    artifacts: &'a Artifacts,
    path: PathBuf,
    file: std::fs::File,
    hash: Sha256,
    bytes: u64,
    kept: bool,
}

impl Artifacts {
    /// Opens or makes the folder; removes what earlier processes left half written.
    ///
    /// # Errors
    /// When the folder cannot be used.
    pub fn open(folder: &Path, bytes_max: u64, total_max: u64) -> Result<Self, ArtifactError> {
        std::fs::create_dir_all(folder)?;
        let mut total = 0;
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().ends_with(PARTIAL) {
                std::fs::remove_file(entry.path())?;
            } else {
                total += entry.metadata()?.len();
            }
        }
        Ok(Self {
            folder: folder.to_owned(),
            bytes_max,
            total_max,
            total: AtomicU64::new(total),
            uploads: AtomicU64::new(0),
        })
    }

    /// Whether an artifact is here, and its size in bytes.
    pub fn size(&self, digest: &Digest) -> Option<u64> {
        std::fs::metadata(self.path(digest))
            .ok()
            .map(|metadata| metadata.len())
    }

    /// Begins to take an artifact in. Blocking; so are the upload's calls.
    ///
    /// # Errors
    /// When the disk fails.
    pub fn receive(&self) -> Result<Upload<'_>, ArtifactError> {
        let number = self.uploads.fetch_add(1, Ordering::Relaxed);
        let path = self
            .folder
            .join(format!("{}-{number}{PARTIAL}", std::process::id()));
        let file = std::fs::File::create(&path)?;
        Ok(Upload {
            artifacts: self,
            path,
            file,
            hash: Sha256::new(),
            bytes: 0,
            kept: false,
        })
    }

    /// An artifact's bytes from an offset on, and its whole size. Blocking.
    ///
    /// # Errors
    /// When it is not here or the offset is beyond its end.
    pub fn open_at(
        &self,
        digest: &Digest,
        offset: u64,
    ) -> Result<(std::fs::File, u64), ArtifactError> {
        let mut file = match std::fs::File::open(self.path(digest)) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(ArtifactError::Unknown(*digest));
            }
            Err(error) => return Err(error.into()),
        };
        let bytes = file.metadata()?.len();
        if offset > bytes {
            return Err(ArtifactError::BeyondEnd { offset, bytes });
        }
        file.seek(SeekFrom::Start(offset))?;
        Ok((file, bytes))
    }

    fn path(&self, digest: &Digest) -> PathBuf {
        self.folder.join(digest.to_string())
    }
}

impl Upload<'_> {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// Above a limit, or when the disk fails; the upload is then to be dropped.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ArtifactError> {
        let more = bytes.len() as u64;
        // Counted before it is judged: the drop takes it back, and uploads side by side cannot pass the limit together.
        self.bytes += more;
        let total = self.artifacts.total.fetch_add(more, Ordering::Relaxed) + more;
        let limit = self.artifacts.bytes_max;
        if self.bytes > limit {
            return Err(ArtifactError::TooLarge { limit });
        }
        let limit = self.artifacts.total_max;
        if total > limit {
            return Err(ArtifactError::Full { limit });
        }
        self.hash.update(bytes);
        self.file.write_all(bytes)?;
        Ok(())
    }

    /// Keeps the artifact if it is what was announced (and, where `known` is not empty, one of those); durable when this returns. Gives
    /// its digest and size in bytes.
    ///
    /// # Errors
    /// [`ArtifactError::WrongDigest`] or [`ArtifactError::NotInCatalogue`], or when the disk fails.
    pub fn finish(
        mut self,
        announced: Option<&Digest>,
        known: &[Digest],
    ) -> Result<(Digest, u64), ArtifactError> {
        let found = Digest::from_bytes(std::mem::take(&mut self.hash).finalize().into());
        if let Some(announced) = announced
            && found != *announced
        {
            return Err(ArtifactError::WrongDigest {
                found,
                announced: *announced,
            });
        }
        if !known.is_empty() && !known.contains(&found) {
            return Err(ArtifactError::NotInCatalogue {
                found,
                known: known.to_vec(),
            });
        }
        self.file.sync_all()?;
        let is_new = self.artifacts.size(&found).is_none();
        std::fs::rename(&self.path, self.artifacts.path(&found))?;
        self.kept = true;
        std::fs::File::open(&self.artifacts.folder)?.sync_all()?;
        if !is_new {
            self.artifacts
                .total
                .fetch_sub(self.bytes, Ordering::Relaxed);
        }
        Ok((found, self.bytes))
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.artifacts
                .total
                .fetch_sub(self.bytes, Ordering::Relaxed);
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Reads up to `count` bytes; fewer only at the end. Blocking.
///
/// # Errors
/// When the disk fails.
pub fn read_chunk(file: &mut std::fs::File, count: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(count);
    file.take(count as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifacts(folder: &Path) -> Artifacts {
        Artifacts::open(folder, 100, 150).unwrap()
    }

    fn files(folder: &Path) -> usize {
        std::fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_pushed_artifact_is_given_from_any_offset() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = artifacts(folder.path());
        let digest = Digest::of(b"model bytes");
        let mut upload = artifacts.receive().unwrap();
        upload.write(b"model ").unwrap();
        upload.write(b"bytes").unwrap();
        assert_eq!(upload.finish(Some(&digest), &[]).unwrap(), (digest, 11));
        let (mut file, bytes) = artifacts.open_at(&digest, 6).unwrap();
        assert_eq!(bytes, 11);
        assert_eq!(read_chunk(&mut file, 3).unwrap(), b"byt");
        assert_eq!(read_chunk(&mut file, 100).unwrap(), b"es");
        assert!(matches!(
            artifacts.open_at(&digest, 12),
            Err(ArtifactError::BeyondEnd { .. })
        ));
        assert!(matches!(
            artifacts.open_at(&Digest::of(b""), 0),
            Err(ArtifactError::Unknown(_))
        ));
    }

    #[test]
    fn wrong_large_and_abandoned_pushes_leave_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = artifacts(folder.path());
        let mut wrong = artifacts.receive().unwrap();
        wrong.write(b"corrupt").unwrap();
        let refused = wrong
            .finish(Some(&Digest::of(b"announced")), &[])
            .unwrap_err();
        assert!(matches!(refused, ArtifactError::WrongDigest { .. }));
        let mut unknown = artifacts.receive().unwrap();
        unknown.write(b"corrupt").unwrap();
        let refused = unknown.finish(None, &[Digest::of(b"model")]).unwrap_err();
        assert!(matches!(refused, ArtifactError::NotInCatalogue { .. }));
        let mut large = artifacts.receive().unwrap();
        assert!(matches!(
            large.write(&[0; 101]),
            Err(ArtifactError::TooLarge { limit: 100 })
        ));
        drop(large);
        let mut abandoned = artifacts.receive().unwrap();
        abandoned.write(b"half").unwrap();
        drop(abandoned);
        assert_eq!(files(folder.path()), 0);
    }

    #[test]
    fn the_whole_folder_has_a_bound_and_leftovers_of_a_crash_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("77-0.partial"), b"half").unwrap();
        let artifacts = artifacts(folder.path());
        assert_eq!(files(folder.path()), 0);
        for (fill, fits) in [(1_u8, true), (2, false), (1, false)] {
            let bytes = [fill; 100];
            let mut upload = artifacts.receive().unwrap();
            assert_eq!(upload.write(&bytes).is_ok(), fits);
            if fits {
                upload.finish(Some(&Digest::of(&bytes)), &[]).unwrap();
            }
        }
    }
}
