//! `compass-agent join|run|check|worker`

use std::ffi::OsString;
use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Parser, Subcommand};
use compass_shared::ids::NodeId;
use compass_shared::model::cluster::{NodeDescription, Resources};
use compass_shared::model::telemetry::{Emulation, NodeTelemetry};
use compass_shared::time::Moment;
use compass_shared::units::Millicores;
use compass_transport::{
    Alpn, CloseCode, Deadline, Endpoint, EndpointConfig, Identity, IdentityFolder, JoinToken,
    Resolver, Role, SystemResolver, Trust, WallClock, join,
};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::artifacts::ArtifactCache;
use crate::dataplane::{DataPlane, DataPlaneConfig};
use crate::limits::CpuLimiter;
use crate::node::Node;
use crate::session::{SessionLoop, SessionSource};
use crate::settings::{AgentSettings, Options};
use crate::store::{AgentStore, Fleet};
use crate::telemetry::diagnose::{CheckLevel, CheckLine, diagnose};
use crate::telemetry::{EmulatedNode, Root, TelemetryCollector, TelemetrySettings};
use crate::trials::{SampleStore, Trials};
use crate::workers::{SelfCommand, WorkerSettings, Workers};

/// Events that may wait for the session.
const EVENTS_MAX: usize = 1024;

/// Memory for recent frames of the queries that enter here, and as much again for frozen samples.
const SAMPLES_BYTES: u64 = 64 << 20;

/// Joining, all addresses together.
const JOIN_S: u64 = 20;

/// Waiting for the first readings in `join` and `check`.
const FIRST_READINGS: Duration = Duration::from_secs(3);

/// The agent of one node: telemetry, operators, trials, frames.
#[derive(Debug, Parser)]
#[command(name = "compass-agent", version, max_term_width = 120)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Join a fleet: get this node's certificate with a token
    Join(Join),
    /// Run the agent
    Run(Options),
    /// Look at this host and say what works
    Check(Options),
    /// Run one operator (the agent starts itself this way)
    #[command(hide = true)]
    Worker,
}

#[derive(Debug, clap::Args)]
struct Join {
    /// The coordinator, host:port
    coordinator: String,
    /// The token (visible in the process list; a file or standard input is safer)
    #[arg(long, conflicts_with = "token_file")]
    token: Option<String>,
    /// File with the token, or - for standard input
    #[arg(long, env = "COMPASS_JOIN_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// The name wanted, when the token leaves it open
    #[arg(long)]
    node: Option<NodeId>,
    #[command(flatten)]
    options: Options,
}

