//! One app's session.

use std::sync::Arc;

use compass_planning::roles::{explorer, monitor};
use compass_shared::api::Role as ApiRole;
use compass_shared::ids::{Digest, QueryId};
use compass_shared::model::plan::{Peer, QueryPlan};
use compass_shared::model::query::Query;
use compass_shared::wire::v1::{AppRoute, AppToCoordinator, CoordinatorToApp};
use compass_transport::identity::request_fingerprint;
use compass_transport::{CloseCode, Deadline, Priority, RecvStream, Role, SendStream, Session};
use tokio::sync::mpsc;

use super::pace::Pace;
use super::{FIRST_MESSAGE_S, WRITE_S, is_alive};
use crate::control::{Refusal, RefusalKind, Registered};
use crate::events::Event;
use crate::metrics::count;
use crate::plane::Plane;
use crate::queries::Arrival;
use crate::store::get;
use crate::store::records::{QueryRecord, QueryState};

/// Largest message of an app, encoded: labels of a sample set, or a spec.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Facts of one app at once, and per second in the long run.
const FACTS_BURST: u32 = 50;
const FACTS_PER_SECOND: u32 = 20;
/// Longest label believed, in bytes: an answer of a judged operator.
const LABEL_BYTES_MAX: usize = 256 * 1024;

/// What an app gets for its first message.
struct Accepted {
    record: QueryRecord,
    entry: Peer,
    chain_der: Vec<Vec<u8>>,
    key: Digest,
}

/// Whom the certificate, if any, says that the app is.
pub(super) enum Shown {
    /// No certificate: it may only register.
    Nothing,
    /// The certificate of a query's app.
    Certificate(QueryId, Digest),
}

/// Serves one app to the end of its session.
pub(super) async fn serve(plane: &Arc<Plane>, shown: Shown, session: Arc<dyn Session>) {
    let Some((mut send, mut receive)) = session.take_control() else {
        return;
    };
    send.set_priority(Priority::Control);
    let deadline = Deadline::after_s(FIRST_MESSAGE_S);
    let first = match receive.read_frame(MESSAGE_BYTES_MAX, deadline).await {
        Ok(first) => first,
        Err(error) => {
            session.close(CloseCode::BAD_MESSAGE, &error.to_string());
            return;
        }
    };
    let accepted = match accept(plane, &shown, first, &*session).await {
        Ok(accepted) => accepted,
        Err(refusal) => {
            reject(plane, &*session, &mut send, &refusal).await;
            return;
        }
    };
    let Accepted {
        record,
        entry,
        chain_der,
        key,
    } = accepted;
    let query = &record.query;
    let arrived = plane.queries.app_arrived(&query.id, key, session.clone());
    let Some(Arrival {
        epoch,
        outgoing,
        before,
    }) = arrived
    else {
        let refusal = Refusal::new(RefusalKind::NotFound, "the query was stopped meanwhile");
        reject(plane, &*session, &mut send, &refusal).await;
        return;
    };
    if let Some(before) = before {
        before.session.close(
            CloseCode::REPLACED,
            "a newer session of this app took its place",
        );
    }
    let registered = CoordinatorToApp::Registered {
        query: query.id.clone(),
        chain_der,
        authority_der: plane.authority.certificate().to_vec(),
        entry,
        latency_bound: query.slo.latency.map(|slo| slo.bound),
        frame_deadline: query.frame_deadline(),
    };
    if send
        .write_frame(&registered, Deadline::after_s(WRITE_S))
        .await
        .is_ok()
    {
        let text = format!("app connected from {}", session.remote_address());
        plane
            .events
            .record(Event::new("query", object(&query.id), "gateway", text));
        bring_up_to_date(plane, query);
        let reason = tokio::select! {
            reason = read_messages(plane, &query.id, receive) => reason,
            reason = write_messages(send, outgoing) => reason,
            closed = session.closed() => closed.to_string(),
        };
        session.close(CloseCode::DONE, &reason);
        let text = format!("app's session ended: {reason}");
        plane
            .events
            .record(Event::new("query", object(&query.id), "gateway", text));
    }
    plane.queries.app_left(&query.id, epoch);
}

