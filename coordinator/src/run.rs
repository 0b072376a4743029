//! Starting and ending: the data folder, the parts in their order, and a clean way out.
//!
//! Start at [`Coordinator::start`]. It must run where actors can be started (within `actix::System`, on its own thread).

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use compass_shared::api::Role as ApiRole;
use compass_shared::model::plan::QueryPlan;
use compass_transport::identity::AuthoritySettings;
use compass_transport::{
    Alpn, CertificateAuthority, CloseCode, Deadline, Endpoint, EndpointConfig, Role, Trust,
    WallClock,
};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::actors::{Roles, host};
use crate::artifacts::Artifacts;
use crate::clock::Clock;
use crate::compute::ComputePool;
use crate::configs::Configs;
use crate::dispatch::Dispatch;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::plane::{Health, Picture, Plane, TrialLog};
use crate::queries::Queries;
use crate::settings::Settings;
use crate::store::records::{AssignmentRecord, QueryRecord, QueryState, TokenPurpose};
use crate::store::redb::RedbStore;
use crate::store::{Office, get, scan};
use crate::takeover::Takeover;
use crate::tokens::{NewToken, Tokens, digest_of, random_token};
use crate::{api, gateway};

/// The administrator's first token, in the data folder.
const ADMIN_TOKEN_FILE: &str = "admin.token";
/// Sessions have this long to hear that the coordinator goes away.
const CLOSE: Duration = Duration::from_secs(2);
/// How often the store is asked whether it still works.
const STORE_CHECK: Duration = Duration::from_millis(500);
/// How often the wall clock is saved as a floor for the next start.
const CLOCK_SAVE: Duration = Duration::from_secs(600);

/// A coordinator that serves.
pub struct Coordinator {
    /// Its parts, for tests.
    pub plane: Arc<Plane>,
    /// Where agents and apps connect.
    pub quic: SocketAddr,
    /// Where the API is.
    pub http: SocketAddr,
    /// Where the administrator's token lies.
    pub admin_token_file: PathBuf,
    endpoint: Arc<Endpoint>,
    stop: watch::Sender<bool>,
    roles: JoinHandle<String>,
    gateway: JoinHandle<()>,
    api: JoinHandle<std::io::Result<()>>,
    clock_saver: JoinHandle<()>,
}

impl Coordinator {
    /// Starts every part; serves when this returns.
    ///
    /// # Errors
    /// What is wrong with the settings, the data folder, the configuration or the addresses.
    pub async fn start(settings: Settings) -> anyhow::Result<Self> {
        let data_dir = settings.data_dir.clone();
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&data_dir)
            .with_context(|| format!("cannot make the data folder {}", data_dir.display()))?;
        let wall = WallClock::system();
        wall.load(&data_dir.join("clock"));
        let (plane, commands) = build(settings, wall.clone()).await?;
        let admin_token_file = data_dir.join(ADMIN_TOKEN_FILE);
        ensure_admin_token(&plane, &admin_token_file).await?;

        let trust = Trust::new(plane.authority.certificate().clone(), wall.clone());
        let identity = plane.authority.identity(&Role::Coordinator)?;
        let accept = [Alpn::Agent, Alpn::App, Alpn::Join];
        let mut config = EndpointConfig::new(plane.settings.listen, &accept);
        config.restart_key = Some(plane.authority.restart_key());
        let endpoint = Arc::new(Endpoint::bind(config, trust, Some(identity))?);
        let quic = endpoint
            .local_addresses()
            .first()
            .copied()
            .context("no QUIC address is bound")?;
        let listener = TcpListener::bind(plane.settings.http)
            .await
            .with_context(|| format!("cannot listen on {} for the API", plane.settings.http))?;
        let http = listener.local_addr()?;
        if !http.ip().is_loopback() {
            tracing::warn!(%http, "the API has no TLS of its own and does not listen on loopback: put a proxy before it");
        }

