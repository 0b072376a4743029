//! What people and apps may ask for, whichever way they came: registering and stopping queries, opening and draining nodes.
//!
//! Start at [`Plane::register_query`]. Each act is checked, made durable together with its audit line, and only then told to the roles and
//! acknowledged. A refusal says what happened, to which object, and the way out.

use std::sync::Arc;

use compass_planning::roles::{monitor, scheduler};
use compass_shared::api::ErrorBody;
use compass_shared::ids::{Digest, NodeId, QueryId};
use compass_shared::model::cluster::Scheduling;
use compass_shared::model::plan::Peer;
use compass_shared::model::query::Query;
use compass_shared::spec::SpecError;
use compass_shared::spec::documents::parse_query;
use compass_shared::wire::v1::CoordinatorToApp;
use compass_transport::CloseCode;

use crate::events::{Event, now_unix_ms};
use crate::plane::Plane;
use crate::store::records::{FrontRecord, NodeRecord, PlanRecord, QueryRecord, QueryState};
use crate::store::{StoreError, get, scan};
use crate::tokens::{Bearer, TokenError};

/// How often an act is repeated when others change the same record.
const CONFLICT_RETRIES: usize = 8;

/// What kind of refusal it is; decides the status of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// The request itself is wrong.
    Invalid,
    /// No token, or one that does not count.
    Unauthenticated,
    /// A token without this right.
    Forbidden,
    /// No such object.
    NotFound,
    /// It contradicts what is there.
    Conflict,
    /// Too much of something.
    TooMuch,
    /// Not now.
    Unavailable,
    /// A fault of this program or its disk.
    Internal,
}

/// Why something is not done.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{error}")]
pub struct Refusal {
    /// Which kind.
    pub kind: RefusalKind,
    /// What happened and why.
    pub error: String,
    /// To which object.
    pub object: Option<String>,
    /// The way out.
    pub hint: Option<String>,
}

impl Refusal {
    /// A refusal that concerns no object in particular.
    pub fn new(kind: RefusalKind, error: impl Into<String>) -> Self {
        Self {
            kind,
            error: error.into(),
            object: None,
            hint: None,
        }
    }

    /// The same about an object.
    #[must_use]
    pub fn about(mut self, object: impl Into<String>) -> Self {
        self.object = Some(object.into());
        self
    }

    /// The same with a way out.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// There is no such object.
    pub fn unknown(what: &str, name: impl std::fmt::Display, list: &str) -> Self {
        Self::new(RefusalKind::NotFound, format!("there is no {what} {name}"))
            .about(format!("{what} {name}"))
            .hint(format!("see {list}"))
    }

    /// As the API sends it.
    pub fn body(&self) -> ErrorBody {
        ErrorBody {
            error: self.error.clone(),
            object: self.object.clone(),
            hint: self.hint.clone(),
        }
    }

