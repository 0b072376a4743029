//! Small counter-based generator: the value for (seed, purpose, index …) never depends on what was drawn before, so a frame
//! can be rendered alone and a new draw does not move old ones. Not for secrets.

/// Purposes: one number per kind of draw.
pub(crate) const BACKGROUND: u64 = 1;
pub(crate) const DISTRACTOR: u64 = 2;
pub(crate) const LANE: u64 = 3;
pub(crate) const SLOT: u64 = 4;
pub(crate) const NOISE: u64 = 5;

/// Mixes a seed with a path of numbers (the SplitMix64 finaliser after each step).
pub(crate) fn mix(seed: u64, path: &[u64]) -> u64 {
    path.iter().fold(finalise(seed), |state, step| {
        finalise(state ^ step.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    })
}

fn finalise(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream of draws for one purpose and entity.
#[derive(Debug, Clone)]
pub(crate) struct Draws {
    state: u64,
}

impl Draws {
    pub(crate) fn new(seed: u64, path: &[u64]) -> Self {
        Self {
            state: mix(seed, path),
        }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        finalise(self.state)
    }

    /// Uniform in 0 ≤ x < 1.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 24) as f32
    }

    pub(crate) fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// A colour with every channel between `low` and `high`.
    pub(crate) fn colour(&mut self, low: f32, high: f32) -> [f32; 3] {
        [
            self.between(low, high),
            self.between(low, high),
            self.between(low, high),
        ]
    }
}
