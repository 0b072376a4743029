//! The store in one file, with redb.
//!
//! One thread owns the write side and commits in groups: everything that waits when a commit ends goes into the next one, so that the
//! price of making it durable is paid once for all. The file's lock is the lease: while this process lives, nobody else can open it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use redb::{
    Database, Durability, ReadableDatabase, ReadableTable, Table, TableDefinition, TableError,
};
use tokio::sync::{mpsc, oneshot};

use super::{Change, Expectation, Revision, Store, StoreError, Stored, Transaction};

/// Transactions that may wait; beyond it writers are held back.
const QUEUE_MAX: usize = 1024;
/// Transactions carried out with one commit: bounds how long the first of them waits.
const GROUP_MAX: usize = 256;
/// Pages kept in memory, in bytes. The store is small; redb's default of 1 GiB is out of proportion.
const CACHE_BYTES: usize = 32 << 20;

/// Key → revision, term, JSON.
const RECORDS: TableDefinition<&str, (u64, u64, &[u8])> = TableDefinition::new("records");
/// Counters.
const COUNTERS: TableDefinition<&str, u64> = TableDefinition::new("counters");
/// Texts about the store itself.
const ABOUT: TableDefinition<&str, &str> = TableDefinition::new("about");

const TERM: &str = "term";
const REVISION: &str = "revision";
const HOLDER: &str = "holder";

/// Told of each commit: how many transactions and how long it took.
pub type CommitObserver = Box<dyn Fn(usize, Duration) + Send>;

enum Request {
    TakeOffice {
        holder: String,
        floor: u64,
        answer: oneshot::Sender<Result<u64, StoreError>>,
    },
    Commit {
        transaction: Transaction,
        answer: oneshot::Sender<Result<Revision, StoreError>>,
    },
}

/// See the module's head.
#[derive(Debug)]
pub struct RedbStore {
    database: Arc<Database>,
    /// None only while it is dropped.
    requests: Option<mpsc::Sender<Request>>,
    writer: Option<std::thread::JoinHandle<()>>,
    failure: Arc<Mutex<Option<String>>>,
}

impl Drop for RedbStore {
    /// Waits for the writer: what it holds, the file's lock among it, is free when this returns.
    fn drop(&mut self) {
        self.requests = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

impl RedbStore {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// [`StoreError::Held`] while another process has it open; [`StoreError::Failed`] when it cannot be read or made.
    pub fn open(path: &Path, observer: CommitObserver) -> Result<Self, StoreError> {
        let database = Database::builder()
            .set_cache_size(CACHE_BYTES)
            .create(path)
            .map_err(|error| match error {
                redb::DatabaseError::DatabaseAlreadyOpen
                | redb::DatabaseError::LockProtocolMismatch => StoreError::Held {
                    path: path.display().to_string(),
                },
                error => StoreError::Failed(format!("{}: {error}", path.display())),
            })?;
        Self::over(database, observer)
    }

    /// A store in memory, for tests.
    ///
    /// # Errors
    /// Never in practice.
    pub fn in_memory() -> Result<Self, StoreError> {
        let database = Database::builder()
            .create_with_backend(redb::backends::InMemoryBackend::new())
            .map_err(failed)?;
        Self::over(database, Box::new(|_, _| ()))
    }

    fn over(database: Database, observer: CommitObserver) -> Result<Self, StoreError> {
        let database = Arc::new(database);
        let (requests, queue) = mpsc::channel(QUEUE_MAX);
        let failure = Arc::new(Mutex::new(None));
        let mut writer = Writer {
            database: database.clone(),
            failure: failure.clone(),
            observer,
        };
        let writer = std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || writer.run(queue))
            .map_err(failed)?;
        Ok(Self {
            database,
            requests: Some(requests),
            writer: Some(writer),
            failure,
        })
    }

    async fn ask<T>(
        &self,
        request: Request,
        answer: oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let gone = || StoreError::Failed("the store's writer has ended".to_owned());
        let requests = self.requests.as_ref().ok_or_else(gone)?;
        requests.send(request).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }
}

#[async_trait]
impl Store for RedbStore {
    async fn take_office(&self, holder: &str, floor: u64) -> Result<u64, StoreError> {
        let (answer, receiver) = oneshot::channel();
        let holder = holder.to_owned();
        let request = Request::TakeOffice {
            holder,
            floor,
            answer,
        };
        self.ask(request, receiver).await
    }

