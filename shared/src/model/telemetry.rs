//! What a node says about itself once a second: every number with its source, "no value" never as 0.
//!
//! Start at [`NodeTelemetry`]. A figure is a [`Reading`]: a value or none, and where it came from. [`NodeTelemetry::sanitise`] turns
//! sentinels and out-of-range figures into "no value" and counts them; the agent calls it before sending and the coordinator again
//! after receiving, so that neither a driver's blank value nor a broken agent reaches the planner.
//!
//! Busy time and granted share are two fields: a device can be 100 % busy with kernels of an operator that holds a 50 % share.
//! Deliberately absent: capacity arithmetic (see [`super::capacity`]), link figures (the data plane measures them), any clock.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::capacity::MemoryPool;
use crate::time::Moment;

#[cfg(test)]
mod tests;

/// Devices one report may list; more than any host has.
pub const DEVICES_MAX: usize = 64;
/// Processes one list of a report may hold.
pub const PROCESSES_MAX: usize = 256;
/// Notes one report may hold.
pub const NOTES_MAX: usize = 64;
/// Longest text in a report, in bytes; longer ones are cut.
pub const TEXT_BYTES_MAX: usize = 256;

/// Longest word of an open vocabulary, in bytes.
const WORD_BYTES_MAX: usize = 32;

/// Largest believable memory of one device, in bytes (16 TiB).
pub const DEVICE_MEMORY_BYTES_MAX: u64 = 1 << 44;
/// Largest believable memory of one host, in bytes (256 TiB).
pub const HOST_MEMORY_BYTES_MAX: u64 = 1 << 48;
/// Most CPU cores one host is believed to have.
pub const CORES_MAX: f64 = 65_536.0;
/// Largest believable power of one device, in milliwatts (20 kW).
pub const POWER_MW_MAX: u64 = 20_000_000;
/// Largest believable clock, in MHz.
pub const CLOCK_MHZ_MAX: u64 = 20_000;

/// Where a figure came from. An open vocabulary: it travels as text, and what this version does not know is kept as it came.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Source {
    /// NVIDIA's management library.
    Nvml,
    /// Files below `/sys`, as on Jetson boards.
    Sysfs,
    /// The operating system's process and CPU tables.
    Sysinfo,
    /// Files below `/proc`.
    Procfs,
    /// The control group this node runs in.
    Cgroup,
    /// Measured by Compass itself.
    Measured,
    /// Declared for an emulated device.
    Emulated,
    /// Nothing supplies it.
    #[default]
    None,
    /// A source this version has no name for.
    Other(String),
}

impl Source {
    /// The word used on the wire and towards people.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Nvml => "nvml",
            Self::Sysfs => "sysfs",
            Self::Sysinfo => "sysinfo",
            Self::Procfs => "procfs",
            Self::Cgroup => "cgroup",
            Self::Measured => "measured",
            Self::Emulated => "emulated",
            Self::None => "none",
            Self::Other(text) => text,
        }
    }
}

impl From<String> for Source {
    fn from(text: String) -> Self {
        match text.as_str() {
            "nvml" => Self::Nvml,
            "sysfs" => Self::Sysfs,
            "sysinfo" => Self::Sysinfo,
            "procfs" => Self::Procfs,
            "cgroup" => Self::Cgroup,
            "measured" => Self::Measured,
            "emulated" => Self::Emulated,
            "none" => Self::None,
            _ => Self::Other(shortened(text)),
        }
    }
}

