//! From a share to a quota: time per period. Pure.

/// A short period keeps a throttled operator's pauses short; the kernel's usual 100 ms would quantise latency to that.
pub const PERIOD_US: u64 = 10_000;
/// The least quota that kernels take.
const QUOTA_US_MIN: u64 = 1_000;
/// The longest period that kernels take.
const PERIOD_US_MAX: u64 = 1_000_000;

/// CPU time per period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// CPU time, in microseconds.
    pub quota_us: u64,
    /// Period, in microseconds.
    pub period_us: u64,
}

impl Quota {
    /// The quota for a share in cores. A share too small for the usual period gets a longer one; below a thousandth of a core, and for
    /// what is not a number, it is a thousandth.
    pub fn for_cores(cores: f64) -> Self {
        let cores = cores.max(QUOTA_US_MIN as f64 / PERIOD_US_MAX as f64);
        let quota_us = (cores * PERIOD_US as f64).round() as u64;
        if quota_us >= QUOTA_US_MIN {
            return Self {
                quota_us,
                period_us: PERIOD_US,
            };
        }
        let period_us = (QUOTA_US_MIN as f64 / cores).round() as u64;
        Self {
            quota_us: QUOTA_US_MIN,
            period_us: period_us.min(PERIOD_US_MAX),
        }
    }

    /// The share that the kernel makes of it, in cores.
    pub fn cores(self) -> f64 {
        self.quota_us as f64 / self.period_us as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usual_shares_have_a_short_period_and_small_ones_a_longer() {
        assert_eq!(
            Quota::for_cores(0.5),
            Quota {
                quota_us: 5_000,
                period_us: 10_000
            }
        );
        assert_eq!(
            Quota::for_cores(4.0),
            Quota {
                quota_us: 40_000,
                period_us: 10_000
            }
        );
        assert_eq!(
            Quota::for_cores(0.05),
            Quota {
                quota_us: 1_000,
                period_us: 20_000
            }
        );
        for odd in [0.0, -1.0, f64::NAN] {
            assert_eq!(
                Quota::for_cores(odd),
                Quota {
                    quota_us: 1_000,
                    period_us: 1_000_000
                }
            );
        }
    }

    proptest! {
        #[test]
        fn the_kernel_takes_every_quota_and_it_is_the_share(cores in 0.001_f64..512.0) {
            let quota = Quota::for_cores(cores);
            prop_assert!(quota.quota_us >= QUOTA_US_MIN);
            prop_assert!((PERIOD_US..=PERIOD_US_MAX).contains(&quota.period_us));
            prop_assert!((quota.cores() / cores - 1.0).abs() < 0.06, "{} for {cores}", quota.cores());
        }
    }
}
