//! The audit log: one line per decision and per act of a person, kept in the store and readable from a sequence number on.
//!
//! Start at [`Events::record`] (written soon, never waited for) and [`Events::record_durably`] (for acts that are acknowledged only once
//! they are on record). The newest lines are held in memory; older ones beyond [`KEPT_MAX`] are forgotten with the next write.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use compass_shared::ids::Generation;
use compass_shared::model::trigger::Trigger;
use tokio::sync::{mpsc, watch};

use crate::metrics::Metrics;
use crate::store::records::EventRecord;
use crate::store::{Office, StoreError, Transaction};

/// Lines kept in memory: what a page or a command shows.
const RING_MAX: usize = 2_048;
/// Lines kept in the store: weeks of a busy fleet, some ten megabytes.
pub const KEPT_MAX: u64 = 50_000;
/// Lines that may wait to be written; beyond it they are counted as dropped from the store (the ring and the log still have them).
const QUEUE_MAX: usize = 1_024;

/// What happened, before it has a number and a time.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// A short stable word, e.g. `plan-changed`.
    pub kind: &'static str,
    /// To what, e.g. `query lobby-agent`.
    pub object: String,
    /// Who did it.
    pub actor: String,
    /// In words.
    pub text: String,
    /// Why, for decisions of the planner.
    pub trigger: Option<Trigger>,
    /// The plan it led to.
    pub generation: Option<Generation>,
}

impl Event {
    /// A line without trigger and generation.
    pub fn new(
        kind: &'static str,
        object: impl Into<String>,
        actor: impl Into<String>,
        text: impl Into<String>,
    ) -> Self {
        Self {
            kind,
            object: object.into(),
            actor: actor.into(),
            text: text.into(),
            trigger: None,
            generation: None,
        }
    }

    /// The same with what called for it.
    #[must_use]
    pub fn because(mut self, trigger: Trigger) -> Self {
        self.trigger = Some(trigger);
        self
    }

    /// The same with the plan it led to.
    #[must_use]
    pub fn with_generation(mut self, generation: Generation) -> Self {
        self.generation = Some(generation);
        self
    }
}

#[derive(Debug)]
struct Ring {
    next: u64,
    lines: VecDeque<EventRecord>,
}

/// The log.
#[derive(Debug)]
pub struct Events {
    office: Arc<Office>,
    metrics: Arc<Metrics>,
    ring: Mutex<Ring>,
    queue: mpsc::Sender<EventRecord>,
    newest: watch::Sender<u64>,
}

impl Events {
    /// Opens the log of a store and starts its writer. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When the stored lines cannot be read.
    pub fn open(office: Arc<Office>, metrics: Arc<Metrics>) -> Result<Arc<Self>, StoreError> {
        let mut lines = VecDeque::with_capacity(RING_MAX);
        let stored = office
            .store()
            .scan_back(<EventRecord as crate::store::Record>::PREFIX, RING_MAX)?;
        for (key, stored) in stored.into_iter().rev() {
            lines.push_back(crate::store::records::decode::<EventRecord>(&key, &stored)?);
        }
        let next = lines.back().map_or(1, |line| line.sequence + 1);
        let (queue, waiting) = mpsc::channel(QUEUE_MAX);
        tokio::spawn(write_lines(office.clone(), waiting));
        Ok(Arc::new(Self {
            office,
            metrics,
            ring: Mutex::new(Ring { next, lines }),
            queue,
            newest: watch::Sender::new(next - 1),
        }))
    }

    /// Writes a line soon; returns its number.
    pub fn record(&self, event: Event) -> u64 {
        let record = self.number(event);
        let sequence = record.sequence;
        if self.queue.try_send(record).is_err() {
            self.metrics.events_dropped.inc();
        }
        sequence
    }

    /// Writes a line in the same transaction as what it is about, and returns after both are durable.
    ///
    /// # Errors
    /// When the transaction is refused or the store fails; the line is then not on record.
    pub async fn record_durably(
        &self,
        event: Event,
        transaction: Transaction,
    ) -> Result<u64, StoreError> {
        // The number is taken first, so a refused transaction leaves a gap: numbers grow, they need not be dense.
        let record = self.prepare(event);
        self.office.commit(transaction.put(&record)).await?;
        let sequence = record.sequence;
        self.show(record);
        Ok(sequence)
    }

