//! Lets through `rate` of the source's frames per second and leaves out the others.
//!
//! It decides by the frame's number alone, so that every instance, live or in a trial, now or after a restart, decides alike.

use super::{Input, Knobs, Operator, OperatorError, Produced, only};

/// Frames per second of a source that states no rate in the knob `source`.
const SOURCE_RATE_DEFAULT: i64 = 10;
/// Faster sources than this are a mistake.
const RATE_MAX: i64 = 1000;

pub(super) struct Sampler {
    rate: u64,
    source: u64,
}

impl Sampler {
    pub(super) fn new(knobs: &Knobs<'_>) -> Result<Self, OperatorError> {
        let source = knobs.integer("source", 1..=RATE_MAX, SOURCE_RATE_DEFAULT)?;
        let rate = knobs.integer("rate", 1..=RATE_MAX, source)?;
        Ok(Self {
            rate: rate.unsigned_abs(),
            source: source.unsigned_abs(),
        })
    }

    /// Spreads `rate` kept frames evenly over `source` frames, frame 0 first.
    const fn keeps(&self, frame: u64) -> bool {
        let position = frame % self.source;
        (position * self.rate) % self.source < self.rate
    }
}

impl Operator for Sampler {
    fn wants_payload(&self) -> bool {
        false
    }

    fn process(
        &mut self,
        _query: &str,
        frame: u64,
        inputs: &[Input<'_>],
    ) -> Result<Produced, OperatorError> {
        only(inputs)?;
        Ok(if self.keeps(frame) {
            Produced::Forward(0)
        } else {
            Produced::Skipped
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_exactly_the_rate_evenly_spread() {
        for source in [10, 25, 30] {
            for rate in 1..=source {
                let sampler = Sampler { rate, source };
                let kept: Vec<u64> = (0..3 * source).filter(|f| sampler.keeps(*f)).collect();
                assert_eq!(kept.len() as u64, 3 * rate, "{rate} of {source}");
                let gaps: Vec<u64> = kept.windows(2).map(|w| w[1] - w[0]).collect();
                let (least, most) = (gaps.iter().min().unwrap(), gaps.iter().max().unwrap());
                assert!(most - least <= 1, "{rate} of {source}: {gaps:?}");
                assert!(sampler.keeps(0));
            }
        }
        let faster_than_its_source = Sampler {
            rate: 30,
            source: 10,
        };
        assert!((0..20).all(|f| faster_than_its_source.keeps(f)));
    }
}
