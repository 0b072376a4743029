//! What the agent keeps on disk: boot counter, the coordinator's addresses, its last target. Versioned JSON, written whole or not at all.
//!
//! One agent per folder: [`AgentStore::lock`]. A target that cannot be read is set aside, since the coordinator has it too; what nobody
//! else knows (the fleet joined) is an error.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use compass_shared::model::plan::NodeTarget;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const BOOT_FILE: &str = "boot.json";
const FLEET_FILE: &str = "fleet.json";
const TARGET_FILE: &str = "target.json";
const LOCK_FILE: &str = "lock";

/// Damaged targets that are kept for someone to look at.
const SET_ASIDE_MAX: u32 = 9;

/// Version of every record written here.
const VERSION: u32 = 1;

/// Why the folder could not be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The disk failed.
    #[error("{path}: {source}")]
    Disk {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The record cannot be read.
    #[error("{path} is damaged ({reason}); move it away to start without it")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How.
        reason: String,
    },
    /// Another agent works in the folder.
    #[error(
        "{folder} is in use by another agent{}; every agent needs a folder of its own (--data)",
        .process.map(|process| format!(" (process {process})")).unwrap_or_default()
    )]
    InUse {
        /// The folder.
        folder: PathBuf,
        /// The other one's process id, where it could be read.
        process: Option<u32>,
    },
}

/// While it is held no other agent works in the folder; it ends with the process at the latest.
#[derive(Debug)]
pub struct FolderLock {
    _file: File,
}

/// The fleet this node has joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fleet {
    /// `host:port` of the coordinator, best first.
    pub coordinator: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Record<T> {
    version: u32,
    value: T,
}

/// The agent's folder.
#[derive(Debug, Clone)]
pub struct AgentStore {
    folder: PathBuf,
}

