//! NVIDIA's management library behind a trait, so that every answer a driver can give can be scripted.
//!
//! [`GpuLibrary`] is the trait, [`real`] the implementation over `nvml-wrapper`, [`search`] finds the library. All calls block and may
//! hang; they are made on worker threads only. Figures come back as the driver gave them: [`super::gpu`] judges them.

pub mod real;
pub mod search;

#[cfg(test)]
pub(crate) mod fake;

/// Why a question to a device had no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    /// The device or the driver does not have this.
    #[error("not supported")]
    NotSupported,
    /// Nothing of the kind exists just now; for lists this means an empty one.
    #[error("not found")]
    NotFound,
    /// The list grew while it was being read; ask again.
    #[error("the list grew while it was being read")]
    InsufficientSize,
    /// The device fell off the bus or needs a reset.
    #[error("the device is lost or needs a reset")]
    Lost,
    /// Anything else, in the driver's words.
    #[error("{0}")]
    Other(String),
}

/// Memory as the driver gave it, unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawMemory {
    /// Installed, in bytes.
    pub total_bytes: u64,
    /// Taken, in bytes.
    pub used_bytes: u64,
}

/// Memory of one process on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Process id as the driver sees it.
    pub pid: u32,
    /// Device memory in bytes, where the driver knows.
    pub used_bytes: Option<u64>,
}

/// A sample of one process's use of a device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessBusy {
    /// Process id as the driver sees it; 0 in rows that hold nothing.
    pub pid: u32,
    /// The driver's time stamp in microseconds; 0 in rows that hold nothing.
    pub timestamp_us: u64,
    /// Share of time with kernels running, in percent.
    pub busy_percent: f64,
}

/// What is asked of a GPU driver. `index` counts from 0 to [`GpuLibrary::device_count`].
pub trait GpuLibrary: Send + Sync {
    /// Version of the driver, for people.
    fn driver_version(&self) -> Result<String, GpuError>;
    /// Number of devices.
    fn device_count(&self) -> Result<u32, GpuError>;
    /// Marketing name.
    fn name(&self, index: u32) -> Result<String, GpuError>;
    /// Id that stays with the device.
    fn unique_id(&self, index: u32) -> Result<String, GpuError>;
    /// Whether the device is cut into slices, in which case it answers little as a whole.
    fn is_sliced(&self, index: u32) -> Result<bool, GpuError>;
    /// Share of time with some kernel running, in percent.
    fn busy_percent(&self, index: u32) -> Result<f64, GpuError>;
    /// Memory of the device.
    fn memory(&self, index: u32) -> Result<RawMemory, GpuError>;
    /// Power draw, in milliwatts.
    fn power_mw(&self, index: u32) -> Result<u64, GpuError>;
    /// Core temperature, in degrees Celsius.
    fn temperature_c(&self, index: u32) -> Result<f64, GpuError>;
    /// Compute clock, in MHz.
    fn clock_mhz(&self, index: u32) -> Result<u64, GpuError>;
    /// Memory by process.
    fn process_memory(&self, index: u32) -> Result<Vec<ProcessMemory>, GpuError>;
    /// Use by process since a time stamp of the driver.
    fn process_busy(&self, index: u32, since_us: u64) -> Result<Vec<ProcessBusy>, GpuError>;
}

/// How often a list that keeps growing is asked for before it counts as unknown.
pub(super) const LIST_TRIES_MAX: usize = 4;

/// Asks for a list: "not found" is an empty one, a list that grew while it was read is asked for again, a few times.
pub(super) fn ask_list<T>(
    mut ask: impl FnMut() -> Result<Vec<T>, GpuError>,
) -> Result<Vec<T>, GpuError> {
    let mut last = Err(GpuError::InsufficientSize);
    for _ in 0..LIST_TRIES_MAX {
        last = match ask() {
            Err(GpuError::NotFound) => Ok(Vec::new()),
            other => other,
        };
        if !matches!(last, Err(GpuError::InsufficientSize)) {
            break;
        }
    }
    last
}