async fn accept(
    plane: &Plane,
    shown: &Shown,
    first: AppToCoordinator,
    session: &dyn Session,
) -> Result<Accepted, Refusal> {
    match (first, shown) {
        (
            AppToCoordinator::Register {
                token,
                query_yaml,
                request_der,
            },
            _,
        ) => register(plane, session, &token, &query_yaml, &request_der).await,
        (AppToCoordinator::Attach, Shown::Certificate(query, key)) => {
            attach(plane, session, query, *key).await
        }
        (_, Shown::Nothing) => Err(Refusal::new(
            RefusalKind::Invalid,
            "an app without a certificate must begin with a registration",
        )),
        (_, Shown::Certificate(..)) => Err(Refusal::new(
            RefusalKind::Invalid,
            "the first message must attach to the query or register it",
        )),
    }
}

async fn register(
    plane: &Plane,
    session: &dyn Session,
    token: &str,
    yaml: &str,
    request_der: &[u8],
) -> Result<Accepted, Refusal> {
    let now = plane.authority.clock().now_unix_s() * 1000;
    let bearer = plane.tokens.authenticate(token, ApiRole::App, now)?;
    let key = request_fingerprint(request_der)
        .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
    // Judged before anything is kept: a query whose name cannot stand in a certificate, or that is alive elsewhere.
    let query = plane.parse_query(yaml)?;
    let chain_der = plane
        .authority
        .issue(&Role::App(query.id.clone()), request_der)
        .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
    refuse_second(plane, session, &query.id).await?;
    let Registered { record, entry } = plane.register_query(yaml, Some(key), &bearer).await?;
    let entry = entry.ok_or_else(|| gone(&record.query))?;
    Ok(Accepted {
        record,
        entry,
        chain_der,
        key,
    })
}

async fn attach(
    plane: &Plane,
    session: &dyn Session,
    query: &QueryId,
    key: Digest,
) -> Result<Accepted, Refusal> {
    let found = get::<QueryRecord>(plane.office.store(), &QueryRecord::key_of(query))?;
    let Some((record, _)) = found.filter(|(record, _)| record.state == QueryState::Active) else {
        return Err(Refusal::new(
            RefusalKind::NotFound,
            format!("query {query} is not registered (any more)"),
        )
        .hint("register it again"));
    };
    if record.app_fingerprint != Some(key) {
        return Err(Refusal::new(
            RefusalKind::Conflict,
            format!("query {query} was taken up by another app meanwhile"),
        )
        .hint("register it again to take it back"));
    }
    refuse_second(plane, session, query).await?;
    let entry = plane
        .known_peer(&record.query.entry)?
        .ok_or_else(|| gone(&record.query))?;
    Ok(Accepted {
        record,
        entry,
        chain_der: Vec::new(),
        key,
    })
}

/// A query has one app: a second one is refused while the first is alive.
async fn refuse_second(
    plane: &Plane,
    session: &dyn Session,
    query: &QueryId,
) -> Result<(), Refusal> {
    let Some(old) = plane.queries.app(query) else {
        return Ok(());
    };
    if !is_alive(&*old.session).await {
        return Ok(());
    }
    Err(Refusal::new(
        RefusalKind::Conflict,
        format!(
            "query {query} already has an app, connected from {}; this one comes from {}",
            old.address,
            session.remote_address()
        ),
    )
    .about(object(query))
    .hint("register under another name"))
}