    /// In one text, for a peer that takes only that.
    pub fn text(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{} ({hint})", self.error),
            None => self.error.clone(),
        }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        let kind = match error {
            StoreError::Conflict { .. } => RefusalKind::Conflict,
            _ => RefusalKind::Internal,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<SpecError> for Refusal {
    fn from(error: SpecError) -> Self {
        let hint = error.hint.clone();
        let refusal = Self::new(RefusalKind::Invalid, error.to_string());
        match hint {
            Some(hint) => refusal.hint(hint),
            None => refusal,
        }
    }
}

impl From<TokenError> for Refusal {
    fn from(error: TokenError) -> Self {
        let kind = match &error {
            TokenError::Unknown | TokenError::Expired { .. } | TokenError::Revoked { .. } => {
                RefusalKind::Unauthenticated
            }
            TokenError::WrongPurpose { .. } => RefusalKind::Forbidden,
            TokenError::TooMany => RefusalKind::TooMuch,
            TokenError::Store(_) => RefusalKind::Internal,
            _ => RefusalKind::Conflict,
        };
        Self::new(kind, error.to_string())
    }
}

/// A query that is on record.
#[derive(Debug, Clone)]
pub struct Registered {
    /// Its record.
    pub record: QueryRecord,
    /// Where frames enter, if that node has ever registered.
    pub entry: Option<Peer>,
}

impl Plane {
    /// Reads a query as people write it.
    ///
    /// # Errors
    /// At its line.
    pub fn parse_query(&self, yaml: &str) -> Result<Query, Refusal> {
        Ok(parse_query(
            "request",
            yaml,
            &self.configs.pipelines,
            &self.configs.catalogue,
        )?)
    }

    /// Puts a query on record, or takes the same one up again (with the key of its app, if an app asks). Durable when this returns.
    ///
    /// # Errors
    /// When the text is wrong, another query has the name, the entry node is not known, or there are too many.
    pub async fn register_query(
        &self,
        yaml: &str,
        app: Option<Digest>,
        bearer: &Bearer,
    ) -> Result<Registered, Refusal> {
        let query = self.parse_query(yaml)?;
        let entry = self.known_peer(&query.entry)?;
        if entry.is_none() {
            return Err(self.unknown_entry(&query));
        }
        for _ in 0..CONFLICT_RETRIES {
            match self.try_register(&query, yaml, app, bearer).await {
                Ok(record) => return Ok(Registered { record, entry }),
                Err(refusal)
                    if refusal.kind == RefusalKind::Conflict && refusal.object.is_none() => {}
                Err(refusal) => return Err(refusal),
            }
        }
        Err(busy(&format!("query {}", query.id)))
    }

    async fn try_register(
        &self,
        query: &Query,
        yaml: &str,
        app: Option<Digest>,
        bearer: &Bearer,
    ) -> Result<QueryRecord, Refusal> {
        let key = QueryRecord::key_of(&query.id);
        let object = format!("query {}", query.id);
        let found = get::<QueryRecord>(self.office.store(), &key)?;
        let seen = found.as_ref().map(|(_, revision)| *revision);
        let active = found
            .map(|(record, _)| record)
            .filter(|record| record.state == QueryState::Active);
        if let Some(record) = &active
            && record.query != *query
        {
            return Err(Refusal::new(
                RefusalKind::Conflict,
                format!("another query is registered as {}", query.id),
            )
            .about(object)
            .hint(format!(
                "stop it first (compass query stop {}), or choose another name",
                query.id
            )));
        }
        let is_new = active.is_none();
        if is_new {
            self.check_room(&object)?;
        }
        let before = active.as_ref().and_then(|record| record.app_fingerprint);
        let record = QueryRecord {
            query: query.clone(),
            yaml: yaml.to_owned(),
            state: QueryState::Active,
            registered_unix_ms: active
                .as_ref()
                .map_or_else(now_unix_ms, |record| record.registered_unix_ms),
            registered_by: bearer.token_id.clone(),
            app_fingerprint: app.or(before),
        };
        if active.as_ref() != Some(&record) {
            let text = if is_new {
                "registered"
            } else {
                "taken up again"
            };
            let event = Event::new("query", object, format!("token {}", bearer.token_id), text);
            let mut transaction = self.office.begin().expecting(key, seen).put(&record);
            if is_new {
                // A query that had this name before is another one: its plans are not this one's history.
                let prefix = PlanRecord::prefix_of(&query.id);
                for (old, _) in self.office.store().scan(&prefix, None, usize::MAX)? {
                    transaction = transaction.delete(old);
                }
            }
            self.events.record_durably(event, transaction).await?;
        }
        self.announce(&record, is_new, before != record.app_fingerprint);
        Ok(record)
    }

    /// Tells the roles what is on record.
    fn announce(&self, record: &QueryRecord, is_new: bool, is_new_key: bool) {
        let id = &record.query.id;
        self.queries.open(id, None);
        if is_new {
            let query = Arc::new(record.query.clone());
            self.roles
                .monitor
                .tell(monitor::Input::QueryUp(query.clone()).into());
            let fact = scheduler::Input::Register {
                query,
                app: record.app_fingerprint,
            };
            self.roles.scheduler.tell(fact.into());
            self.roles.start_explorer(id);
        } else if is_new_key {
            let fact = scheduler::Input::Attach {
                query: id.clone(),
                app: record.app_fingerprint,
            };
            self.roles.scheduler.tell(fact.into());
        }
    }

    /// Ends a query. Durable when this returns.
    ///
    /// # Errors
    /// When there is no such query.
    pub async fn stop_query(
        &self,
        query: &QueryId,
        actor: &str,
        reason: &str,
    ) -> Result<(), Refusal> {
        let key = QueryRecord::key_of(query);
        for _ in 0..CONFLICT_RETRIES {
            let found = get::<QueryRecord>(self.office.store(), &key)?;
            let Some((mut record, revision)) =
                found.filter(|(record, _)| record.state == QueryState::Active)
            else {
                return Err(Refusal::unknown("query", query, "compass query list"));
            };
            record.state = QueryState::Stopped {
                reason: reason.to_owned(),
            };
            let event = Event::new(
                "query",
                format!("query {query}"),
                actor,
                format!("stopped: {reason}"),
            );
            let transaction = self
                .office
                .begin()
                .expecting(&key, Some(revision))
                .put(&record)
                .delete(FrontRecord::key_of(query));
            match self.events.record_durably(event, transaction).await {
                Ok(_) => {}
                Err(StoreError::Conflict { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            self.roles.stop_explorer(query);
            self.dispatch.withdraw(query);
            self.roles
                .monitor
                .tell(monitor::Input::QueryDown(query.clone()).into());
            self.roles
                .scheduler
                .tell(scheduler::Input::Withdraw(query.clone()).into());
            self.queries.send(query, CoordinatorToApp::Withdrawn);
            // The session's writer delivers what is queued and closes, once the queue's other end is dropped with the seat.
            drop(self.queries.close(query));
            return Ok(());
        }
        Err(busy(&format!("query {query}")))
    }

    /// Opens, cordons or drains a node. Durable when this returns.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn set_scheduling(
        &self,
        node: &NodeId,
        scheduling: Scheduling,
        actor: &str,
        reason: &str,
    ) -> Result<(), Refusal> {
        let key = NodeRecord::key_of(node);
        for _ in 0..CONFLICT_RETRIES {
            let Some((mut record, revision)) = get::<NodeRecord>(self.office.store(), &key)? else {
                return Err(Refusal::unknown("node", node, "compass node list"));
            };
            record.scheduling = scheduling;
            let event = Event::new(
                "node",
                format!("node {node}"),
                actor,
                format!("{scheduling:?}: {reason}").to_lowercase(),
            );
            let transaction = self
                .office
                .begin()
                .expecting(&key, Some(revision))
                .put(&record);
            match self.events.record_durably(event, transaction).await {
                Ok(_) => {}
                Err(StoreError::Conflict { .. }) => continue,
                Err(error) => return Err(error.into()),
            }
            let fact = monitor::Input::Scheduling {
                node: node.clone(),
                scheduling,
            };
            self.roles.monitor.tell(fact.into());
            return Ok(());
        }
        Err(busy(&format!("node {node}")))
    }

    /// Forgets a node: its certificate counts no more, its name is free. Durable when this returns.
    ///
    /// # Errors
    /// When there is no such node.
    pub async fn remove_node(&self, node: &NodeId, actor: &str) -> Result<(), Refusal> {
        let key = NodeRecord::key_of(node);
        let Some((_, revision)) = get::<NodeRecord>(self.office.store(), &key)? else {
            return Err(Refusal::unknown("node", node, "compass node list"));
        };
        let event = Event::new(
            "node",
            format!("node {node}"),
            actor,
            "removed from the fleet",
        );
        let transaction = self
            .office
            .begin()
            .expecting(&key, Some(revision))
            .delete(&key);
        self.events.record_durably(event, transaction).await?;
        self.dispatch.forget(node);
        if let Some(seat) = self.fleet.seat(node) {
            seat.session
                .close(CloseCode::REFUSED, "this node was removed from the fleet");
        }
        Ok(())
    }

    /// How other nodes and apps reach a node, connected or not; none when it has never said so.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn known_peer(&self, node: &NodeId) -> Result<Option<Peer>, StoreError> {
        if let Some(peer) = self.fleet.peer(node) {
            return Ok(Some(peer));
        }
        let found = get::<NodeRecord>(self.office.store(), &NodeRecord::key_of(node))?;
        Ok(found.and_then(|(record, _)| {
            record.description.map(|description| Peer {
                node: record.id,
                addresses: description.advertised,
                fingerprint: record.fingerprint,
            })
        }))
    }

    fn unknown_entry(&self, query: &Query) -> Refusal {
        let nodes = scan::<NodeRecord>(self.office.store()).unwrap_or_default();
        let known: Vec<_> = nodes.iter().map(|node| node.id.as_str()).collect();
        let hint = match compass_shared::spec::did_you_mean(query.entry.as_str(), known.clone()) {
            Some(near) => format!("did you mean {near:?}?"),
            None if known.is_empty() => "no node has joined yet".to_owned(),
            None => format!("nodes: {}", known.join(", ")),
        };
        Refusal::new(
            RefusalKind::Invalid,
            format!("source.node {} is not known", query.entry),
        )
        .about(format!("query {}", query.id))
        .hint(hint)
    }

    fn check_room(&self, object: &str) -> Result<(), Refusal> {
        let limit = self.settings.limits.queries;
        let records = scan::<QueryRecord>(self.office.store())?;
        let active = records
            .iter()
            .filter(|record| record.state == QueryState::Active)
            .count();
        if active < limit {
            return Ok(());
        }
        Err(Refusal::new(
            RefusalKind::TooMuch,
            format!("there are already {active} queries, the limit is {limit}"),
        )
        .about(object)
        .hint("stop one, or raise limits.queries"))
    }
}

fn busy(object: &str) -> Refusal {
    Refusal::new(
        RefusalKind::Unavailable,
        "others keep changing the same record".to_owned(),
    )
    .about(object)
    .hint("try again")
}
