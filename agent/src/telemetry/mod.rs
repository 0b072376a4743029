//! What this node can say about itself: GPUs, CPU, memory, and the processes of Compass.
//!
//! Start at [`TelemetryCollector`]. One thread reads the host, one finds the GPUs, one asks each GPU; [`TelemetryCollector::collect`]
//! only starts them and takes what they last had, so that a hung driver or file system never delays a report. Each source is a
//! module: [`nvml`] (behind a trait, with a scripted fake for tests), `jetson` (sysfs), `host` (sysinfo), [`cgroup`], [`meminfo`];
//! files are read below a relocatable [`Root`]. [`diagnose`] turns a report into lines for people.
//!
//! Deliberately absent: links (the data plane measures them), deciding anything, reading a clock.

mod backoff;
pub mod cgroup;
pub mod diagnose;
mod gpu;
mod host;
mod jetson;
pub mod meminfo;
pub mod nvml;
mod root;
mod worker;

#[cfg(test)]
pub(crate) mod test_tree;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use compass_shared::model::capacity::{MemoryPool, NodeMemory};
use compass_shared::model::telemetry::{
    DeviceState, DeviceTelemetry, Emulation, NodeTelemetry, Note, Reading, ShareTelemetry, Source,
};
use compass_shared::time::Moment;

use gpu::{Discovery, GpuSample, GpuSampler};
use host::{HostSample, HostSampler};
use nvml::real::RealNvml;
use nvml::search::{LibraryPlaces, LibrarySearch};
pub use root::Root;
use worker::{Worker, WorkerState};

/// How long a driver call may take before its device counts as hung.
pub const DEVICE_DEADLINE: Duration = Duration::from_secs(3);
/// A driver may be installed while the agent runs: GPUs are looked for again after this long, doubled each time.
const SEARCH_RETRY_FIRST: Duration = Duration::from_secs(60);
/// Longest wait between two searches.
const SEARCH_RETRY_MAX: Duration = Duration::from_secs(3600);

/// What the collector needs to know.
#[derive(Debug, Clone)]
pub struct TelemetrySettings {
    /// Where the host's file system begins; `/` unless the agent runs in a container that has the host's mounted.
    pub root: Root,
    /// Where to look for NVIDIA's management library.
    pub library: LibraryPlaces,
    /// How long one sample of a device or of the host may take before it counts as hung.
    pub device_deadline: Duration,
    /// The folder whose free room is reported.
    pub data_folder: Option<PathBuf>,
    /// Set when this node is to pass for a slower one.
    pub emulated: Option<EmulatedNode>,
}

impl Default for TelemetrySettings {
    fn default() -> Self {
        Self {
            root: Root::default(),
            library: LibraryPlaces::default(),
            device_deadline: DEVICE_DEADLINE,
            data_folder: None,
            emulated: None,
        }
    }
}

/// A node that passes for a slower one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmulatedNode {
    /// Speed of one core relative to this host's.
    pub emulation: Emulation,
    /// Cores it declares; the host's where none.
    pub cores: Option<f64>,
    /// Memory it declares, in bytes; the host's where none.
    pub memory_bytes: Option<u64>,
}

/// Opens the management library; called on a thread of its own, again and again while nothing is found.
pub type LibraryOpener = Box<dyn FnMut() -> LibrarySearch + Send>;

/// A GPU and the thread that asks it.
struct Device {
    id: String,
    name: String,
    worker: Worker<GpuSample>,
}

/// Searches for GPUs.
enum Search {
    Running(Worker<Discovery>),
    /// GPUs were found; the thread is ending.
    Done(Worker<Discovery>),
    /// No thread could be started.
    Failed,
}

/// Puts reports together.
pub struct TelemetryCollector {
    settings: TelemetrySettings,
    live_threads: Arc<AtomicUsize>,
    host: Option<Worker<HostSample>>,
    search: Search,
    search_due: Moment,
    search_wait: Duration,
    search_notes: Vec<Note>,
    devices: Vec<Device>,
    children: Arc<Mutex<Vec<u32>>>,
    shares: BTreeMap<String, Vec<ShareTelemetry>>,
}

impl TelemetryCollector {
    /// Starts the threads. Nothing is read before the first [`Self::collect`].
    pub fn new(settings: TelemetrySettings) -> Self {
        let places = settings.library.clone();
        let opener: LibraryOpener = Box::new(move || {
            LibrarySearch::run(&places, |path| Ok(Arc::new(RealNvml::open(path)?)))
        });
        Self::with_opener(settings, opener)
    }