impl From<Source> for String {
    fn from(source: Source) -> Self {
        match source {
            Source::Other(text) => text,
            known => known.as_str().to_owned(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A figure and where it came from; "no value" is its own state, never 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading<T> {
    /// The figure, if there is one.
    pub value: Option<T>,
    /// Who supplied it, or who was asked and had nothing usable ([`Source::None`]: there is nobody to ask).
    pub source: Source,
}

impl<T> Default for Reading<T> {
    fn default() -> Self {
        Self::none()
    }
}

impl<T> Reading<T> {
    /// A figure from a source.
    pub const fn new(value: T, source: Source) -> Self {
        Self {
            value: Some(value),
            source,
        }
    }

    /// No figure and nobody to ask.
    pub const fn none() -> Self {
        Self {
            value: None,
            source: Source::None,
        }
    }

    /// The source when there is a value, else [`Source::None`]: what a person should read as "where this comes from".
    pub fn effective_source(&self) -> &Source {
        if self.value.is_some() {
            &self.source
        } else {
            &Source::None
        }
    }

    /// This reading if it has a value, else the other one.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        if self.value.is_some() || other.value.is_none() {
            self
        } else {
            other
        }
    }
}

impl<T: Copy> Reading<T> {
    /// Drops the value unless `keep` accepts it; tells whether one was dropped.
    fn retain(&mut self, keep: impl FnOnce(T) -> bool) -> bool {
        let Some(value) = self.value else {
            return false;
        };
        if keep(value) {
            return false;
        }
        self.value = None;
        true
    }
}

/// The whole report of one node at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct NodeTelemetry {
    /// When it was put together, on the node's own monotonic clock.
    pub taken: Moment,
    /// CPU and memory of the host, within the limits of the control group.
    pub host: HostTelemetry,
    /// GPUs, in a stable order.
    pub devices: Vec<DeviceTelemetry>,
    /// The agent's own process.
    pub agent: ProcessTelemetry,
    /// The agent's children (workers).
    pub children: Vec<ProcessTelemetry>,
    /// Set when this node pretends to be a slower one.
    pub emulation: Option<Emulation>,
    /// What a person should know about how these figures came about.
    pub notes: Vec<Note>,
    /// Figures dropped as sentinels or out of range while this report was made, at the agent and at the coordinator together.
    pub dropped_values: u32,
}

/// CPU and memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostTelemetry {
    /// CPUs the host has online.
    pub cores: Reading<u32>,
    /// CPUs this node may use: the least of the host's, the allowed set's and every ancestor group's quota. What is planned on.
    pub cpu_capacity_cores: Reading<f64>,
    /// Busy part of that capacity, in percent.
    pub cpu_busy_percent: Reading<f64>,
    /// Memory this node may use: the least of the host's and every ancestor group's limit, in bytes.
    pub memory_total_bytes: Reading<u64>,
    /// The part of it that could still be taken without swapping, in bytes.
    pub memory_available_bytes: Reading<u64>,
    /// Free room for artifacts, in bytes.
    pub disk_free_bytes: Reading<u64>,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DeviceTelemetry {
    /// Stable on this node: the vendor's unique id where there is one, else `gpu-0`, ….
    pub id: String,
    /// Marketing name, for people.
    pub name: String,
    /// Whether the device answers.
    pub state: DeviceState,
    /// Where its memory is; decides what a model placed on it is charged to.
    pub memory: MemoryPool,
    /// Share of time in which some kernel ran, in percent. Not a share of the chip: see [`ShareTelemetry`].
    pub busy_percent: Reading<f64>,
    /// Used memory of its own, in bytes; none on a device that shares the host's.
    pub memory_used_bytes: Reading<u64>,
    /// Power draw, in milliwatts.
    pub power_mw: Reading<u64>,
    /// Core temperature, in degrees Celsius.
    pub temperature_c: Reading<f64>,
    /// Compute clock, in MHz.
    pub clock_mhz: Reading<u64>,
    /// Processes on the device; the reading has no value when the device cannot tell, and an empty list when there are none.
    pub processes: Reading<Vec<DeviceProcess>>,
    /// Shares granted on this device, one per instance.
    pub shares: Vec<ShareTelemetry>,
    /// How often each metric was wanted and how often a value came back, since the agent started.
    pub coverage: Vec<MetricCoverage>,
}

/// Whether a device answers. An open vocabulary, as text on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum DeviceState {
    /// No answer yet since the agent started.
    #[default]
    Starting,
    /// Answers.
    Ok,
    /// A call into the driver has not returned within its deadline.
    Hung,
    /// The driver says that the device is gone or needs a reset.
    Lost,
    /// The thread that asks it ended unexpectedly.
    Failed,
    /// A state this version has no name for.
    Other(String),
}

impl DeviceState {
    /// The word used on the wire and towards people.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Starting => "starting",
            Self::Ok => "ok",
            Self::Hung => "hung",
            Self::Lost => "lost",
            Self::Failed => "failed",
            Self::Other(text) => text,
        }
    }

    /// Whether new work may be planned onto the device.
    pub fn is_usable(&self) -> bool {
        matches!(self, Self::Ok)
    }
}

impl From<String> for DeviceState {
    fn from(text: String) -> Self {
        match text.as_str() {
            "starting" => Self::Starting,
            "ok" => Self::Ok,
            "hung" => Self::Hung,
            "lost" => Self::Lost,
            "failed" => Self::Failed,
            _ => Self::Other(shortened(text)),
        }
    }
}

impl From<DeviceState> for String {
    fn from(state: DeviceState) -> Self {
        match state {
            DeviceState::Other(text) => text,
            known => known.as_str().to_owned(),
        }
    }
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A process on a device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceProcess {
    /// Process id in the agent's process namespace.
    pub pid: u32,
    /// Share of time in which kernels of this process ran, in percent.
    pub busy_percent: Reading<f64>,
    /// Device memory it holds, in bytes.
    pub memory_bytes: Reading<u64>,
}

/// How often one metric answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricCoverage {
    /// `utilisation`, `memory`, `power`, `temperature`, `clock`, `processes`.
    pub metric: String,
    /// Samples in which it was wanted.
    pub samples: u64,
    /// Samples in which a value came back.
    pub with_value: u64,
}

