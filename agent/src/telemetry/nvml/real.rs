//! The real library, through `nvml-wrapper`.

use std::path::Path;

use nvml_wrapper::enum_wrappers::device::{Clock, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::{GpuError, GpuLibrary, ProcessBusy, ProcessMemory, RawMemory};

/// An opened and initialised library; shut down when dropped.
pub struct RealNvml(Nvml);

impl RealNvml {
    /// Loads a library and initialises it. A bare file name is looked up as the dynamic loader does.
    ///
    /// # Errors
    /// When there is none, it is broken, or it has no driver to talk to.
    pub fn open(path: &Path) -> Result<Self, GpuError> {
        Ok(Self(Nvml::builder().lib_path(path.as_os_str()).init()?))
    }

    fn device(&self, index: u32) -> Result<Device<'_>, GpuError> {
        Ok(self.0.device_by_index(index)?)
    }
}

impl From<NvmlError> for GpuError {
    fn from(error: NvmlError) -> Self {
        match error {
            // A function that this driver's library does not have cannot be had from it.
            NvmlError::NotSupported
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_) => Self::NotSupported,
            NvmlError::NotFound | NvmlError::NoData => Self::NotFound,
            NvmlError::InsufficientSize(_) => Self::InsufficientSize,
            NvmlError::GpuLost | NvmlError::ResetRequired => Self::Lost,
            other => Self::Other(other.to_string()),
        }
    }
}

impl GpuLibrary for RealNvml {
    fn driver_version(&self) -> Result<String, GpuError> {
        Ok(self.0.sys_driver_version()?)
    }

    fn device_count(&self) -> Result<u32, GpuError> {
        Ok(self.0.device_count()?)
    }

    fn name(&self, index: u32) -> Result<String, GpuError> {
        Ok(self.device(index)?.name()?)
    }

    fn unique_id(&self, index: u32) -> Result<String, GpuError> {
        Ok(self.device(index)?.uuid()?)
    }

    fn is_sliced(&self, index: u32) -> Result<bool, GpuError> {
        Ok(self.device(index)?.mig_mode()?.current != 0)
    }

    fn busy_percent(&self, index: u32) -> Result<f64, GpuError> {
        Ok(f64::from(self.device(index)?.utilization_rates()?.gpu))
    }

    fn memory(&self, index: u32) -> Result<RawMemory, GpuError> {
        let memory = self.device(index)?.memory_info()?;
        Ok(RawMemory {
            total_bytes: memory.total,
            used_bytes: memory.used,
        })
    }

    fn power_mw(&self, index: u32) -> Result<u64, GpuError> {
        Ok(u64::from(self.device(index)?.power_usage()?))
    }

    fn temperature_c(&self, index: u32) -> Result<f64, GpuError> {
        Ok(f64::from(
            self.device(index)?.temperature(TemperatureSensor::Gpu)?,
        ))
    }

    fn clock_mhz(&self, index: u32) -> Result<u64, GpuError> {
        Ok(u64::from(self.device(index)?.clock_info(Clock::SM)?))
    }

    fn process_memory(&self, index: u32) -> Result<Vec<ProcessMemory>, GpuError> {
        let processes = self.device(index)?.running_compute_processes()?;
        Ok(processes
            .into_iter()
            .map(|process| ProcessMemory {
                pid: process.pid,
                used_bytes: match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                },
            })
            .collect())
    }

    fn process_busy(&self, index: u32, since_us: u64) -> Result<Vec<ProcessBusy>, GpuError> {
        let samples = self.device(index)?.process_utilization_stats(since_us)?;
        Ok(samples
            .into_iter()
            .map(|sample| ProcessBusy {
                pid: sample.pid,
                timestamp_us: sample.timestamp,
                busy_percent: f64::from(sample.sm_util),
            })
            .collect())
    }
}