    /// As [`Self::new`], with another way to the management library (a scripted one).
    pub fn with_opener(settings: TelemetrySettings, mut opener: LibraryOpener) -> Self {
        let live_threads = Arc::new(AtomicUsize::new(0));
        let children: Arc<Mutex<Vec<u32>>> = Arc::default();
        let mut host = HostSampler::new(
            settings.root.clone(),
            settings.data_folder.clone(),
            Arc::clone(&children),
        );
        let host = Worker::spawn(
            "tele-host",
            settings.device_deadline,
            Arc::clone(&live_threads),
            move |now| host.sample(now),
        )
        .ok();
        let root = settings.root.clone();
        let search = Worker::spawn(
            "tele-search",
            settings.device_deadline,
            Arc::clone(&live_threads),
            move |_| gpu::discover(&opener(), &root),
        );
        Self {
            settings,
            live_threads,
            host,
            search: search.map_or(Search::Failed, Search::Running),
            search_due: Moment::default(),
            search_wait: SEARCH_RETRY_FIRST,
            search_notes: Vec::new(),
            devices: Vec::new(),
            children,
            shares: BTreeMap::new(),
        }
    }

    /// Names the child processes to report on.
    pub fn set_children(&self, pids: Vec<u32>) {
        *self.children.lock().unwrap_or_else(PoisonError::into_inner) = pids;
    }

    /// Names the shares granted on a device, which are reported beside its busy time.
    pub fn set_shares(&mut self, device_id: &str, shares: Vec<ShareTelemetry>) {
        self.shares.insert(device_id.to_owned(), shares);
    }

    /// Starts a new round of samples and reports what the last one had. Never blocks; called once a second.
    pub fn collect(&mut self, now: Moment) -> NodeTelemetry {
        let mut report = NodeTelemetry {
            taken: now,
            ..NodeTelemetry::default()
        };
        self.collect_host(now, &mut report);
        self.collect_search(now, &mut report);
        for device in &self.devices {
            let (telemetry, dropped_values) = device.collect(now);
            report.devices.push(telemetry);
            report.dropped_values += dropped_values;
        }
        for device in &mut report.devices {
            // One pool: what the control group leaves of the host's memory bounds the GPU too.
            if let (MemoryPool::Unified { .. }, Some(total_bytes)) =
                (device.memory, report.host.memory_total_bytes.value)
            {
                device.memory = MemoryPool::Unified { total_bytes };
            }
            device.shares = self.shares.get(&device.id).cloned().unwrap_or_default();
        }
        if let Some(emulated) = self.settings.emulated {
            emulate(emulated, &mut report);
        }
        report.sanitise();
        report
    }

    /// As [`Self::collect`], after waiting for every device's first answer, at most this long in real time (for `check` and `join`).
    pub fn collect_settled(&mut self, now: Moment, patience: Duration) -> NodeTelemetry {
        let until = Instant::now() + patience;
        let left = || until.saturating_duration_since(Instant::now());
        self.collect(now);
        if let Search::Running(search) = &self.search {
            search.wait_idle(left());
        }
        self.collect(now);
        if let Some(host) = &self.host {
            host.wait_idle(left());
        }
        for device in &self.devices {
            device.worker.wait_idle(left());
        }
        self.collect(now)
    }

    /// Threads of this collector that have not ended; does not grow with time.
    pub fn thread_count(&self) -> usize {
        self.live_threads.load(Ordering::SeqCst)
    }

    /// Lets the threads end and waits for them, at most this long in real time; false when one is stuck in a call, in which case it
    /// is left behind and ends with the process.
    pub fn shutdown(self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let left = || until.saturating_duration_since(Instant::now());
        if let Some(host) = &self.host {
            host.stop();
        }
        if let Search::Running(search) | Search::Done(search) = &self.search {
            search.stop();
        }
        for device in &self.devices {
            device.worker.stop();
        }
        let mut have_ended = self
            .host
            .as_ref()
            .is_none_or(|host| host.wait_ended(left()));
        if let Search::Running(search) | Search::Done(search) = &self.search {
            have_ended &= search.wait_ended(left());
        }
        for device in &self.devices {
            have_ended &= device.worker.wait_ended(left());
        }
        have_ended
    }

    fn collect_host(&self, now: Moment, report: &mut NodeTelemetry) {
        report.agent.pid = std::process::id();
        let Some(host) = &self.host else {
            report
                .notes
                .push(warning("cpu", "no thread left to read the host".to_owned()));
            return;
        };
        // Taken before the poke, so that a report is always of the round before.
        let latest = host.latest();
        match host.poke(now) {
            WorkerState::Ready | WorkerState::Running => {}
            state @ (WorkerState::Hung | WorkerState::Ended) => {
                let text = format!("reading the host has {}", verb(state));
                report.notes.push(warning("cpu", text));
                return;
            }
        }
        if let Some(sample) = latest {
            report.host = sample.host;
            report.agent = sample.agent;
            report.children = sample.children;
            report.notes.extend(sample.notes);
        }
    }

