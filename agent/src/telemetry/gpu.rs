//! One GPU: which questions to ask whom, and what to believe.
//!
//! Start at [`discover`] and [`GpuSampler::sample`]. Support is decided per metric, by a value having come back: a device that opens
//! and then supports nothing counts as present with every metric missing. A board's integrated GPU (Jetson, GB10) is read from sysfs
//! first and asked through the library for the rest, and its memory is the host's. What a device does not support is asked for hourly.
//!
//! All of this blocks and runs on a worker thread of the device; nothing here reads a clock.

use std::collections::BTreeMap;
use std::sync::Arc;

use compass_shared::model::capacity::MemoryPool;
use compass_shared::model::telemetry::{
    DEVICES_MAX, DeviceProcess, DeviceState, DeviceTelemetry, MetricCoverage, Note, Reading, Source,
};
use compass_shared::time::Moment;

use super::backoff::Backoff;
use super::jetson::SysfsGpu;
use super::meminfo;
use super::nvml::search::LibrarySearch;
use super::nvml::{GpuError, GpuLibrary, RawMemory, ask_list};
use super::root::Root;

#[cfg(test)]
mod tests;

/// Words in the names of GPUs that have no memory of their own, whatever their driver answers.
const INTEGRATED_WORDS: [&str; 6] = ["nvgpu", "tegra", "orin", "xavier", "thor", "gb10"];

/// What a host has.
#[derive(Default)]
pub(super) struct Discovery {
    pub(super) devices: Vec<GpuSampler>,
    pub(super) notes: Vec<Note>,
}

/// Lists a host's GPUs: those of the management library and the board's own.
pub(super) fn discover(search: &LibrarySearch, root: &Root) -> Discovery {
    let mut devices = Vec::new();
    let (text, is_warning) = search.summary();
    let mut notes = vec![note(is_warning, text)];
    if let Some((library, _)) = &search.found {
        match library.device_count() {
            Ok(count) => {
                let count = count.min(DEVICES_MAX as u32);
                devices.extend(
                    (0..count)
                        .map(|index| GpuSampler::nvml(Arc::clone(library), index, root.clone())),
                );
                if count == 0 {
                    notes.push(note(false, "NVML lists no device; CPU-only".to_owned()));
                }
            }
            Err(error) => notes.push(note(
                true,
                format!("NVML cannot list its devices ({error}); CPU-only"),
            )),
        }
    }
    for device in &devices {
        if device.is_sliced {
            notes.push(note(
                false,
                format!(
                    "{} is cut into MIG slices: what it answers as a whole may be missing",
                    device.name
                ),
            ));
        }
    }
    if let Some(sysfs) = SysfsGpu::find(root) {
        // A board with a card of its own runs with the integrated GPU switched off.
        if devices.is_empty() {
            devices.push(GpuSampler::sysfs_only(sysfs, root.clone()));
        } else if let Some(device) = devices.iter_mut().find(|device| device.is_integrated) {
            device.sysfs = Some(sysfs);
        }
    }
    Discovery { devices, notes }
}

fn note(is_warning: bool, text: String) -> Note {
    Note {
        topic: "gpu".to_owned(),
        is_warning,
        text,
    }
}

/// One metric of one device.
struct Metric {
    name: &'static str,
    backoff: Backoff,
    samples: u64,
    with_value: u64,
}

impl Metric {
    fn new(name: &'static str) -> Self {
        Self {
            name,
            backoff: Backoff::default(),
            samples: 0,
            with_value: 0,
        }
    }

    /// Asks the driver, unless this metric is backed off or the device was lost a moment ago.
    fn ask<T>(
        &mut self,
        now: Moment,
        is_lost: &mut bool,
        question: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<T, Unanswered> {
        if *is_lost || !self.backoff.is_open(now) {
            return Err(Unanswered::NotAsked);
        }
        match question() {
            Ok(value) => {
                self.backoff.on_value();
                Ok(value)
            }
            Err(GpuError::NotSupported) => {
                self.backoff.on_unsupported(now);
                Err(Unanswered::Unsupported)
            }
            Err(error) => {
                *is_lost |= error == GpuError::Lost;
                self.backoff.on_error(now);
                Err(Unanswered::Failed)
            }
        }
    }

    fn count(&mut self, has_value: bool) -> MetricCoverage {
        self.samples += 1;
        self.with_value += u64::from(has_value);
        MetricCoverage {
            metric: self.name.to_owned(),
            samples: self.samples,
            with_value: self.with_value,
        }
    }
}

/// Why a metric has no value from the driver this time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unanswered {
    NotAsked,
    Unsupported,
    Failed,
}