async fn reject(plane: &Plane, session: &dyn Session, send: &mut SendStream, refusal: &Refusal) {
    count(&plane.metrics.sessions_refused, "app");
    tracing::warn!(address = %session.remote_address(), reason = refusal.error, "app refused");
    let reason = refusal.text();
    let rejected = CoordinatorToApp::Rejected {
        reason: reason.clone(),
    };
    let _ = send
        .write_frame(&rejected, Deadline::after_s(WRITE_S))
        .await;
    let _ = send.deliver(Deadline::after_s(WRITE_S)).await;
    session.close(CloseCode::REFUSED, &reason);
}

/// Tells an app that has just come where its query stands.
fn bring_up_to_date(plane: &Plane, query: &Query) {
    let view = plane.queries.view(&query.id);
    if let Some(in_force) = view.in_force {
        let told = in_force
            .told
            .or_else(|| plan_changed(plane, query, &in_force.plan));
        if let Some(told) = told {
            plane.queries.send(&query.id, told);
        }
    }
    if let Some(report) = view.infeasible {
        plane
            .queries
            .send(&query.id, CoordinatorToApp::Infeasible { report });
    }
}

/// What an app is told of a plan that was in force before this process began.
fn plan_changed(plane: &Plane, query: &Query, plan: &QueryPlan) -> Option<CoordinatorToApp> {
    let entry = plane.known_peer(&query.entry).ok()??;
    let sink = plane.known_peer(&plan.operators.last()?.node).ok()??;
    Some(CoordinatorToApp::PlanChanged {
        route: AppRoute {
            generation: plan.generation,
            entry,
            sink,
        },
        trigger: plan.trigger.clone(),
        summary: plan.summary(),
    })
}

async fn read_messages(plane: &Plane, query: &QueryId, mut receive: RecvStream) -> String {
    let mut pace = Pace::new(FACTS_BURST, FACTS_PER_SECOND);
    loop {
        let message = match receive
            .next_frame(MESSAGE_BYTES_MAX, Deadline::never())
            .await
        {
            Ok(Some(message)) => message,
            Ok(None) => return "the app ended its control stream".to_owned(),
            Err(error) => return error.to_string(),
        };
        pace.take().await;
        match message {
            AppToCoordinator::Report(mut report) => {
                plane.queries.report(query, &mut report);
                let query = query.clone();
                plane
                    .roles
                    .monitor
                    .tell(monitor::Input::App { query, report }.into());
            }
            AppToCoordinator::Labels { set, mut labels } => {
                labels.retain(|(_, label)| label.len() <= LABEL_BYTES_MAX);
                if plane.queries.query_of_set(set).as_ref() == Some(query) {
                    let fact = explorer::Input::Labels { set, labels };
                    plane.roles.tell_explorer(query, fact);
                }
            }
            AppToCoordinator::Withdraw => {
                let actor = format!("app of {query}");
                if let Err(refusal) = plane
                    .stop_query(query, &actor, "withdrawn by its app")
                    .await
                {
                    tracing::warn!(%query, reason = refusal.error, "withdrawal refused");
                }
            }
            AppToCoordinator::Pong(_) => {}
            AppToCoordinator::Register { .. } | AppToCoordinator::Attach => {
                return "registering again needs a new session".to_owned();
            }
        }
    }
}

async fn write_messages(
    mut send: SendStream,
    mut outgoing: mpsc::Receiver<CoordinatorToApp>,
) -> String {
    while let Some(message) = outgoing.recv().await {
        let is_last = matches!(message, CoordinatorToApp::Withdrawn);
        if let Err(error) = send.write_frame(&message, Deadline::after_s(WRITE_S)).await {
            return format!("the app does not take its messages: {error}");
        }
        if is_last {
            let _ = send.deliver(Deadline::after_s(WRITE_S)).await;
            return "the query was withdrawn".to_owned();
        }
    }
    "the query is gone".to_owned()
}

fn gone(query: &Query) -> Refusal {
    Refusal::new(
        RefusalKind::Conflict,
        format!("entry node {} was removed from the fleet", query.entry),
    )
    .about(object(&query.id))
}

fn object(query: &QueryId) -> String {
    format!("query {query}")
}