impl MetricCoverage {
    /// Samples with a value, in percent; none before the first sample.
    pub fn percent(&self) -> Option<f64> {
        (self.samples > 0).then(|| 100.0 * self.with_value as f64 / self.samples as f64)
    }
}

/// One process of Compass on this node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessTelemetry {
    /// Process id.
    pub pid: u32,
    /// Resident memory, in bytes.
    pub resident_bytes: Reading<u64>,
    /// CPU time since the process started, in milliseconds.
    pub cpu_time_ms: Reading<u64>,
    /// CPU use over the last interval, in percent of one core.
    pub cpu_percent: Reading<f64>,
}

/// How a granted share holds. An open vocabulary, as text on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum Enforcement {
    /// The kernel or the device keeps the operator within its share.
    Enforced,
    /// Compass paces the operator; it cannot hold back a single long computation.
    BestEffort,
    /// Nothing holds the operator back.
    Advisory,
    /// A word this version does not know; to be treated as advisory.
    Other(String),
}

impl Enforcement {
    /// The word used on the wire and towards people.
    pub fn as_str(&self) -> &str {
        match self {
            Self::Enforced => "enforced",
            Self::BestEffort => "best-effort",
            Self::Advisory => "advisory",
            Self::Other(text) => text,
        }
    }
}

impl From<String> for Enforcement {
    fn from(text: String) -> Self {
        match text.as_str() {
            "enforced" => Self::Enforced,
            "best-effort" => Self::BestEffort,
            "advisory" => Self::Advisory,
            _ => Self::Other(shortened(text)),
        }
    }
}

impl From<Enforcement> for String {
    fn from(enforcement: Enforcement) -> Self {
        match enforcement {
            Enforcement::Other(text) => text,
            known => known.as_str().to_owned(),
        }
    }
}

impl fmt::Display for Enforcement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A granted share and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShareTelemetry {
    /// The instance that holds the share, as text.
    pub instance: String,
    /// What was granted, in percent of the device (of one core for CPU).
    pub granted_percent: Reading<f64>,
    /// What it got while it had work, in the same unit; no value while it had none.
    pub achieved_percent: Reading<f64>,
    /// How the share holds.
    pub enforcement: Enforcement,
}

/// A declared slower device: operators really compute, their results are held until the slower device would have had them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Emulation {
    speed: f64,
}

/// A speed that cannot be emulated.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error(
    "an emulated device's speed is more than 0 and at most 1 (this host's own), and {0} is not"
)]
pub struct InvalidSpeed(pub f64);

impl Emulation {
    /// Declares a speed relative to this host's core, more than 0 and at most 1.
    ///
    /// # Errors
    /// When the speed is outside of that: an emulated device cannot be faster than its host.
    pub fn new(speed: f64) -> Result<Self, InvalidSpeed> {
        if speed > 0.0 && speed <= 1.0 {
            Ok(Self { speed })
        } else {
            Err(InvalidSpeed(speed))
        }
    }

    /// The declared speed relative to this host's core.
    pub const fn speed(self) -> f64 {
        self.speed
    }
}

impl fmt::Display for Emulation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "emulated ×{}", self.speed)
    }
}

/// Something a person should know about this node.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Note {
    /// What it is about: `gpu`, `cgroup`, `memory`, `cpu`, `disk`, ….
    pub topic: String,
    /// Whether somebody should act.
    pub is_warning: bool,
    /// One line, without a full stop.
    pub text: String,
}

impl NodeTelemetry {
    /// Turns sentinels and out-of-range figures into "no value", cuts over-long lists and texts, and adds what was dropped to
    /// [`Self::dropped_values`]. The rest of the report is kept. Calling it again changes nothing.
    pub fn sanitise(&mut self) {
        let mut dropped = 0;
        self.host.sanitise(&mut dropped);
        cut(&mut self.devices, DEVICES_MAX, &mut dropped);
        for device in &mut self.devices {
            device.sanitise(&mut dropped);
        }
        self.agent.sanitise(&mut dropped);
        cut(&mut self.children, PROCESSES_MAX, &mut dropped);
        for child in &mut self.children {
            child.sanitise(&mut dropped);
        }
        if self
            .emulation
            .is_some_and(|emulation| Emulation::new(emulation.speed).is_err())
        {
            self.emulation = None;
            dropped += 1;
        }
        cut(&mut self.notes, NOTES_MAX, &mut dropped);
        for note in &mut self.notes {
            cut_text(&mut note.topic, &mut dropped);
            cut_text(&mut note.text, &mut dropped);
        }
        self.dropped_values = self.dropped_values.saturating_add(dropped);
    }

    /// The device of this id.
    pub fn device(&self, id: &str) -> Option<&DeviceTelemetry> {
        self.devices.iter().find(|device| device.id == id)
    }
}