/// Asks one device for everything, once per sample.
pub(super) struct GpuSampler {
    id: String,
    name: String,
    root: Root,
    library: Option<(Arc<dyn GpuLibrary>, u32)>,
    sysfs: Option<SysfsGpu>,
    /// Has no memory of its own.
    is_integrated: bool,
    is_sliced: bool,
    busy: Metric,
    memory: Metric,
    power: Metric,
    temperature: Metric,
    clock: Metric,
    process_memory: Metric,
    process_busy: Metric,
    /// Separate memory as last heard, in bytes; kept while the driver does not answer.
    own_memory_total: Option<u64>,
    processes_seen_us: u64,
    lost: Backoff,
}

/// One device's answers.
#[derive(Debug, Clone)]
pub(super) struct GpuSample {
    pub(super) device: DeviceTelemetry,
    /// Figures that were sentinels or out of range.
    pub(super) dropped_values: u32,
}

impl GpuSampler {
    fn new(id: String, name: String, root: Root) -> Self {
        Self {
            id,
            name,
            root,
            library: None,
            sysfs: None,
            is_integrated: false,
            is_sliced: false,
            busy: Metric::new("utilisation"),
            memory: Metric::new("memory"),
            power: Metric::new("power"),
            temperature: Metric::new("temperature"),
            clock: Metric::new("clock"),
            process_memory: Metric::new("processes"),
            process_busy: Metric::new("processes"),
            own_memory_total: None,
            processes_seen_us: 0,
            lost: Backoff::default(),
        }
    }

