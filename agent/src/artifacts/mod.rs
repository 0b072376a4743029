//! The node's store of artifacts (model files): fetched once, verified, bounded.
//!
//! Start at [`ArtifactCache::ensure`]. A file named by its digest is whole and was verified before it got that name; `….part` is a fetch
//! that was cut and goes on where it stopped. When room is needed, the longest unused file goes first.
//!
//! Deliberately absent: where the bytes come from ([`ArtifactSource`]), and which artifacts are needed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use compass_shared::ids::Digest;
use sha2::{Digest as _, Sha256};

#[cfg(test)]
mod tests;

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
    #[error("artifact {} ({bytes} bytes) does not fit into the cache of {max_bytes} bytes beside those in use", digest.short())]
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

fn disk(path: &Path) -> impl Fn(io::Error) -> ArtifactError {
    move |error| ArtifactError::Disk(format!("{}: {error}", path.display()))
}

/// The artifacts in a folder.
#[derive(Debug)]
pub struct ArtifactCache {
    folder: PathBuf,
    max_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// One gate per artifact somebody waits for, so that it is fetched once.
    gates: BTreeMap<Digest, Arc<tokio::sync::Mutex<()>>>,
    /// Artifacts being fetched, with their full sizes: room that is spoken for.
    fetching: BTreeMap<Digest, u64>,
    /// Must stay.
    protected: BTreeSet<Digest>,
    /// Verified since this process started: a disk may rot while the power is off.
    verified: BTreeSet<Digest>,
}

impl ArtifactCache {
    /// Opens (or makes) the folder.
    ///
    /// # Errors
    /// When the folder cannot be made or read.
    pub fn new(folder: PathBuf, max_bytes: u64) -> Result<Self, ArtifactError> {
        fs::create_dir_all(&folder).map_err(disk(&folder))?;
        fs::read_dir(&folder).map_err(disk(&folder))?;
        Ok(Self {
            folder,
            max_bytes,
            state: Mutex::default(),
        })
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
        let gate = self.lock().gates.entry(digest).or_default().clone();
        let entered = gate.lock().await;
        let outcome = self.ensure_alone(digest, bytes, source).await;
        drop(entered);
        let mut state = self.lock();
        // Nobody else holds or waits at the gate: two references, the map's and ours.
        if Arc::strong_count(&gate) == 2 {
            state.gates.remove(&digest);
        }
        outcome
    }

    async fn ensure_alone(
        &self,
        digest: Digest,
        bytes: u64,
        source: &dyn ArtifactSource,
    ) -> Result<PathBuf, ArtifactError> {
        let path = self.folder.join(digest.to_string());
        if self.is_whole(&path, digest, bytes).await? {
            // Its age is what decides who goes first.
            let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
            return Ok(path);
        }
        let _room = self.make_room(digest, bytes)?;
        let part_path = path.with_extension("part");
        loop {
            let mut part = open_part(part_path.clone(), bytes).await?;
            let resumed_at = part.length;
            if part.length < bytes {
                let fetched = source.fetch(digest, resumed_at, &mut part).await;
                let reason = match fetched {
                    Err(reason) => Some(reason),
                    Ok(()) if part.length < bytes => {
                        Some(format!("it ended after {} of {bytes} bytes", part.length))
                    }
                    Ok(()) => None,
                };
                if let Some(reason) = reason {
                    return Err(ArtifactError::Fetch { digest, reason });
                }
            }
            if part.digest() == digest {
                part.file.sync_all().map_err(disk(&part_path))?;
                fs::rename(&part_path, &path).map_err(disk(&path))?;
                self.lock().verified.insert(digest);
                return Ok(path);
            }
            fs::remove_file(&part_path).map_err(disk(&part_path))?;
            if resumed_at == 0 {
                let reason = format!("its content has digest {}", part.digest().short());
                return Err(ArtifactError::Corrupt { digest, reason });
            }
            // The beginning left by an earlier attempt may have been bad: once more, from the start.
        }
    }