impl HostTelemetry {
    fn sanitise(&mut self, dropped: &mut u32) {
        count(
            dropped,
            self.cores
                .retain(|cores| cores > 0 && f64::from(cores) <= CORES_MAX),
        );
        count(
            dropped,
            self.cpu_capacity_cores
                .retain(|cores| cores > 0.0 && cores <= CORES_MAX),
        );
        count(dropped, self.cpu_busy_percent.retain(is_percent));
        count(
            dropped,
            self.memory_total_bytes
                .retain(|bytes| bytes > 0 && bytes <= HOST_MEMORY_BYTES_MAX),
        );
        let available_max = self
            .memory_total_bytes
            .value
            .unwrap_or(HOST_MEMORY_BYTES_MAX);
        count(
            dropped,
            self.memory_available_bytes
                .retain(|bytes| bytes <= available_max),
        );
        count(
            dropped,
            self.disk_free_bytes.retain(|bytes| bytes < 1 << 60),
        );
    }
}

impl DeviceTelemetry {
    /// What [`NodeTelemetry::sanitise`] does, for one device; adds what was dropped to `dropped`.
    pub fn sanitise(&mut self, dropped: &mut u32) {
        cut_text(&mut self.id, dropped);
        cut_text(&mut self.name, dropped);
        let total = match self.memory {
            MemoryPool::Separate { total_bytes }
                if total_bytes == 0 || total_bytes > DEVICE_MEMORY_BYTES_MAX =>
            {
                self.memory = MemoryPool::Unknown;
                *dropped += 1;
                None
            }
            MemoryPool::Unified { total_bytes }
                if total_bytes == 0 || total_bytes > HOST_MEMORY_BYTES_MAX =>
            {
                self.memory = MemoryPool::Unknown;
                *dropped += 1;
                None
            }
            pool => pool.total_bytes(),
        };
        let used_max = total.unwrap_or(DEVICE_MEMORY_BYTES_MAX);
        count(dropped, self.busy_percent.retain(is_percent));
        count(
            dropped,
            self.memory_used_bytes.retain(|bytes| bytes <= used_max),
        );
        count(dropped, self.power_mw.retain(|power| power <= POWER_MW_MAX));
        count(
            dropped,
            self.temperature_c
                .retain(|degrees| (-100.0..=250.0).contains(&degrees)),
        );
        count(
            dropped,
            self.clock_mhz.retain(|clock| clock <= CLOCK_MHZ_MAX),
        );
        if let Some(processes) = &mut self.processes.value {
            cut(processes, PROCESSES_MAX, dropped);
            for process in processes {
                count(dropped, process.busy_percent.retain(is_percent));
                count(
                    dropped,
                    process.memory_bytes.retain(|bytes| bytes <= used_max),
                );
            }
        }
        cut(&mut self.shares, PROCESSES_MAX, dropped);
        for share in &mut self.shares {
            cut_text(&mut share.instance, dropped);
            count(dropped, share.granted_percent.retain(is_share_percent));
            count(dropped, share.achieved_percent.retain(is_share_percent));
        }
        cut(&mut self.coverage, NOTES_MAX, dropped);
        for coverage in &mut self.coverage {
            cut_text(&mut coverage.metric, dropped);
        }
    }
}

impl ProcessTelemetry {
    fn sanitise(&mut self, dropped: &mut u32) {
        count(
            dropped,
            self.resident_bytes
                .retain(|bytes| bytes <= HOST_MEMORY_BYTES_MAX),
        );
        count(dropped, self.cpu_time_ms.retain(|ms| ms < 1 << 50));
        count(dropped, self.cpu_percent.retain(is_share_percent));
    }
}

/// Whether a figure is a percentage: from 0 to 100, which no sentinel and no NaN is.
pub fn is_percent(value: f64) -> bool {
    (0.0..=100.0).contains(&value)
}

/// Whether a figure is a percentage of one core, of which a process can use several.
fn is_share_percent(value: f64) -> bool {
    (0.0..=100.0 * CORES_MAX).contains(&value)
}

/// A word of an open vocabulary, cut to a bearable length.
fn shortened(mut word: String) -> String {
    word.truncate(word.floor_char_boundary(WORD_BYTES_MAX));
    word
}

fn count(dropped: &mut u32, was_dropped: bool) {
    *dropped += u32::from(was_dropped);
}

fn cut<T>(list: &mut Vec<T>, len_max: usize, dropped: &mut u32) {
    if list.len() > len_max {
        *dropped = dropped.saturating_add(u32::try_from(list.len() - len_max).unwrap_or(u32::MAX));
        list.truncate(len_max);
    }
}

fn cut_text(text: &mut String, dropped: &mut u32) {
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        *dropped += 1;
    }
}