impl AgentStore {
    /// Opens the folder, making it when it is missing.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn open(folder: &Path) -> Result<Self, StoreError> {
        fs::create_dir_all(folder).map_err(|source| StoreError::Disk {
            path: folder.to_owned(),
            source,
        })?;
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Takes the folder for this process alone.
    ///
    /// # Errors
    /// [`StoreError::InUse`] when another agent has it.
    pub fn lock(&self) -> Result<FolderLock, StoreError> {
        let path = self.folder.join(LOCK_FILE);
        let disk = |source| StoreError::Disk {
            path: path.clone(),
            source,
        };
        // Not emptied before it is ours: it names its holder.
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&path).map_err(disk)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Only words for the message.
                let _ = file.read_to_string(&mut holder);
                return Err(StoreError::InUse {
                    folder: self.folder.clone(),
                    process: holder.trim().parse().ok(),
                });
            }
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                tracing::warn!(path = %path.display(), "this file system has no locks: make sure that only one agent uses the folder");
            }
            Err(TryLockError::Error(error)) => return Err(disk(error)),
        }
        file.set_len(0).map_err(disk)?;
        writeln!(file, "{}", std::process::id()).map_err(disk)?;
        Ok(FolderLock { _file: file })
    }

    /// Counts this start and returns its number, from 1: it tells a restart from a clone of the folder.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn count_boot(&self) -> Result<u64, StoreError> {
        let boot = self.read::<u64>(BOOT_FILE)?.unwrap_or(0) + 1;
        self.write(BOOT_FILE, &boot)?;
        Ok(boot)
    }

    /// The fleet joined, if any.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn fleet(&self) -> Result<Option<Fleet>, StoreError> {
        self.read(FLEET_FILE)
    }

    /// Remembers the fleet joined.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn set_fleet(&self, fleet: &Fleet) -> Result<(), StoreError> {
        self.write(FLEET_FILE, fleet)
    }

    /// The last target, if any. One that cannot be read is set aside under another name, with a warning that names it: the node starts
    /// empty and gets its target from the coordinator again.
    ///
    /// # Errors
    /// [`StoreError::Disk`].
    pub fn target(&self) -> Result<Option<NodeTarget>, StoreError> {
        match self.read(TARGET_FILE) {
            Err(StoreError::Damaged { path, reason }) => {
                let aside = self.set_aside(&path)?;
                tracing::warn!(
                    kept_as = %aside.display(),
                    reason,
                    "the target kept on disk is damaged; starting without it"
                );
                Ok(None)
            }
            other => other,
        }
    }

    /// Renames a file to a name that is free; gives it.
    fn set_aside(&self, path: &Path) -> Result<PathBuf, StoreError> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let named = |number: u32| self.folder.join(format!("{name}.damaged-{number}"));
        // Whoever lets this many pile up does not look at them: the last one is written over.
        let number = (1..SET_ASIDE_MAX).find(|number| !named(*number).exists());
        let aside = named(number.unwrap_or(SET_ASIDE_MAX));
        fs::rename(path, &aside).map_err(|source| StoreError::Disk {
            path: path.to_owned(),
            source,
        })?;
        Ok(aside)
    }

    /// Remembers a target; it is durable when this returns.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn set_target(&self, target: &NodeTarget) -> Result<(), StoreError> {
        self.write(TARGET_FILE, target)
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, StoreError> {
        let path = self.folder.join(name);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StoreError::Disk { path, source }),
        };
        match serde_json::from_slice::<Record<T>>(&bytes) {
            Ok(record) if record.version == VERSION => Ok(Some(record.value)),
            Ok(record) => Err(StoreError::Damaged {
                path,
                reason: format!("version {} is not known", record.version),
            }),
            Err(error) => Err(StoreError::Damaged {
                path,
                reason: error.to_string(),
            }),
        }
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StoreError> {
        let path = self.folder.join(name);
        let write = || -> io::Result<()> {
            let bytes = serde_json::to_vec_pretty(&Record {
                version: VERSION,
                value,
            })?;
            let new = self.folder.join(format!("{name}.new"));
            let mut file = File::create(&new)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(|source| StoreError::Disk {
            path: path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use compass_shared::ids::{Commit, NodeId};

    #[test]
    fn boots_are_counted_and_a_target_survives() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path()).unwrap();
        assert_eq!(store.count_boot().unwrap(), 1);
        assert_eq!(
            AgentStore::open(folder.path())
                .unwrap()
                .count_boot()
                .unwrap(),
            2
        );
        assert_eq!(store.target().unwrap(), None);
        let target = NodeTarget {
            commit: Commit { term: 2, number: 3 },
            node: NodeId::new("no").unwrap(),
            instances: vec![],
            queries: vec![],
            peers: vec![],
            standby: vec![],
        };
        store.set_target(&target).unwrap();
        assert_eq!(store.target().unwrap(), Some(target));
    }

    #[test]
    fn a_damaged_target_is_set_aside_and_the_fleet_is_not_taken_for_absent() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path()).unwrap();
        let cut = "{\"version\":1,\"value\":{\"com";
        let newer = "{\"version\":9,\"value\":{\"coordinator\":[]}}";
        for (number, text) in [(1, cut), (2, newer), (3, "")] {
            fs::write(folder.path().join(TARGET_FILE), text).unwrap();
            assert_eq!(store.target().unwrap(), None);
            assert!(!folder.path().join(TARGET_FILE).exists());
            let aside = folder.path().join(format!("target.json.damaged-{number}"));
            assert_eq!(fs::read_to_string(aside).unwrap(), text);
        }
        for _ in 0..20 {
            fs::write(folder.path().join(TARGET_FILE), cut).unwrap();
            assert_eq!(store.target().unwrap(), None);
        }
        let kept = fs::read_dir(folder.path()).unwrap().count();
        assert_eq!(kept, SET_ASIDE_MAX as usize);

        fs::write(folder.path().join(FLEET_FILE), newer).unwrap();
        let error = store.fleet().unwrap_err().to_string();
        assert!(error.contains("fleet.json is damaged"), "{error}");
        assert!(error.contains("version 9"), "{error}");
    }

    #[test]
    fn a_folder_has_one_agent() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path()).unwrap();
        let held = store.lock().unwrap();
        let refused = store.lock().unwrap_err().to_string();
        let own = format!("in use by another agent (process {})", std::process::id());
        assert!(refused.contains(&own), "{refused}");
        assert!(refused.contains("--data"), "{refused}");
        drop(held);
        drop(store.lock().unwrap());
    }
}