/// Runs the program. `leading` are the arguments with which this executable becomes `compass-agent` (none for the program itself).
pub(crate) fn main(arguments: impl IntoIterator<Item = OsString>, leading: &[&str]) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    // Before everything else: a worker is one bare thread.
    if arguments.get(1).is_some_and(|first| first == "worker") {
        return crate::workers::worker_main(arguments.into_iter().skip(2));
    }
    let arguments = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            let is_question = !error.use_stderr();
            // Nothing is left to do when the terminal is gone.
            let _ = error.print();
            return if is_question {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(64)
            };
        }
    };
    let filter = tracing_subscriber::EnvFilter::try_from_env("COMPASS_LOG")
        .unwrap_or_else(|_| "info".into());
    // A second subscriber in one process (tests) is refused; the first one serves.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .try_init();
    let outcome = match arguments.command {
        Command::Join(join) => block_on(join_fleet(join)),
        Command::Run(options) => block_on(run(options, leading)),
        Command::Check(options) => check(options),
        Command::Worker => unreachable!("handled above"),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn block_on(work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    // One worker thread beside the main one: the agent moves bytes, operators compute in processes of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(work);
    // A driver call that hangs must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

fn say(line: &CheckLine) {
    println!("{line}");
}

async fn join_fleet(join: Join) -> anyhow::Result<ExitCode> {
    let settings = join.options.clone().resolve()?;
    let token = JoinToken::parse(read_token(&join)?.trim()).context("that is no join token")?;
    let store = AgentStore::open(&settings.data)?;
    let _alone = store.lock()?;
    let folder = IdentityFolder::new(settings.data.join("identity"));
    let key = folder.key_or_create()?;
    let clock = WallClock::system_with_offset(settings.clock_offset_s);
    let addresses = SystemResolver
        .resolve(&join.coordinator)
        .await
        .with_context(|| format!("cannot resolve {}", join.coordinator))?;
    let local = std::net::SocketAddr::new(settings.listen.ip(), 0);
    let endpoint = Endpoint::bind(
        EndpointConfig::new(local, &[]),
        Trust::none(Arc::clone(&clock)),
        None,
    )?;
    let began = Instant::now();
    let identity = join::join(
        &endpoint,
        &addresses,
        &token,
        join.node,
        &key,
        Deadline::after_s(JOIN_S),
    )
    .await?;
    let took = began.elapsed();
    folder.save(&identity)?;
    store.set_fleet(&Fleet {
        coordinator: vec![join.coordinator.clone()],
    })?;
    say(&CheckLine::new(
        CheckLevel::Ok,
        "transport",
        format!("QUIC udp {} in {} ms", join.coordinator, took.as_millis()),
    ));
    if clock.is_behind_floor() {
        say(&CheckLine::new(
            CheckLevel::Warn,
            "clock",
            "this host's clock is behind the time this program was built; certificates are judged by the later one",
        ));
    }
    for line in readings(&settings).1 {
        say(&line);
    }
    let days = identity
        .facts()
        .not_after_unix_s
        .saturating_sub(clock.now_unix_s())
        / 86_400;
    let node = node_of(&identity)?;
    say(&CheckLine::new(
        CheckLevel::Ok,
        "joined",
        format!(
            "node {node}, tier {}, certificate valid {days}d (renews by itself)",
            settings.tier
        ),
    ));
    endpoint
        .close(CloseCode::DONE, "joined", Deadline::after_s(1))
        .await;
    Ok(ExitCode::SUCCESS)
}

fn read_token(join: &Join) -> anyhow::Result<String> {
    match (&join.token, &join.token_file) {
        (Some(token), _) => Ok(token.clone()),
        (None, Some(path)) if path.as_os_str() == "-" => {
            let mut text = String::new();
            std::io::stdin()
                .lock()
                .take(4096)
                .read_to_string(&mut text)
                .context("cannot read the token from standard input")?;
            Ok(text)
        }
        (None, Some(path)) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the token file {}", path.display())),
        (None, None) => bail!(
            "a token is needed: --token, --token-file FILE, or --token-file - for standard input"
        ),
    }
}

fn node_of(identity: &Identity) -> anyhow::Result<NodeId> {
    match identity.role() {
        Role::Node(node) => Ok(node.clone()),
        other => bail!("the identity in this folder is that of {other}, not of a node"),
    }
}

fn check(options: Options) -> anyhow::Result<ExitCode> {
    let settings = options.resolve()?;
    let (_, lines) = readings(&settings);
    let mut worst = CheckLevel::Ok;
    for line in &lines {
        say(line);
        worst = worst.max(line.level);
    }
    let line = match IdentityFolder::new(settings.data.join("identity")).load() {
        Ok(Some(identity)) => {
            CheckLine::new(CheckLevel::Ok, "identity", format!("{}", identity.role()))
        }
        Ok(None) => CheckLine::new(
            CheckLevel::Warn,
            "identity",
            "this node has not joined a fleet; run: compass-agent join HOST:PORT --token-file FILE",
        ),
        Err(error) => CheckLine::new(CheckLevel::Fail, "identity", error.to_string()),
    };
    say(&line);
    Ok(if worst.max(line.level) == CheckLevel::Fail {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

fn telemetry_settings(settings: &AgentSettings) -> anyhow::Result<TelemetrySettings> {
    let mut telemetry = TelemetrySettings {
        data_folder: Some(settings.data.clone()),
        ..TelemetrySettings::default()
    };
    telemetry
        .library
        .configured
        .clone_from(&settings.nvml_library);
    if let Some(speed) = settings.emulate_speed {
        telemetry.emulated = Some(EmulatedNode {
            emulation: Emulation::new(speed)?,
            cores: settings.cpu.map(|cpu| cpu.0.cores()),
            memory_bytes: settings.memory.map(|mib| u64::from(mib.0) << 20),
        });
    }
    Ok(telemetry)
}

/// The first readings and what they mean.
fn readings(settings: &AgentSettings) -> (NodeTelemetry, Vec<CheckLine>) {
    let telemetry = match telemetry_settings(settings) {
        Ok(telemetry) => telemetry,
        Err(error) => {
            return (
                NodeTelemetry::default(),
                vec![CheckLine::new(
                    CheckLevel::Fail,
                    "settings",
                    error.to_string(),
                )],
            );
        }
    };
    let mut collector = TelemetryCollector::new(telemetry);
    let report = collector.collect_settled(Moment(0), FIRST_READINGS);
    let lines = diagnose(&report);
    collector.shutdown(Duration::from_secs(1));
    (report, lines)
}

/// What may be granted: what the settings say, else all cores and three quarters of the memory of the host (within its control group).
fn capacity(settings: &AgentSettings, report: &NodeTelemetry) -> Resources {
    let cores = report.host.cpu_capacity_cores.value.unwrap_or(1.0);
    let memory_mib = (report.host.memory_total_bytes.value.unwrap_or(0) / 4 * 3) >> 20;
    Resources {
        cpu: settings
            .cpu
            .map_or(Millicores((cores * 1e3) as u32), |cpu| cpu.0),
        memory_mib: settings
            .memory
            .map_or(u32::try_from(memory_mib).unwrap_or(u32::MAX), |memory| {
                memory.0
            }),
        gpu_percent: report.devices.len() as u32 * 100,
    }
}

fn describe(
    settings: &AgentSettings,
    identity: &Identity,
    endpoint: &Endpoint,
    report: &NodeTelemetry,
) -> NodeDescription {
    let device_class = match (settings.emulate_speed, report.devices.first()) {
        (Some(speed), _) => format!("emulated-{speed}"),
        (None, Some(device)) => device.name.clone(),
        (None, None) => "cpu".to_owned(),
    };
    NodeDescription {
        tier: settings.tier,
        site: settings.site.clone(),
        device_class,
        emulated_speed: settings.emulate_speed,
        capacity: capacity(settings, report),
        labels: settings.labels.clone(),
        advertised: if settings.advertise.is_empty() {
            endpoint.local_addresses()
        } else {
            settings.advertise.clone()
        },
        fingerprint: identity.key().fingerprint(),
    }
}

/// What starts workers: this program again, with CPU shares held the best way this host has.
fn workers(
    settings: &AgentSettings,
    leading: &[&str],
    id: &NodeId,
) -> anyhow::Result<Arc<Workers>> {
    let self_command = SelfCommand {
        program: std::env::current_exe()?,
        leading_arguments: leading.iter().map(Into::into).collect(),
    };
    let mut worker_settings =
        WorkerSettings::new(self_command, settings.data.clone(), settings.emulate_speed);
    if settings.emulate_speed.is_none() {
        worker_settings.limiter = CpuLimiter::detect(&Root::default(), id.as_str());
    }
    tracing::info!(
        shares = worker_settings.limiter.summary(),
        "how CPU shares are held"
    );
    Ok(Arc::new(Workers::new(worker_settings)))
}

async fn run(options: Options, leading: &[&str]) -> anyhow::Result<ExitCode> {
    let settings = options.resolve()?;
    let store = AgentStore::open(&settings.data)?;
    let _alone = store.lock()?;
    let folder = IdentityFolder::new(settings.data.join("identity"));
    let (Some(identity), Some(fleet)) = (folder.load()?, store.fleet()?) else {
        bail!(
            "this node has not joined a fleet; run: compass-agent join HOST:PORT --token-file FILE --data {}",
            settings.data.display()
        );
    };
    let id = node_of(&identity)?;
    let clock = WallClock::system_with_offset(settings.clock_offset_s);
    clock.load(&settings.data.join("clock"));
    let trust = Trust::new(identity.authority().clone(), Arc::clone(&clock));
    let endpoint = Arc::new(Endpoint::bind(
        EndpointConfig::new(settings.listen, &[Alpn::Data]),
        trust,
        Some(identity.clone()),
    )?);
    for (address, report) in endpoint.socket_reports() {
        tracing::debug!(%address, ?report, "socket");
    }
    let boot = store.count_boot()?;

    let workers = workers(&settings, leading, &id)?;
    let artifacts = Arc::new(ArtifactCache::new(
        settings.data.join("artifacts"),
        settings.artifacts_bytes,
    )?);
    let samples = Arc::new(SampleStore::new(SAMPLES_BYTES));
    let mut telemetry = TelemetryCollector::new(telemetry_settings(&settings)?);
    let first =
        tokio::task::block_in_place(|| telemetry.collect_settled(Moment(0), FIRST_READINGS));
    let description = describe(&settings, &identity, &endpoint, &first);
    let trials = Arc::new(Trials::new(
        id.clone(),
        description.capacity,
        Arc::clone(&workers),
        Arc::clone(&artifacts),
        Arc::clone(&samples),
    ));
    let (events, event_receiver) = mpsc::channel(EVENTS_MAX);
    let data_plane = DataPlane::start(DataPlaneConfig {
        node: id.clone(),
        endpoint: Arc::clone(&endpoint),
        samples: Arc::clone(&samples),
        trials: Arc::clone(&trials),
        events,
    });
    let source = Arc::new(SessionSource::default());
    let node = Node::new(
        store,
        Arc::clone(&workers),
        Arc::clone(&artifacts),
        Arc::clone(&source) as _,
        Arc::clone(&data_plane),
    );
    if let Some(commit) = node.resume()? {
        tracing::info!(%commit, "resumed the target kept on disk");
    }
    let sessions = Arc::new(SessionLoop {
        id: id.clone(),
        description,
        boot,
        coordinator: fleet.coordinator.clone(),
        endpoint: Arc::clone(&endpoint),
        node: Arc::clone(&node),
        data_plane: Arc::clone(&data_plane),
        trials,
        samples,
        artifacts,
        source,
        telemetry: Mutex::new(telemetry),
        started: Instant::now(),
    });
    announce(&id, &endpoint)?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        never = sessions.run(event_receiver, workers.events()) => match never {},
        () = accept(&endpoint, &data_plane) => {}
        () = renew(&endpoint, &folder, &fleet, &clock, &settings.data) => {}
        _ = terminate.recv() => tracing::info!("terminating"),
        _ = tokio::signal::ctrl_c() => tracing::info!("interrupted"),
    }
    node.shut_down().await;
    endpoint
        .close(
            CloseCode::SHUTDOWN,
            "the agent is going away",
            Deadline::after_s(1),
        )
        .await;
    Ok(ExitCode::SUCCESS)
}

/// One line for whoever started the agent: it serves.
fn announce(id: &NodeId, endpoint: &Endpoint) -> anyhow::Result<()> {
    let address = endpoint
        .local_addresses()
        .first()
        .map(ToString::to_string)
        .unwrap_or_default();
    let mut stdout = std::io::stdout();
    writeln!(stdout, "ready node={id} address={address}")?;
    Ok(stdout.flush()?)
}

async fn accept(endpoint: &Endpoint, data_plane: &Arc<DataPlane>) {
    while let Some((principal, session)) = endpoint.accept().await {
        data_plane.accept(principal, session);
    }
}

/// Renews the certificate after a third of its life, and saves the time as a floor for the next start.
async fn renew(
    endpoint: &Arc<Endpoint>,
    folder: &IdentityFolder,
    fleet: &Fleet,
    clock: &WallClock,
    data: &std::path::Path,
) {
    let mut hourly = tokio::time::interval(Duration::from_secs(3600));
    loop {
        hourly.tick().await;
        if let Err(error) = clock.save(&data.join("clock")) {
            tracing::warn!(%error, "the time was not saved");
        }
        let due = endpoint.identity().is_some_and(|identity| {
            clock.now_unix_s() >= identity.facts().renew_at_unix_s(Duration::ZERO)
        });
        if !due {
            continue;
        }
        match renew_once(endpoint, folder, fleet).await {
            Ok(()) => tracing::info!("certificate renewed"),
            Err(error) => tracing::warn!(
                error = format!("{error:#}"),
                "the certificate was not renewed; trying again in an hour"
            ),
        }
    }
}

async fn renew_once(
    endpoint: &Arc<Endpoint>,
    folder: &IdentityFolder,
    fleet: &Fleet,
) -> anyhow::Result<()> {
    let mut addresses = Vec::new();
    for target in &fleet.coordinator {
        addresses.extend(
            SystemResolver
                .resolve(target)
                .await
                .with_context(|| format!("cannot resolve {target}"))?,
        );
    }
    let identity = join::renew(endpoint, &addresses, Deadline::after_s(JOIN_S)).await?;
    folder.save(&identity)?;
    endpoint.set_identity(identity)?;
    Ok(())
}
