//! What survives: records with a revision, changed by compare-and-set, under a lease that gives the term.
//!
//! Start at [`Store`] (the trait), [`Transaction`] (what is asked of it) and [`records`] (what is kept). A commit is acknowledged after it is
//! durable, and carries the term it was made in: once a later term has begun, commits of an earlier one are refused, so two coordinators
//! on one store cannot both write.
//!
//! Deliberately absent: bulk data (artifacts are files, see `artifacts`), anything that can be measured again, and any decision.

pub mod office;
pub mod records;
pub mod redb;

#[cfg(test)]
mod tests;

use async_trait::async_trait;

pub use office::Office;
pub use records::{Record, get, scan};

/// The number of a write; grows with every transaction.
pub type Revision = u64;

/// A stored value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// The write that put it there.
    pub revision: Revision,
    /// The term in which that happened.
    pub term: u64,
    /// Versioned JSON, see [`records`].
    pub json: Vec<u8>,
}

/// What must hold for a transaction to be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expectation {
    /// The key does not exist.
    Absent,
    /// The key was last written by this revision.
    Revision(Revision),
}

/// A change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Writes a value.
    Put(Vec<u8>),
    /// Removes the key; no error when it is not there.
    Delete,
}

/// Changes that are carried out together or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transaction {
    /// The writer's term.
    pub term: u64,
    /// All must hold.
    pub expectations: Vec<(String, Expectation)>,
    /// In order.
    pub changes: Vec<(String, Change)>,
}

impl Transaction {
    /// An empty one, made in this term.
    pub fn new(term: u64) -> Self {
        Self {
            term,
            ..Self::default()
        }
    }

    /// Demands that a key is still as it was read: at this revision, or absent.
    #[must_use]
    pub fn expecting(mut self, key: impl Into<String>, seen: Option<Revision>) -> Self {
        let expectation = seen.map_or(Expectation::Absent, Expectation::Revision);
        self.expectations.push((key.into(), expectation));
        self
    }

    /// Writes a record under its key.
    #[must_use]
    pub fn put<R: Record>(mut self, record: &R) -> Self {
        self.changes
            .push((record.key(), Change::Put(records::encode(record))));
        self
    }

    /// Removes a key.
    #[must_use]
    pub fn delete(mut self, key: impl Into<String>) -> Self {
        self.changes.push((key.into(), Change::Delete));
        self
    }
}

/// Why the store did not do it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// Somebody else changed the record meanwhile: read again and decide again.
    #[error("{key} has changed meanwhile")]
    Conflict {
        /// The key that is not as expected.
        key: String,
    },
    /// A later term has begun: this writer is no longer in office.
    #[error("term {ours} is over: term {current} has begun")]
    TermOver {
        /// The writer's term.
        ours: u64,
        /// The term in force.
        current: u64,
    },
    /// Another process has the store open.
    #[error("{path} is held by another coordinator")]
    Held {
        /// The file.
        path: String,
    },
    /// A record cannot be read.
    #[error("record {key} is damaged: {reason}")]
    Damaged {
        /// Its key.
        key: String,
        /// Why.
        reason: String,
    },
    /// A record was written by a later version of this program.
    #[error(
        "record {key} has version {found}, this build reads up to {known}: use the newer build"
    )]
    TooNew {
        /// Its key.
        key: String,
        /// The record's version.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
    /// The disk or the engine failed; nothing was acknowledged, and the store takes no more writes.
    #[error("store failed: {0}")]
    Failed(String),
}

/// A durable map from text keys to versioned JSON, with one writer in office at a time.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Takes office: from now on only commits of the returned term are accepted. The term exceeds every earlier one and `floor`.
    ///
    /// # Errors
    /// When it cannot be made durable.
    async fn take_office(&self, holder: &str, floor: u64) -> Result<u64, StoreError>;

    /// Carries out a transaction; returns after it is durable.
    ///
    /// # Errors
    /// [`StoreError::Conflict`] or [`StoreError::TermOver`] with nothing changed, or [`StoreError::Failed`].
    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError>;

    /// The value of a key.
    ///
    /// # Errors
    /// When the engine fails.
    fn get(&self, key: &str) -> Result<Option<Stored>, StoreError>;

    /// Keys with a prefix, in ascending order, from the first one after `after`, at most `limit`.
    ///
    /// # Errors
    /// When the engine fails.
    fn scan(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<(String, Stored)>, StoreError>;

    /// The last `limit` keys with a prefix, in descending order.
    ///
    /// # Errors
    /// When the engine fails.
    fn scan_back(&self, prefix: &str, limit: usize) -> Result<Vec<(String, Stored)>, StoreError>;

    /// Why the store takes no more writes, if so.
    fn failure(&self) -> Option<String>;
}