    fn nvml(library: Arc<dyn GpuLibrary>, index: u32, root: Root) -> Self {
        let id = library
            .unique_id(index)
            .ok()
            .filter(|id| !id.is_empty())
            .unwrap_or_else(|| format!("gpu-{index}"));
        let name = library
            .name(index)
            .ok()
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| format!("GPU {index}"));
        let is_sliced = library.is_sliced(index).unwrap_or(false);
        let has_integrated_name = name.split(|c: char| !c.is_alphanumeric()).any(|word| {
            INTEGRATED_WORDS
                .iter()
                .any(|known| word.eq_ignore_ascii_case(known))
        });
        let has_no_memory = match library.memory(index) {
            Ok(memory) => memory.total_bytes == 0,
            Err(error) => error == GpuError::NotSupported,
        };
        let mut sampler = Self::new(id, name, root);
        sampler.library = Some((library, index));
        sampler.is_sliced = is_sliced;
        // A slice's parent may refuse to tell its memory although it has its own.
        sampler.is_integrated = has_integrated_name || (has_no_memory && !is_sliced);
        sampler
    }

    fn sysfs_only(sysfs: SysfsGpu, root: Root) -> Self {
        let mut sampler = Self::new("gpu-0".to_owned(), sysfs.name.clone(), root);
        sampler.sysfs = Some(sysfs);
        sampler.is_integrated = true;
        sampler
    }

    /// Id of the device, the same in every sample.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// Name of the device, for people.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Asks for everything that is not backed off. Blocks as long as the driver does.
    pub(super) fn sample(&mut self, now: Moment) -> GpuSample {
        let mut device = DeviceTelemetry {
            id: self.id.clone(),
            name: self.name.clone(),
            state: DeviceState::Ok,
            ..DeviceTelemetry::default()
        };
        let mut dropped_values = 0;
        let mut is_lost = !self.lost.is_open(now);
        self.read_sysfs(&mut device, &mut dropped_values);
        self.ask_library(now, &mut device, &mut is_lost);
        device.memory = self.memory_pool();
        if is_lost {
            device.state = DeviceState::Lost;
            if self.lost.is_open(now) {
                self.lost.on_error(now);
            }
        } else {
            self.lost.on_value();
        }
        device.sanitise(&mut dropped_values);
        device.coverage = vec![
            self.busy.count(device.busy_percent.value.is_some()),
            self.memory.count(device.memory_used_bytes.value.is_some()),
            self.power.count(device.power_mw.value.is_some()),
            self.temperature.count(device.temperature_c.value.is_some()),
            self.clock.count(device.clock_mhz.value.is_some()),
            self.process_memory.count(device.processes.value.is_some()),
        ];
        GpuSample {
            device,
            dropped_values,
        }
    }

    fn read_sysfs(&self, device: &mut DeviceTelemetry, dropped_values: &mut u32) {
        let Some(sysfs) = &self.sysfs else { return };
        let load = sysfs.load();
        *dropped_values += u32::from(load.is_some_and(|load| load.was_clamped));
        device.busy_percent = from_sysfs(load.map(|load| load.percent));
        device.power_mw = from_sysfs(sysfs.power_mw());
        device.temperature_c = from_sysfs(sysfs.temperature_c());
        device.clock_mhz = from_sysfs(sysfs.clock_mhz());
    }

    fn ask_library(&mut self, now: Moment, device: &mut DeviceTelemetry, is_lost: &mut bool) {
        let Some((library, index)) = self.library.clone() else {
            return;
        };
        // On boards the library answers some questions with 0 instead of "not supported".
        let is_integrated = self.is_integrated;
        let believed = |is_zero: bool| !(is_integrated && is_zero);

        if device.busy_percent.value.is_none() {
            device.busy_percent = from_nvml(
                self.busy
                    .ask(now, is_lost, || library.busy_percent(index))
                    .ok(),
            );
        }
        if device.power_mw.value.is_none() {
            let power = self
                .power
                .ask(now, is_lost, || library.power_mw(index))
                .ok();
            device.power_mw = from_nvml(power.filter(|&power| believed(power == 0)));
        }
        if device.temperature_c.value.is_none() {
            let degrees = self
                .temperature
                .ask(now, is_lost, || library.temperature_c(index))
                .ok();
            device.temperature_c = from_nvml(degrees.filter(|&degrees| believed(degrees == 0.0)));
        }
        if device.clock_mhz.value.is_none() {
            let clock = self
                .clock
                .ask(now, is_lost, || library.clock_mhz(index))
                .ok();
            device.clock_mhz = from_nvml(clock.filter(|&clock| believed(clock == 0)));
        }
        if !is_integrated {
            device.memory_used_bytes = self.ask_memory(now, is_lost, || library.memory(index));
        }
        device.processes = self.ask_processes(now, is_lost, library.as_ref(), index);
    }

    /// Used memory; remembers the total. A success that speaks of no memory at all is an unsupported question.
    fn ask_memory(
        &mut self,
        now: Moment,
        is_lost: &mut bool,
        question: impl FnOnce() -> Result<RawMemory, GpuError>,
    ) -> Reading<u64> {
        let question = || {
            question().and_then(|memory| {
                if memory.total_bytes == 0 {
                    Err(GpuError::NotSupported)
                } else {
                    Ok(memory)
                }
            })
        };
        match self.memory.ask(now, is_lost, question) {
            Ok(memory) => {
                self.own_memory_total = Some(memory.total_bytes);
                from_nvml(Some(memory.used_bytes))
            }
            Err(Unanswered::Unsupported) => {
                // It was supported when the device was found, or the device is a slice's parent.
                self.own_memory_total = None;
                from_nvml(None)
            }
            Err(Unanswered::NotAsked | Unanswered::Failed) => from_nvml(None),
        }
    }

    fn ask_processes(
        &mut self,
        now: Moment,
        is_lost: &mut bool,
        library: &dyn GpuLibrary,
        index: u32,
    ) -> Reading<Vec<DeviceProcess>> {
        let since_us = self.processes_seen_us;
        let memory = self
            .process_memory
            .ask(now, is_lost, || ask_list(|| library.process_memory(index)))
            .ok();
        let busy = self
            .process_busy
            .ask(now, is_lost, || {
                ask_list(|| library.process_busy(index, since_us))
            })
            .ok();
        if memory.is_none() && busy.is_none() {
            return from_nvml(None);
        }
        let mut processes: BTreeMap<u32, DeviceProcess> = BTreeMap::new();
        for row in memory.into_iter().flatten() {
            process(&mut processes, row.pid).memory_bytes = from_nvml(row.used_bytes);
        }
        // Some drivers fill the list up with rows that hold nothing; rows come oldest first, the latest one of a process counts.
        for row in busy
            .into_iter()
            .flatten()
            .filter(|row| row.pid != 0 && row.timestamp_us > since_us)
        {
            self.processes_seen_us = self.processes_seen_us.max(row.timestamp_us);
            process(&mut processes, row.pid).busy_percent = from_nvml(Some(row.busy_percent));
        }
        from_nvml(Some(processes.into_values().collect()))
    }

    fn memory_pool(&self) -> MemoryPool {
        if self.is_integrated {
            return meminfo::read(&self.root).map_or(MemoryPool::Unknown, |host| {
                MemoryPool::Unified {
                    total_bytes: host.total_bytes,
                }
            });
        }
        self.own_memory_total
            .map_or(MemoryPool::Unknown, |total_bytes| MemoryPool::Separate {
                total_bytes,
            })
    }
}

fn process(processes: &mut BTreeMap<u32, DeviceProcess>, pid: u32) -> &mut DeviceProcess {
    processes.entry(pid).or_insert_with(|| DeviceProcess {
        pid,
        busy_percent: Reading::none(),
        memory_bytes: Reading::none(),
    })
}

fn from_nvml<T>(value: Option<T>) -> Reading<T> {
    Reading {
        value,
        source: Source::Nvml,
    }
}

fn from_sysfs<T>(value: Option<T>) -> Reading<T> {
    Reading {
        value,
        source: Source::Sysfs,
    }
}