    /// Whether the file is there and good; a bad one is removed.
    async fn is_whole(
        &self,
        path: &Path,
        digest: Digest,
        bytes: u64,
    ) -> Result<bool, ArtifactError> {
        let Ok(metadata) = fs::metadata(path) else {
            return Ok(false);
        };
        if metadata.len() == bytes {
            if self.lock().verified.contains(&digest) {
                return Ok(true);
            }
            let part = open_part(path.to_owned(), bytes).await?;
            if part.digest() == digest {
                self.lock().verified.insert(digest);
                return Ok(true);
            }
        }
        tracing::warn!(artifact = %digest.short(), "a damaged artifact is fetched again");
        fs::remove_file(path).map_err(disk(path))?;
        Ok(false)
    }

    /// Frees room for an artifact and holds it while the returned value lives.
    fn make_room(&self, digest: Digest, bytes: u64) -> Result<Room<'_>, ArtifactError> {
        let mut state = self.lock();
        let mut spoken_for: u64 = state.fetching.values().sum();
        let mut candidates = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(disk(&self.folder))? {
            let entry = entry.map_err(disk(&self.folder))?;
            let metadata = entry.metadata().map_err(disk(&entry.path()))?;
            let Some(owner) = owner(&entry.path()) else {
                continue;
            };
            if owner == digest || state.fetching.contains_key(&owner) {
                continue;
            }
            spoken_for += metadata.len();
            if !state.protected.contains(&owner) {
                let age = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                candidates.push((age, entry.path(), metadata.len(), owner));
            }
        }
        candidates.sort();
        for (_, path, length, owner) in candidates {
            if spoken_for.saturating_add(bytes) <= self.max_bytes {
                break;
            }
            fs::remove_file(&path).map_err(disk(&path))?;
            state.verified.remove(&owner);
            spoken_for -= length;
        }
        if spoken_for.saturating_add(bytes) > self.max_bytes {
            let max_bytes = self.max_bytes;
            return Err(ArtifactError::TooLarge {
                digest,
                bytes,
                max_bytes,
            });
        }
        state.fetching.insert(digest, bytes);
        Ok(Room {
            cache: self,
            digest,
        })
    }

    /// Artifacts that are here whole, by digest.
    pub fn held(&self) -> Vec<Digest> {
        let mut held: Vec<Digest> = fs::read_dir(&self.folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        held.sort();
        held
    }

    /// Names the artifacts that must stay (those of the current target); all others go when room is needed, longest unused first.
    pub fn protect(&self, digests: BTreeSet<Digest>) {
        self.lock().protected = digests;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Room in the cache that is spoken for.
struct Room<'a> {
    cache: &'a ArtifactCache,
    digest: Digest,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.cache.lock().fetching.remove(&self.digest);
    }
}

/// The artifact a file of the folder belongs to; `None` for files that are not ours.
fn owner(path: &Path) -> Option<Digest> {
    match path.extension() {
        None => {}
        Some(extension) if extension == "part" => {}
        Some(_) => return None,
    }
    path.file_stem()?.to_str()?.parse().ok()
}

/// The beginning of an artifact on disk, open for more.
struct Part {
    file: File,
    hash: Sha256,
    length: u64,
    max_bytes: u64,
}

impl Part {
    fn digest(&self) -> Digest {
        Digest::from_bytes(self.hash.clone().finalize().into())
    }
}

impl ArtifactSink for Part {
    fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.length + piece.len() as u64 > self.max_bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("more than the {} bytes announced", self.max_bytes),
            ));
        }
        self.file.write_all(piece)?;
        self.hash.update(piece);
        self.length += piece.len() as u64;
        Ok(())
    }
}

/// Opens what there is of a file (nothing, if it is longer than it may be) and hashes it.
async fn open_part(path: PathBuf, max_bytes: u64) -> Result<Part, ArtifactError> {
    let work = move || {
        let open = File::options()
            .read(true)
            .append(true)
            .create(true)
            .open(&path);
        let mut file = open.map_err(disk(&path))?;
        if file.metadata().map_err(disk(&path))?.len() > max_bytes {
            file.set_len(0).map_err(disk(&path))?;
        }
        let (mut hash, mut length) = (Sha256::new(), 0);
        let mut buffer = vec![0; 1 << 16];
        loop {
            let read = file.read(&mut buffer).map_err(disk(&path))?;
            if read == 0 {
                break;
            }
            hash.update(&buffer[..read]);
            length += read as u64;
        }
        Ok(Part {
            file,
            hash,
            length,
            max_bytes,
        })
    };
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|e| Err(ArtifactError::Disk(e.to_string())))
}
