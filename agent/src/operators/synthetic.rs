//! Burns a stated CPU time and passes its input on; misbehaves on request, to test isolation.

use std::hint::black_box;
use std::time::Duration;

use compass_shared::model::catalogue::{Fault, Synthetic};
use compass_shared::seed::Seed;
use rand::Rng as _;
use rustix::time::ClockId;

use super::{Input, Operator, OperatorError, Produced, cpu_time, only};

pub(super) struct SyntheticOperator {
    model: Synthetic,
    seed: Seed,
    /// Frames seen, this one included.
    frames: u64,
}

impl SyntheticOperator {
    pub(super) fn new(model: &Synthetic, kind: &str) -> Self {
        Self {
            model: model.clone(),
            seed: Seed(0).child(kind),
            frames: 0,
        }
    }

    fn misbehave(&self) {
        match self.model.fault {
            Some(Fault::AbortAt(n)) if n == self.frames => {
                eprintln!("aborting as told");
                std::process::abort();
            }
            Some(Fault::SpinAt(n)) if n == self.frames => loop {
                black_box(self.frames);
            },
            Some(Fault::AllocateAt(n)) if n == self.frames => {
                let mut hoard = Vec::new();
                loop {
                    // Written to, so that it is memory and not only addresses.
                    hoard.push(black_box(vec![1_u8; 1 << 20]));
                }
            }
            _ => {}
        }
    }
}

impl Operator for SyntheticOperator {
    fn process(
        &mut self,
        query: &str,
        frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError> {
        let begun = cpu_time(ClockId::ThreadCPUTime);
        let input = only(inputs)?;
        self.frames += 1;
        self.misbehave();
        let spread = f64::from(self.model.spread_percent) / 100.0;
        let draw: f64 = self.seed.child(query).index(frame).rng().random();
        let factor = 1.0 + spread * (2.0 * draw - 1.0);
        let burn = Duration::from_micros(self.model.cpu_us).mul_f64(factor.max(0.0));
        while cpu_time(ClockId::ThreadCPUTime) < begun + burn {
            for turn in 0..500_u32 {
                black_box(turn);
            }
        }
        Ok(match self.model.output_bytes {
            None => Produced::Forward(0),
            Some(size) => {
                let mut bytes = input.bytes.to_vec();
                bytes.resize(size as usize, 0);
                Produced::Payload {
                    content: "bytes".to_owned(),
                    bytes,
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burns_at_least_the_stated_time_and_sizes_its_output() {
        let model = Synthetic {
            cpu_us: 2000,
            spread_percent: 0,
            output_bytes: Some(10),
            fault: None,
        };
        let mut operator = SyntheticOperator::new(&model, "k");
        let before = cpu_time(ClockId::ThreadCPUTime);
        let input = Input {
            content: "bytes",
            bytes: b"abc",
        };
        let out = operator.process("q", 1, &[input]).unwrap();
        assert!(cpu_time(ClockId::ThreadCPUTime) - before >= Duration::from_millis(2));
        let expected = Produced::Payload {
            content: "bytes".to_owned(),
            bytes: b"abc\0\0\0\0\0\0\0".to_vec(),
        };
        assert_eq!(out, expected);
    }
}
