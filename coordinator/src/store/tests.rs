use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;

use compass_shared::ids::Commit;
use compass_shared::model::plan::Assignment;

use super::records::{AssignmentRecord, EventRecord, scan_below};
use super::redb::RedbStore;
use super::*;

fn event(sequence: u64, text: &str) -> EventRecord {
    EventRecord {
        sequence,
        unix_ms: 0,
        kind: "test".to_owned(),
        object: "object".to_owned(),
        actor: "actor".to_owned(),
        text: text.to_owned(),
        trigger: None,
        generation: None,
    }
}

async fn office() -> Office {
    let store = Arc::new(RedbStore::in_memory().unwrap());
    Office::take(store, "test").await.unwrap()
}

#[tokio::test]
async fn what_was_committed_is_read_back_with_its_revision_and_term() {
    let office = office().await;
    let record = AssignmentRecord::new(Assignment {
        commit: Commit { term: 1, number: 7 },
        plans: [].into(),
    });
    let revision = office.commit(office.begin().put(&record)).await.unwrap();
    let (found, at) = get::<AssignmentRecord>(office.store(), AssignmentRecord::KEY)
        .unwrap()
        .unwrap();
    assert_eq!((found, at), (record, revision));
    let stored = office.store().get(AssignmentRecord::KEY).unwrap().unwrap();
    assert_eq!(stored.term, office.term());
    assert!(
        String::from_utf8(stored.json)
            .unwrap()
            .starts_with(r#"{"version":1,"body":{"#),
        "people can read it"
    );
}

#[tokio::test]
async fn of_two_writers_who_saw_the_same_one_wins_and_the_other_changes_nothing() {
    let office = office().await;
    let key = EventRecord::key_of(1);
    office
        .commit(office.begin().expecting(&key, None).put(&event(1, "first")))
        .await
        .unwrap();
    let (_, seen) = get::<EventRecord>(office.store(), &key).unwrap().unwrap();
    let write = |text: &str| {
        office
            .begin()
            .expecting(&key, Some(seen))
            .put(&event(1, text))
            .put(&event(2, text))
    };
    let (a, b) = tokio::join!(office.commit(write("a")), office.commit(write("b")));
    let (winner, loser) = if a.is_ok() { ("a", b) } else { ("b", a) };
    assert!(matches!(loser, Err(StoreError::Conflict { key: k }) if k == key));
    let texts: Vec<_> = scan::<EventRecord>(office.store())
        .unwrap()
        .into_iter()
        .map(|event| event.text)
        .collect();
    assert_eq!(texts, [winner, winner]);
    assert!(
        office
            .commit(office.begin().expecting(&key, None).put(&event(1, "c")))
            .await
            .is_err(),
        "it is not absent"
    );
}

#[tokio::test]
async fn a_term_grows_with_each_office_and_exceeds_every_reported_one() {
    let store = Arc::new(RedbStore::in_memory().unwrap());
    let first = Office::take(store.clone(), "a").await.unwrap();
    let stale = first.begin();
    let second = Office::take(store.clone(), "b").await.unwrap();
    assert!(second.term() > first.term());
    let refused = first.commit(stale.put(&event(1, "late"))).await;
    assert!(
        matches!(refused, Err(StoreError::TermOver { .. })),
        "{refused:?}"
    );
    let present = second.term();
    assert_eq!(
        second.begin_term_beyond(present - 1).await.unwrap(),
        present
    );
    assert_eq!(second.begin_term_beyond(41).await.unwrap(), 42);
    assert_eq!(second.term(), 42);
    let third = Office::take(store, "c").await.unwrap();
    assert_eq!(third.term(), 43);
}

#[tokio::test]
async fn a_transaction_begun_before_ones_own_later_term_goes_through() {
    let office = office().await;
    let begun = office.begin().put(&event(1, "begun early"));
    office.begin_term_beyond(9).await.unwrap();
    office.commit(begun).await.unwrap();
    assert_eq!(
        office
            .store()
            .get(&EventRecord::key_of(1))
            .unwrap()
            .unwrap()
            .term,
        10
    );
}

#[tokio::test]
async fn scanning_pages_in_order_and_keeps_kinds_apart() {
    let office = office().await;
    let mut transaction = office.begin().put(&AssignmentRecord::default());
    for sequence in 0..700 {
        transaction = transaction.put(&event(sequence, ""));
    }
    office.commit(transaction).await.unwrap();
    let all: Vec<_> = scan::<EventRecord>(office.store()).unwrap();
    assert_eq!(all.len(), 700);
    assert!(
        all.windows(2)
            .all(|pair| pair[0].sequence < pair[1].sequence)
    );
    let page = office
        .store()
        .scan("event/", Some(&EventRecord::key_of(4)), 3)
        .unwrap();
    let keys: Vec<_> = page.into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, [5, 6, 7].map(EventRecord::key_of));
    let newest = office.store().scan_back("event/", 2).unwrap();
    assert_eq!(newest[0].0, EventRecord::key_of(699));
    assert_eq!(newest.len(), 2);
    assert!(
        scan_below::<EventRecord>(office.store(), "event/9")
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn a_record_of_a_later_build_or_a_damaged_one_is_named() {
    let office = office().await;
    let key = AssignmentRecord::KEY;
    for (json, expected) in [
        (&br#"{"version":2,"body":{}}"#[..], "version 2"),
        (br#"{"version":1,"body":{"assignment":7}}"#, "damaged"),
        (b"\0\0", "damaged"),
    ] {
        let mut transaction = office.begin();
        transaction
            .changes
            .push((key.to_owned(), Change::Put(json.to_vec())));
        office.commit(transaction).await.unwrap();
        let message = get::<AssignmentRecord>(office.store(), key)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains(expected) && message.contains(key),
            "{message}"
        );
    }
}

#[test]
fn a_second_coordinator_on_the_same_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.redb");
    let _first = RedbStore::open(&path, Box::new(|_, _| ())).unwrap();
    let refused = RedbStore::open(&path, Box::new(|_, _| ())).unwrap_err();
    assert!(matches!(refused, StoreError::Held { .. }), "{refused}");
}

#[test]
fn concurrent_commits_share_the_price_of_durability() {
    let folder = tempfile::tempdir().unwrap();
    let groups = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = groups.clone();
    let observer = Box::new(move |size, _| seen.lock().unwrap().push(size));
    let store = Arc::new(RedbStore::open(&folder.path().join("s"), observer).unwrap());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let office = Arc::new(Office::take(store, "test").await.unwrap());
        let mut writers = tokio::task::JoinSet::new();
        for sequence in 0..200 {
            let office = office.clone();
            writers.spawn(async move {
                office
                    .commit(office.begin().put(&event(sequence, "")))
                    .await
            });
        }
        while let Some(done) = writers.join_next().await {
            done.unwrap().unwrap();
        }
    });
    let groups = groups.lock().unwrap();
    assert_eq!(groups.iter().sum::<usize>(), 201);
    assert!(groups.iter().any(|size| *size > 1), "{groups:?}");
}

