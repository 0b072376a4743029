//! What the agent keeps on disk: boot counter, the coordinator's addresses, its last target. Versioned JSON, written whole or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use compass_shared::model::plan::NodeTarget;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

const BOOT_FILE: &str = "boot.json";
const FLEET_FILE: &str = "fleet.json";
const TARGET_FILE: &str = "target.json";

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

    /// The last target, if any.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub fn target(&self) -> Result<Option<NodeTarget>, StoreError> {
        self.read(TARGET_FILE)
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
        };
        store.set_target(&target).unwrap();
        assert_eq!(store.target().unwrap(), Some(target));
    }

    #[test]
    fn a_damaged_record_is_named_and_not_taken_for_absent() {
        let folder = tempfile::tempdir().unwrap();
        let store = AgentStore::open(folder.path()).unwrap();
        fs::write(
            folder.path().join(TARGET_FILE),
            "{\"version\":1,\"value\":{\"com",
        )
        .unwrap();
        let error = store.target().unwrap_err().to_string();
        assert!(error.contains("target.json is damaged"), "{error}");
        fs::write(
            folder.path().join(FLEET_FILE),
            "{\"version\":9,\"value\":{\"coordinator\":[]}}",
        )
        .unwrap();
        assert!(store.fleet().unwrap_err().to_string().contains("version 9"));
    }
}