    /// Lines after a number, oldest first, at most `limit`; from memory where they are still there, else from the store.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn after(&self, sequence: u64, limit: usize) -> Result<Vec<EventRecord>, StoreError> {
        {
            let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            let oldest = ring.lines.front().map_or(ring.next, |line| line.sequence);
            if sequence + 1 >= oldest || ring.lines.len() < RING_MAX {
                let found = ring.lines.iter().filter(|line| line.sequence > sequence);
                return Ok(found.take(limit).cloned().collect());
            }
        }
        let key = EventRecord::key_of(sequence);
        let page = self.office.store().scan(
            <EventRecord as crate::store::Record>::PREFIX,
            Some(&key),
            limit,
        )?;
        page.iter()
            .map(|(key, stored)| crate::store::records::decode(key, stored))
            .collect()
    }

    /// The newest `limit` lines, oldest first.
    pub fn newest(&self, limit: usize) -> Vec<EventRecord> {
        let ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let skipped = ring.lines.len().saturating_sub(limit);
        ring.lines.iter().skip(skipped).cloned().collect()
    }

    /// Follows the number of the newest line.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }

    fn number(&self, event: Event) -> EventRecord {
        let record = self.prepare(event);
        self.show(record.clone());
        record
    }

    fn prepare(&self, event: Event) -> EventRecord {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let sequence = ring.next;
        ring.next += 1;
        EventRecord {
            sequence,
            unix_ms: now_unix_ms(),
            kind: event.kind.to_owned(),
            object: event.object,
            actor: event.actor,
            text: event.text,
            trigger: event.trigger,
            generation: event.generation,
        }
    }

    /// Puts a line where readers see it, and into the process's log.
    fn show(&self, record: EventRecord) {
        let trigger = record.trigger.as_ref().map(Trigger::name);
        tracing::info!(
            sequence = record.sequence,
            kind = record.kind,
            object = record.object,
            actor = record.actor,
            trigger,
            generation = record.generation.map(|generation| generation.0),
            "{}",
            record.text
        );
        let sequence = record.sequence;
        {
            let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
            if ring.lines.len() == RING_MAX {
                ring.lines.pop_front();
            }
            // Durable lines may be shown after later ones: keep the order of numbers.
            let position = ring
                .lines
                .iter()
                .rposition(|line| line.sequence < sequence)
                .map_or(0, |position| position + 1);
            ring.lines.insert(position, record);
        }
        self.newest.send_if_modified(|newest| {
            let is_newer = sequence > *newest;
            *newest = sequence.max(*newest);
            is_newer
        });
    }
}

/// Writes what waits, several lines with one commit, and forgets the oldest.
async fn write_lines(office: Arc<Office>, mut waiting: mpsc::Receiver<EventRecord>) {
    let mut lines = Vec::new();
    while waiting.recv_many(&mut lines, QUEUE_MAX).await > 0 {
        let mut transaction = office.begin();
        for line in lines.drain(..) {
            if let Some(old) = line.sequence.checked_sub(KEPT_MAX) {
                transaction = transaction.delete(EventRecord::key_of(old));
            }
            transaction = transaction.put(&line);
        }
        if let Err(error) = office.commit(transaction).await {
            tracing::error!(%error, "audit lines were not stored");
        }
    }
}

/// Wall time in milliseconds since 1970, for people and for tokens.
pub fn now_unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::redb::RedbStore;

    async fn events() -> (Arc<Events>, Arc<Office>) {
        let store = Arc::new(RedbStore::in_memory().unwrap());
        let office = Arc::new(Office::take(store, "test").await.unwrap());
        let events = Events::open(office.clone(), Arc::new(Metrics::new())).unwrap();
        (events, office)
    }

    fn texts(lines: &[EventRecord]) -> Vec<&str> {
        lines.iter().map(|line| line.text.as_str()).collect()
    }

    #[tokio::test]
    async fn lines_are_numbered_and_read_from_a_number_on() {
        let (events, office) = events().await;
        for text in ["a", "b", "c"] {
            events.record(Event::new("test", "o", "x", text));
        }
        assert_eq!(texts(&events.after(0, 10).unwrap()), ["a", "b", "c"]);
        assert_eq!(texts(&events.after(1, 1).unwrap()), ["b"]);
        assert_eq!(texts(&events.newest(2)), ["b", "c"]);
        assert_eq!(*events.watch().borrow(), 3);
        events
            .record_durably(Event::new("test", "o", "x", "d"), office.begin())
            .await
            .unwrap();
        // A later opening finds what was stored.
        let again = Events::open(office, Arc::new(Metrics::new())).unwrap();
        assert_eq!(again.newest(1)[0].sequence, 4);
        assert_eq!(again.record(Event::new("test", "o", "x", "e")), 5);
    }

    #[tokio::test]
    async fn a_line_whose_transaction_is_refused_is_not_on_record() {
        let (events, office) = events().await;
        let impossible = office.begin().expecting("event/none", Some(7));
        let refused = events
            .record_durably(Event::new("test", "o", "x", "no"), impossible)
            .await;
        assert!(refused.is_err());
        assert!(events.newest(10).is_empty());
    }
}