/// The writer that the next test kills; does nothing when run by itself.
#[test]
fn child_writes_until_killed() {
    let Ok(path) = std::env::var("COMPASS_TEST_STORE") else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let store = RedbStore::open(path.as_ref(), Box::new(|_, _| ())).unwrap();
        let office = Arc::new(Office::take(Arc::new(store), "child").await.unwrap());
        println!("term {}", office.term());
        let next = office.store().scan_back("event/", 1).unwrap();
        let mut sequence = next.first().map_or(0, |(key, _)| {
            key["event/".len()..].parse::<u64>().unwrap() + 1
        });
        loop {
            let pair = office
                .begin()
                .put(&event(sequence, "first of two"))
                .put(&event(sequence + 1, "second of two"));
            office.commit(pair).await.unwrap();
            println!("acknowledged {}", sequence + 1);
            sequence += 2;
        }
    });
}

#[test]
fn every_acknowledged_record_survives_kill_9_and_no_transaction_is_halved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.redb");
    let mut acknowledged = 0;
    let mut terms = Vec::new();
    for round in 0..4 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::tests::child_writes_until_killed"])
            .args(["--nocapture", "--test-threads=1"])
            .env("COMPASS_TEST_STORE", &path)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        while seen < 5 + round * 7 {
            let line = lines
                .next()
                .expect("the child writes until it is killed")
                .unwrap();
            // The test harness may print on the same line before the child does.
            if let Some((_, term)) = line.split_once("term ") {
                terms.push(term.parse::<u64>().unwrap());
            }
            if let Some((_, sequence)) = line.split_once("acknowledged ") {
                acknowledged = sequence.parse().unwrap();
                seen += 1;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // Lines that were in the pipe when the child died are acknowledged, too.
        for line in lines.map_while(Result::ok) {
            if let Some((_, sequence)) = line.split_once("acknowledged ") {
                acknowledged = sequence.parse().unwrap_or(acknowledged);
            }
        }
        let store = RedbStore::open(&path, Box::new(|_, _| ())).unwrap();
        let events: Vec<EventRecord> = scan(&store).unwrap();
        let sequences: Vec<u64> = events.iter().map(|event| event.sequence).collect();
        assert!(sequences.len() as u64 > acknowledged);
        assert_eq!(sequences, (0..sequences.len() as u64).collect::<Vec<_>>());
        assert_eq!(sequences.len() % 2, 0, "both of two or none");
    }
    assert!(terms.windows(2).all(|pair| pair[0] < pair[1]), "{terms:?}");
}