    async fn commit(&self, transaction: Transaction) -> Result<Revision, StoreError> {
        let (answer, receiver) = oneshot::channel();
        self.ask(
            Request::Commit {
                transaction,
                answer,
            },
            receiver,
        )
        .await
    }

    fn get(&self, key: &str) -> Result<Option<Stored>, StoreError> {
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = match transaction.open_table(RECORDS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let found = table.get(key).map_err(failed)?;
        Ok(found.map(|value| stored(value.value())))
    }

    fn scan(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<(String, Stored)>, StoreError> {
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = match transaction.open_table(RECORDS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        let mut found = Vec::new();
        for entry in table
            .range::<&str>(after.unwrap_or(prefix)..)
            .map_err(failed)?
        {
            let (key, value) = entry.map_err(failed)?;
            if Some(key.value()) == after {
                continue;
            }
            if !key.value().starts_with(prefix) || found.len() == limit {
                break;
            }
            found.push((key.value().to_owned(), stored(value.value())));
        }
        Ok(found)
    }

    fn scan_back(&self, prefix: &str, limit: usize) -> Result<Vec<(String, Stored)>, StoreError> {
        let transaction = self.database.begin_read().map_err(failed)?;
        let table = match transaction.open_table(RECORDS) {
            Ok(table) => table,
            Err(TableError::TableDoesNotExist(_)) => return Ok(Vec::new()),
            Err(error) => return Err(failed(error)),
        };
        // No key holds a character above this one: keys are names and digits.
        let end = format!("{prefix}\u{10ffff}");
        let mut found = Vec::new();
        for entry in table.range(prefix..end.as_str()).map_err(failed)?.rev() {
            if found.len() == limit {
                break;
            }
            let (key, value) = entry.map_err(failed)?;
            found.push((key.value().to_owned(), stored(value.value())));
        }
        Ok(found)
    }

    fn failure(&self) -> Option<String> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

fn stored((revision, term, json): (u64, u64, &[u8])) -> Stored {
    Stored {
        revision,
        term,
        json: json.to_vec(),
    }
}

fn failed(error: impl std::fmt::Display) -> StoreError {
    StoreError::Failed(error.to_string())
}

/// Sends an answer that is due once the commit is durable, or the failure instead of it.
type Answer = Box<dyn FnOnce(Result<(), StoreError>)>;

struct Writer {
    database: Arc<Database>,
    failure: Arc<Mutex<Option<String>>>,
    observer: CommitObserver,
}

impl Writer {
    fn run(&mut self, mut queue: mpsc::Receiver<Request>) {
        let mut group = Vec::with_capacity(GROUP_MAX);
        while queue.blocking_recv_many(&mut group, GROUP_MAX) > 0 {
            let size = group.len();
            let begun = Instant::now();
            let mut answers = Vec::with_capacity(size);
            let result = match self.failed_before() {
                Some(reason) => Err(StoreError::Failed(reason)),
                None => self.write(&mut group, &mut answers),
            };
            if let Err(error) = &result {
                self.remember(error);
            }
            // What was not reached gets the failure, too: dropping its sender would only say that the writer is gone.
            for request in group.drain(..) {
                refuse(request, &result);
            }
            for answer in answers {
                answer(result.clone());
            }
            (self.observer)(size, begun.elapsed());
        }
    }

    fn failed_before(&self) -> Option<String> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// After a failed commit nobody knows what is on the disk: no more writes, and the process is to be restarted.
    fn remember(&self, error: &StoreError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        if failure.is_none() {
            tracing::error!(%error, "the store has failed and takes no more writes");
            *failure = Some(error.to_string());
        }
    }

    /// Carries out the group and commits it. Answers to requests that changed something wait for the commit.
    fn write(&self, group: &mut Vec<Request>, answers: &mut Vec<Answer>) -> Result<(), StoreError> {
        let mut transaction = self.database.begin_write().map_err(failed)?;
        transaction
            .set_durability(Durability::Immediate)
            .map_err(failed)?;
        {
            let mut records = transaction.open_table(RECORDS).map_err(failed)?;
            let mut counters = transaction.open_table(COUNTERS).map_err(failed)?;
            let mut about = transaction.open_table(ABOUT).map_err(failed)?;
            // From the end, so that what is not reached stays in the group.
            group.reverse();
            while let Some(request) = group.pop() {
                match request {
                    Request::TakeOffice {
                        holder,
                        floor,
                        answer,
                    } => {
                        let term = take_office(&mut counters, &mut about, &holder, floor);
                        let result = term.clone();
                        answers.push(Box::new(move |done| {
                            let _ = answer.send(done.and(term));
                        }));
                        result?;
                    }
                    Request::Commit {
                        transaction,
                        answer,
                    } => {
                        let outcome = apply(&mut records, &mut counters, &transaction);
                        let result = outcome.clone();
                        answers.push(Box::new(move |done| {
                            let _ = answer.send(done.and(outcome).and_then(|inner| inner));
                        }));
                        result?.ok();
                    }
                }
            }
        }
        transaction.commit().map_err(failed)
    }
}

fn refuse(request: Request, result: &Result<(), StoreError>) {
    let error = result
        .clone()
        .err()
        .unwrap_or_else(|| StoreError::Failed("the group was not carried out".to_owned()));
    match request {
        Request::TakeOffice { answer, .. } => {
            let _ = answer.send(Err(error));
        }
        Request::Commit { answer, .. } => {
            let _ = answer.send(Err(error));
        }
    }
}

fn counter(counters: &Table<'_, &str, u64>, name: &str) -> Result<u64, StoreError> {
    Ok(counters
        .get(name)
        .map_err(failed)?
        .map_or(0, |value| value.value()))
}

/// Begins the next term within the group.
fn take_office(
    counters: &mut Table<'_, &str, u64>,
    about: &mut Table<'_, &str, &str>,
    holder: &str,
    floor: u64,
) -> Result<u64, StoreError> {
    let term = counter(counters, TERM)?.max(floor) + 1;
    counters.insert(TERM, term).map_err(failed)?;
    about.insert(HOLDER, holder).map_err(failed)?;
    Ok(term)
}

/// Carries out one transaction within the group. The outer error is the engine's, the inner one the transaction's own.
fn apply(
    records: &mut Table<'_, &str, (u64, u64, &[u8])>,
    counters: &mut Table<'_, &str, u64>,
    transaction: &Transaction,
) -> Result<Result<Revision, StoreError>, StoreError> {
    let current = counter(counters, TERM)?;
    if transaction.term != current {
        return Ok(Err(StoreError::TermOver {
            ours: transaction.term,
            current,
        }));
    }
    for (key, expectation) in &transaction.expectations {
        let found = records
            .get(key.as_str())
            .map_err(failed)?
            .map(|value| value.value().0);
        let holds = match expectation {
            Expectation::Absent => found.is_none(),
            Expectation::Revision(revision) => found == Some(*revision),
        };
        if !holds {
            return Ok(Err(StoreError::Conflict { key: key.clone() }));
        }
    }
    let revision = counter(counters, REVISION)? + 1;
    counters.insert(REVISION, revision).map_err(failed)?;
    for (key, change) in &transaction.changes {
        match change {
            Change::Put(json) => {
                let value = (revision, transaction.term, json.as_slice());
                records.insert(key.as_str(), value).map_err(failed)?;
            }
            Change::Delete => {
                records.remove(key.as_str()).map_err(failed)?;
            }
        }
    }
    Ok(Ok(revision))
}