        let roles = actix::spawn(host::run(plane.clone(), commands));
        let (stop, _) = watch::channel(false);
        let gateway = tokio::spawn(gateway::run(plane.clone(), endpoint.clone()));
        let mut stopped = stop.subscribe();
        let router = api::router(plane.clone());
        let connections = plane.settings.limits.http_connections;
        let api = tokio::spawn(api::serve(listener, connections, router, async move {
            // An error means that the sender is gone, which says the same.
            let _ = stopped.wait_for(|stop| *stop).await;
        }));
        let clock_saver = tokio::spawn(save_clock(wall, data_dir.join("clock")));
        Ok(Self {
            plane,
            quic,
            http,
            admin_token_file,
            endpoint,
            stop,
            roles,
            gateway,
            api,
            clock_saver,
        })
    }

    /// The line that says that it serves, and where.
    pub fn ready_line(&self) -> String {
        format!(
            "ready quic={} http={} authority={} admin_token_file={}",
            self.quic,
            self.http,
            self.plane.authority.fingerprint(),
            self.admin_token_file.display()
        )
    }

    /// Waits until it cannot go on; says why.
    pub async fn failed(&mut self) -> String {
        let office = self.plane.office.clone();
        let store = async move {
            loop {
                tokio::time::sleep(STORE_CHECK).await;
                if let Some(failure) = office.store().failure() {
                    return failure;
                }
            }
        };
        tokio::select! {
            reason = &mut self.roles => reason.unwrap_or_else(|error| format!("the roles' host failed: {error}")),
            ended = &mut self.gateway => format!("the gateway ended: {ended:?}"),
            ended = &mut self.api => format!("the API ended: {ended:?}"),
            reason = store => reason,
        }
    }

    /// Tells everybody that it goes away, and ends; nothing of it runs any more when this returns, and the store is free.
    pub async fn shut_down(self) {
        self.stop.send_replace(true);
        self.clock_saver.abort();
        self.endpoint
            .close(
                CloseCode::SHUTDOWN,
                "the coordinator is going away; come back later",
                Deadline::after(CLOSE),
            )
            .await;
        self.gateway.abort();
        let _ = self.gateway.await;
        self.roles.abort();
        let _ = self.roles.await;
        self.plane.roles.retire();
        // Requests under way have as long; a client that keeps its connection open does not hold up the end.
        let mut api = self.api;
        if tokio::time::timeout(CLOSE, &mut api).await.is_err() {
            api.abort();
            let _ = api.await;
        }
        // What still holds the office (requests under way, the audit log's writer with its last lines) lets go of it now. The last
        // holder must be this one: a count of zero elsewhere says that the store is being closed, not that its file is free.
        let mut office = self.plane.office.clone();
        drop(self.plane);
        let waited = tokio::time::Instant::now();
        loop {
            match Arc::try_unwrap(office) {
                Ok(last) => return drop(last),
                Err(shared) if waited.elapsed() < CLOSE => office = shared,
                Err(shared) => {
                    tracing::warn!(holders = Arc::strong_count(&shared), "something still runs");
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Opens the data folder and puts the parts together; nothing runs yet but the audit log's writer.
pub(crate) async fn build(
    settings: Settings,
    wall: Arc<WallClock>,
) -> anyhow::Result<(
    Arc<Plane>,
    tokio::sync::mpsc::UnboundedReceiver<crate::actors::HostCommand>,
)> {
    let data_dir = &settings.data_dir;
    let configs = Configs::load(settings.configs_dir.as_deref())?;
    let metrics = Arc::new(Metrics::new());
    let counted = metrics.clone();
    let observer = Box::new(move |transactions: usize, took: Duration| {
        counted.store_transactions.inc_by(transactions as u64);
        counted.store_commit.observe(took.as_secs_f64());
    });
    let store = Arc::new(RedbStore::open(&data_dir.join("store.redb"), observer)?);
    let holder = format!("pid {}", std::process::id());
    let office = Arc::new(Office::take(store, &holder).await?);
    let authority = CertificateAuthority::open_or_create(
        &data_dir.join("authority"),
        wall,
        AuthoritySettings::default(),
    )?;
    let artifacts = Artifacts::open(
        &data_dir.join("artifacts"),
        settings.limits.artifact_bytes,
        settings.limits.artifact_store_bytes,
    )?;
    let clock = Clock::begin();
    let (roles, commands) = Roles::new();
    let plane = Arc::new(Plane {
        clock,
        events: Events::open(office.clone(), metrics.clone())?,
        tokens: Tokens::new(office.clone()),
        fleet: Arc::new(Fleet::new(clock, metrics.clone())),
        queries: Arc::new(Queries::new(clock, metrics.clone())),
        artifacts: Arc::new(artifacts),
        picture: Picture::new(configs.prices.clone()),
        configs,
        authority: Arc::new(authority),
        roles,
        dispatch: Dispatch::default(),
        takeover: Takeover::default(),
        search_pool: ComputePool::for_this_machine(),
        schedule_pool: ComputePool::new(1),
        watch_pool: ComputePool::new(1),
        trials: TrialLog::default(),
        health: Health::default(),
        office,
        metrics,
        settings,
    });
    restore_queries(&plane)?;
    Ok((plane, commands))
}

/// Takes up the queries the store has, with the plans that are in force.
fn restore_queries(plane: &Plane) -> anyhow::Result<()> {
    let store = plane.office.store();
    let mut plans = get::<AssignmentRecord>(store, AssignmentRecord::KEY)?
        .map(|(record, _)| record.assignment.plans)
        .unwrap_or_default();
    let mut restored = 0;
    for record in scan::<QueryRecord>(store)? {
        if record.state == QueryState::Active {
            let query = record.query.id;
            let plan: Option<QueryPlan> = plans.remove(&query);
            plane.queries.open(&query, plan);
            restored += 1;
        }
    }
    plane
        .takeover
        .begin(&plane.queries.plans(), plane.clock.now());
    tracing::info!(
        queries = restored,
        term = plane.office.term(),
        "state restored"
    );
    Ok(())
}

/// Makes the administrator's token on the first start. Its file is readable by its owner only, and its text appears nowhere else.
async fn ensure_admin_token(plane: &Plane, path: &Path) -> anyhow::Result<()> {
    let now = plane.authority.clock().now_unix_s() * 1000;
    if let Ok(text) = std::fs::read_to_string(path) {
        if let Err(error) = plane.tokens.authenticate(text.trim(), ApiRole::Admin, now) {
            tracing::warn!(path = %path.display(), %error, "the token in this file does not count; remove the file to get a new one");
        }
        return Ok(());
    }
    let text = random_token();
    let new = NewToken {
        purpose: TokenPurpose::Api {
            role: ApiRole::Admin,
        },
        note: "made at the first start".to_owned(),
        expires_unix_ms: None,
    };
    plane.tokens.create(digest_of(&text), new, now).await?;
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| format!("cannot write {}", path.display()))?;
    file.write_all(format!("{text}\n").as_bytes())?;
    file.sync_all()?;
    Ok(())
}

async fn save_clock(wall: Arc<WallClock>, path: PathBuf) {
    loop {
        if let Err(error) = wall.save(&path) {
            tracing::warn!(path = %path.display(), %error, "the time was not saved");
        }
        tokio::time::sleep(CLOCK_SAVE).await;
    }
}
