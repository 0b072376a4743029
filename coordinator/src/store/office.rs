//! The term in force, and commits made in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Revision, Store, StoreError, Transaction};

/// A store together with the term in which this coordinator holds it.
pub struct Office {
    store: Arc<dyn Store>,
    holder: String,
    term: AtomicU64,
}

impl Office {
    /// Takes office on a store.
    ///
    /// # Errors
    /// When the new term cannot be made durable.
    pub async fn take(store: Arc<dyn Store>, holder: &str) -> Result<Self, StoreError> {
        let term = store.take_office(holder, 0).await?;
        tracing::info!(term, holder, "took office");
        Ok(Self {
            store,
            holder: holder.to_owned(),
            term: AtomicU64::new(term),
        })
    }

    /// The term in force.
    pub fn term(&self) -> u64 {
        self.term.load(Ordering::Acquire)
    }

    /// Sees to it that the term in force exceeds another one, and gives it. An agent may know a later term than ours: the store is then a
    /// restored snapshot, and agents would refuse every target for ever.
    ///
    /// # Errors
    /// When the new term cannot be made durable.
    pub async fn begin_term_beyond(&self, other: u64) -> Result<u64, StoreError> {
        let present = self.term();
        if present > other {
            return Ok(present);
        }
        let term = self.store.take_office(&self.holder, other).await?;
        self.term.fetch_max(term, Ordering::AcqRel);
        tracing::info!(term, beyond = other, "a later term begins");
        Ok(term)
    }

    /// The store, for reading.
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// An empty transaction in the term in force.
    pub fn begin(&self) -> Transaction {
        Transaction::new(self.term())
    }

    /// Commits; a transaction begun before this same office moved on to a later term is repeated in that one.
    ///
    /// # Errors
    /// As [`Store::commit`].
    pub async fn commit(&self, mut transaction: Transaction) -> Result<Revision, StoreError> {
        loop {
            match self.store.commit(transaction.clone()).await {
                Err(StoreError::TermOver { ours, current })
                    if current == self.term() && ours < current =>
                {
                    transaction.term = current;
                }
                result => return result,
            }
        }
    }
}

impl std::fmt::Debug for Office {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Office")
            .field("holder", &self.holder)
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}
