use super::*;
use crate::testing::NoSession;

fn queries() -> Queries {
    Queries::new(Clock::begin(), Arc::new(Metrics::new()))
}

fn id(name: &str) -> QueryId {
    QueryId::new(name).unwrap()
}

fn report(answered: u64) -> AppReport {
    AppReport {
        generation: None,
        window_ms: 1000,
        counts: OutcomeCounts {
            sent: answered,
            answered,
            ..OutcomeCounts::default()
        },
        latencies_ms: vec![1.0; 400],
        accuracies: vec![0.5, -1.0, f32::NAN],
    }
}

#[tokio::test(start_paused = true)]
async fn live_figures_cover_the_last_seconds_only_and_stay_bounded() {
    let queries = queries();
    queries.open(&id("q"), None);
    for _ in 0..200 {
        queries.report(&id("q"), &mut report(1));
        tokio::time::advance(Duration::from_secs(1)).await;
    }
    let view = queries.view(&id("q"));
    assert_eq!(view.reports.len(), LIVE_WINDOW.as_secs() as usize);
    assert_eq!(view.reports[0].latencies_ms.len(), FIGURES_MAX);
    assert_eq!(view.reports[0].accuracies, [0.5]);
    assert_eq!(view.counts.sent, 0, "counting begins with the first plan");
    tokio::time::advance(LIVE_WINDOW * 2).await;
    assert!(queries.view(&id("q")).reports.is_empty());
}

#[tokio::test]
async fn sample_sets_belong_to_the_query_that_asked_for_them() {
    let queries = queries();
    queries.open(&id("a"), None);
    queries.open(&id("b"), None);
    queries.begin_set(&id("a"), SampleSetId(1));
    for set in 100..100 + SETS_MAX as u64 + 5 {
        queries.begin_set(&id("b"), SampleSetId(set));
    }
    assert_eq!(queries.query_of_set(SampleSetId(1)), Some(id("a")));
    assert_eq!(queries.query_of_set(SampleSetId(100)), None, "long over");
    assert_eq!(queries.query_of_set(SampleSetId(110)), Some(id("b")));
}

#[tokio::test]
async fn an_app_that_comes_back_replaces_its_old_session_and_gets_the_messages() {
    let queries = queries();
    assert!(
        queries
            .app_arrived(&id("q"), Digest::of(b"k"), NoSession::new())
            .is_none(),
        "there is no such query"
    );
    queries.open(&id("q"), None);
    let arrive = || queries.app_arrived(&id("q"), Digest::of(b"k"), NoSession::new());
    let old = arrive().unwrap();
    let mut new = arrive().unwrap();
    assert_eq!(new.before.as_ref().unwrap().epoch, old.epoch);
    queries.app_left(&id("q"), old.epoch);
    assert!(queries.view(&id("q")).app_online);
    queries.infeasible(&id("q"), "no".to_owned());
    assert!(matches!(
        new.outgoing.recv().await,
        Some(CoordinatorToApp::Infeasible { .. })
    ));
    drop(new.before);
    // Closing the query ends the queue, and with it the session's writer.
    drop(queries.close(&id("q")));
    assert_eq!(new.outgoing.recv().await, None);
}
