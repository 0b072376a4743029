//! A scripted library: each question of each device answers as told, and every call is counted.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex};

use super::{GpuError, GpuLibrary, ProcessBusy, ProcessMemory, RawMemory};

/// How a question ends.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Number(f64),
    Memory(RawMemory),
    Busy(Vec<ProcessBusy>),
    Error(GpuError),
    /// Never returns until [`FakeNvml::release`].
    Hang,
}

/// A device's script: a list per question, of which the last answer repeats; a question without a list is not supported.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeDevice {
    pub(crate) name: String,
    pub(crate) id: Option<String>,
    pub(crate) answers: BTreeMap<&'static str, Vec<Answer>>,
}

impl FakeDevice {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }

    pub(crate) fn answer(
        mut self,
        question: &'static str,
        answers: impl Into<Vec<Answer>>,
    ) -> Self {
        self.answers.insert(question, answers.into());
        self
    }

    /// A card that answers everything.
    pub(crate) fn card(name: &str) -> Self {
        Self::new(name)
            .answer("busy", [Answer::Number(35.0)])
            .answer(
                "memory",
                [Answer::Memory(RawMemory {
                    total_bytes: 80 << 30,
                    used_bytes: 10 << 30,
                })],
            )
            .answer("power", [Answer::Number(250_000.0)])
            .answer("temperature", [Answer::Number(55.0)])
            .answer("clock", [Answer::Number(1410.0)])
            .answer("process_busy", [Answer::Busy(Vec::new())])
    }
}

#[derive(Default)]
struct State {
    calls: BTreeMap<(u32, &'static str), usize>,
    hanging: usize,
    is_released: bool,
}

pub(crate) struct FakeNvml {
    devices: Vec<FakeDevice>,
    state: Mutex<State>,
    changed: Condvar,
}

impl FakeNvml {
    pub(crate) fn new(devices: impl Into<Vec<FakeDevice>>) -> Self {
        Self {
            devices: devices.into(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// How often a device was asked a question.
    pub(crate) fn calls(&self, index: u32, question: &'static str) -> usize {
        self.state
            .lock()
            .unwrap()
            .calls
            .get(&(index, question))
            .copied()
            .unwrap_or(0)
    }

    /// Lets hanging calls return.
    pub(crate) fn release(&self) {
        self.state.lock().unwrap().is_released = true;
        self.changed.notify_all();
    }

    /// Waits until this many calls hang.
    pub(crate) fn wait_for_hanging(&self, count: usize) {
        let mut state = self.state.lock().unwrap();
        while state.hanging < count {
            state = self.changed.wait(state).unwrap();
        }
    }

    /// Calls that hang now.
    pub(crate) fn hanging(&self) -> usize {
        self.state.lock().unwrap().hanging
    }

    fn ask(&self, index: u32, question: &'static str) -> Result<Answer, GpuError> {
        let mut state = self.state.lock().unwrap();
        let calls = state.calls.entry((index, question)).or_default();
        let call = *calls;
        *calls += 1;
        let answers = self.devices[index as usize]
            .answers
            .get(question)
            .ok_or(GpuError::NotSupported)?;
        match &answers[call.min(answers.len() - 1)] {
            Answer::Error(error) => Err(error.clone()),
            Answer::Hang => {
                state.hanging += 1;
                self.changed.notify_all();
                while !state.is_released {
                    state = self.changed.wait(state).unwrap();
                }
                state.hanging -= 1;
                Err(GpuError::Other("released".to_owned()))
            }
            answer => Ok(answer.clone()),
        }
    }

    fn number(&self, index: u32, question: &'static str) -> Result<f64, GpuError> {
        match self.ask(index, question)? {
            Answer::Number(number) => Ok(number),
            other => panic!("{question} is scripted as {other:?}"),
        }
    }
}

impl GpuLibrary for FakeNvml {
    fn driver_version(&self) -> Result<String, GpuError> {
        Ok("550.54".to_owned())
    }
    fn device_count(&self) -> Result<u32, GpuError> {
        Ok(self.devices.len() as u32)
    }
    fn name(&self, index: u32) -> Result<String, GpuError> {
        Ok(self.devices[index as usize].name.clone())
    }
    fn unique_id(&self, index: u32) -> Result<String, GpuError> {
        self.devices[index as usize]
            .id
            .clone()
            .ok_or(GpuError::NotSupported)
    }
    fn is_sliced(&self, index: u32) -> Result<bool, GpuError> {
        Ok(self.number(index, "sliced")? != 0.0)
    }
    fn busy_percent(&self, index: u32) -> Result<f64, GpuError> {
        self.number(index, "busy")
    }
    fn memory(&self, index: u32) -> Result<RawMemory, GpuError> {
        match self.ask(index, "memory")? {
            Answer::Memory(memory) => Ok(memory),
            other => panic!("memory is scripted as {other:?}"),
        }
    }
    fn power_mw(&self, index: u32) -> Result<u64, GpuError> {
        Ok(self.number(index, "power")? as u64)
    }
    fn temperature_c(&self, index: u32) -> Result<f64, GpuError> {
        self.number(index, "temperature")
    }
    fn clock_mhz(&self, index: u32) -> Result<u64, GpuError> {
        Ok(self.number(index, "clock")? as u64)
    }
    fn process_memory(&self, index: u32) -> Result<Vec<ProcessMemory>, GpuError> {
        self.ask(index, "process_memory").map(|_| Vec::new())
    }
    fn process_busy(&self, index: u32, _since_us: u64) -> Result<Vec<ProcessBusy>, GpuError> {
        match self.ask(index, "process_busy")? {
            Answer::Busy(rows) => Ok(rows),
            other => panic!("process_busy is scripted as {other:?}"),
        }
    }
}