    fn collect_search(&mut self, now: Moment, report: &mut NodeTelemetry) {
        let search = match &self.search {
            Search::Running(search) => search,
            Search::Done(_) => {
                report.notes.extend(self.search_notes.iter().cloned());
                return;
            }
            Search::Failed => {
                report.notes.push(warning(
                    "gpu",
                    "no thread left to look for GPUs; CPU-only".to_owned(),
                ));
                return;
            }
        };
        if let Some(found) = search.take() {
            self.search_notes = found.notes;
            self.search_due = now + self.search_wait;
            self.search_wait = self.search_wait.saturating_mul(2).min(SEARCH_RETRY_MAX);
            for sampler in found.devices {
                match Device::start(sampler, self.settings.device_deadline, &self.live_threads) {
                    Ok(device) => self.devices.push(device),
                    Err(error) => self.search_notes.push(warning(
                        "gpu",
                        format!("no thread left to ask a GPU: {error}"),
                    )),
                }
            }
        }
        report.notes.extend(self.search_notes.iter().cloned());
        if !self.devices.is_empty() {
            search.stop();
            if let Search::Running(search) = std::mem::replace(&mut self.search, Search::Failed) {
                self.search = Search::Done(search);
            }
        } else if now >= self.search_due
            && let state @ (WorkerState::Hung | WorkerState::Ended) = search.poke(now)
        {
            report.notes.push(warning(
                "gpu",
                format!("looking for GPUs has {}; CPU-only", verb(state)),
            ));
        }
    }
}

impl Device {
    fn start(
        mut sampler: GpuSampler,
        deadline: Duration,
        live_threads: &Arc<AtomicUsize>,
    ) -> std::io::Result<Self> {
        let (id, name) = (sampler.id().to_owned(), sampler.name().to_owned());
        let worker = Worker::spawn("tele-gpu", deadline, Arc::clone(live_threads), move |now| {
            sampler.sample(now)
        })?;
        Ok(Self { id, name, worker })
    }

    /// What the device last answered; nothing of it while it is hung, because old figures must not pass for new ones.
    fn collect(&self, now: Moment) -> (DeviceTelemetry, u32) {
        let latest = self.worker.latest();
        let state = match self.worker.poke(now) {
            WorkerState::Ready | WorkerState::Running => match latest {
                Some(sample) => return (sample.device, sample.dropped_values),
                None => DeviceState::Starting,
            },
            WorkerState::Hung => DeviceState::Hung,
            WorkerState::Ended => DeviceState::Failed,
        };
        (
            DeviceTelemetry {
                id: self.id.clone(),
                name: self.name.clone(),
                state,
                ..DeviceTelemetry::default()
            },
            0,
        )
    }
}

/// What a node can hold, from its report; none while the host's memory is not known.
pub fn node_memory(report: &NodeTelemetry) -> Option<NodeMemory> {
    Some(NodeMemory {
        host_total_bytes: report.host.memory_total_bytes.value?,
        devices: report.devices.iter().map(|device| device.memory).collect(),
    })
}

/// Declares what the emulated device would have, marked as such; "busy" is then the use by Compass's own processes.
fn emulate(emulated: EmulatedNode, report: &mut NodeTelemetry) {
    report.emulation = Some(emulated.emulation);
    let host = &mut report.host;
    if let Some(cores) = emulated.cores {
        host.cpu_capacity_cores = Reading::new(cores, Source::Emulated);
    }
    if let Some(memory_bytes) = emulated.memory_bytes {
        host.memory_total_bytes = Reading::new(memory_bytes, Source::Emulated);
        let used_bytes: u64 = report
            .children
            .iter()
            .filter_map(|child| child.resident_bytes.value)
            .sum();
        host.memory_available_bytes =
            Reading::new(memory_bytes.saturating_sub(used_bytes), Source::Emulated);
    }
    let used_percent: Option<f64> = report
        .children
        .iter()
        .map(|child| child.cpu_percent.value)
        .sum();
    let value = used_percent
        .zip(host.cpu_capacity_cores.value)
        .map(|(used_percent, cores)| {
            (used_percent / (cores * emulated.emulation.speed())).min(100.0)
        });
    host.cpu_busy_percent = Reading {
        value,
        source: Source::Emulated,
    };
}

fn verb(state: WorkerState) -> &'static str {
    if state == WorkerState::Hung {
        "not returned within its deadline"
    } else {
        "ended unexpectedly"
    }
}

fn warning(topic: &str, text: String) -> Note {
    Note {
        topic: topic.to_owned(),
        is_warning: true,
        text,
    }
}
