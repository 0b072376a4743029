//! What a node can hold: memory as pools, and a ledger of what has been promised from them.
//!
//! Start at [`NodeMemory`] and [`MemoryLedger`]. Where GPU and CPU share one memory (Jetson, GB10) there is **one** pool, and a model on
//! the GPU and an operator on the CPU are charged to the same one. The ledger refuses what does not fit and what was never reserved;
//! its figures stay within `[0, total]` whatever it is asked.
//!
//! Deliberately absent: measured use (see [`super::telemetry`]) and any choice of place.

use serde::{Deserialize, Serialize};

/// Where a device's memory is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MemoryPool {
    /// The device has no memory of its own: it shares the host's, and this is the size of that one pool.
    Unified {
        /// Size of the pool, in bytes.
        total_bytes: u64,
    },
    /// The device has its own memory.
    Separate {
        /// Size of the pool, in bytes.
        total_bytes: u64,
    },
    /// Nobody could say; nothing that needs memory is placed on it.
    #[default]
    Unknown,
}

impl MemoryPool {
    /// The pool's size in bytes, if known.
    pub const fn total_bytes(self) -> Option<u64> {
        match self {
            Self::Unified { total_bytes } | Self::Separate { total_bytes } => Some(total_bytes),
            Self::Unknown => None,
        }
    }
}

/// The memory of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeMemory {
    /// Memory of the host, in bytes, within the limits of its control group.
    pub host_total_bytes: u64,
    /// Memory of each device, in the order of the node's devices.
    pub devices: Vec<MemoryPool>,
}

/// What a reservation is made on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MemoryPlace {
    /// Memory of the host.
    Host,
    /// Memory of the device with this position in [`NodeMemory::devices`].
    Device(usize),
}

/// Why memory was not reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemoryRefusal {
    /// The pool has less left than was asked for.
    #[error("{asked_bytes} bytes asked for, {free_bytes} of {total_bytes} bytes are free")]
    TooLittle {
        /// What was asked for, in bytes.
        asked_bytes: u64,
        /// What the pool has left, in bytes.
        free_bytes: u64,
        /// The pool's size, in bytes.
        total_bytes: u64,
    },
    /// The size of the device's memory is not known.
    #[error("the size of this device's memory is not known")]
    Unknown,
    /// There is no such device.
    #[error("the node has no device {0}")]
    NoDevice(usize),
}

/// More was given back than was reserved: the caller's books are wrong. The ledger is left at zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{released_bytes} bytes given back where {reserved_bytes} were reserved")]
pub struct ReleasedTooMuch {
    /// What was given back, in bytes.
    pub released_bytes: u64,
    /// What had been reserved, in bytes.
    pub reserved_bytes: u64,
}

/// What has been promised from each pool of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLedger {
    memory: NodeMemory,
    host_reserved_bytes: u64,
    device_reserved_bytes: Vec<u64>,
}

impl MemoryLedger {
    /// An empty ledger over a node's memory.
    pub fn new(memory: NodeMemory) -> Self {
        let device_reserved_bytes = vec![0; memory.devices.len()];
        Self {
            memory,
            host_reserved_bytes: 0,
            device_reserved_bytes,
        }
    }

    /// The size of the pool a place draws from, in bytes; none where it is unknown or there is no such device.
    pub fn total_bytes(&self, place: MemoryPlace) -> Option<u64> {
        match self.pool(place) {
            Pool::Host => Some(self.memory.host_total_bytes),
            Pool::Device(index) => self.memory.devices[index].total_bytes(),
            Pool::Unknown | Pool::NoDevice(_) => None,
        }
    }

    /// What is reserved in the pool a place draws from, in bytes.
    pub fn reserved_bytes(&self, place: MemoryPlace) -> u64 {
        match self.pool(place) {
            Pool::Host => self.host_reserved_bytes,
            Pool::Device(index) => self.device_reserved_bytes[index],
            Pool::Unknown | Pool::NoDevice(_) => 0,
        }
    }

    /// What is left in the pool a place draws from, in bytes, between 0 and its size.
    pub fn free_bytes(&self, place: MemoryPlace) -> u64 {
        self.total_bytes(place)
            .map_or(0, |total| total.saturating_sub(self.reserved_bytes(place)))
    }

    /// Promises memory.
    ///
    /// # Errors
    /// When it does not fit or the pool is not known; the ledger is then unchanged.
    pub fn reserve(&mut self, place: MemoryPlace, bytes: u64) -> Result<(), MemoryRefusal> {
        let pool = self.pool(place);
        match pool {
            Pool::NoDevice(index) => return Err(MemoryRefusal::NoDevice(index)),
            Pool::Unknown if bytes > 0 => return Err(MemoryRefusal::Unknown),
            Pool::Unknown => return Ok(()),
            Pool::Host | Pool::Device(_) => {}
        }
        let free_bytes = self.free_bytes(place);
        if bytes > free_bytes {
            let total_bytes = self.total_bytes(place).unwrap_or(0);
            return Err(MemoryRefusal::TooLittle {
                asked_bytes: bytes,
                free_bytes,
                total_bytes,
            });
        }
        if let Some(reserved) = self.reserved_mut(pool) {
            *reserved = reserved.saturating_add(bytes);
        }
        Ok(())
    }

    /// Gives promised memory back.
    ///
    /// # Errors
    /// When more is given back than was reserved; the pool is then wholly free, never more than that.
    pub fn release(&mut self, place: MemoryPlace, bytes: u64) -> Result<(), ReleasedTooMuch> {
        let pool = self.pool(place);
        let Some(reserved) = self.reserved_mut(pool) else {
            return if bytes == 0 {
                Ok(())
            } else {
                Err(ReleasedTooMuch {
                    released_bytes: bytes,
                    reserved_bytes: 0,
                })
            };
        };
        let before = *reserved;
        *reserved = before.saturating_sub(bytes);
        if bytes > before {
            Err(ReleasedTooMuch {
                released_bytes: bytes,
                reserved_bytes: before,
            })
        } else {
            Ok(())
        }
    }

    fn pool(&self, place: MemoryPlace) -> Pool {
        match place {
            MemoryPlace::Host => Pool::Host,
            MemoryPlace::Device(index) => match self.memory.devices.get(index) {
                Some(MemoryPool::Unified { .. }) => Pool::Host,
                Some(MemoryPool::Separate { .. }) => Pool::Device(index),
                Some(MemoryPool::Unknown) => Pool::Unknown,
                None => Pool::NoDevice(index),
            },
        }
    }

    fn reserved_mut(&mut self, pool: Pool) -> Option<&mut u64> {
        match pool {
            Pool::Host => Some(&mut self.host_reserved_bytes),
            Pool::Device(index) => self.device_reserved_bytes.get_mut(index),
            Pool::Unknown | Pool::NoDevice(_) => None,
        }
    }
}

/// The pool a place draws from.
#[derive(Debug, Clone, Copy)]
enum Pool {
    Host,
    Device(usize),
    Unknown,
    NoDevice(usize),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn unified_128() -> MemoryLedger {
        MemoryLedger::new(NodeMemory {
            host_total_bytes: 128 * GIB,
            devices: vec![MemoryPool::Unified {
                total_bytes: 128 * GIB,
            }],
        })
    }

    #[test]
    fn field_005_unified_memory_is_one_pool_for_cpu_and_gpu() {
        let mut ledger = unified_128();
        ledger.reserve(MemoryPlace::Device(0), 90 * GIB).unwrap();
        let refusal = ledger.reserve(MemoryPlace::Host, 60 * GIB).unwrap_err();
        assert_eq!(
            refusal,
            MemoryRefusal::TooLittle {
                asked_bytes: 60 * GIB,
                free_bytes: 38 * GIB,
                total_bytes: 128 * GIB
            }
        );
        ledger.reserve(MemoryPlace::Host, 20 * GIB).unwrap();
        assert_eq!(ledger.free_bytes(MemoryPlace::Device(0)), 18 * GIB);
        assert_eq!(ledger.free_bytes(MemoryPlace::Host), 18 * GIB);
    }

    #[test]
    fn separate_memory_is_charged_apart_from_the_host() {
        let mut ledger = MemoryLedger::new(NodeMemory {
            host_total_bytes: 128 * GIB,
            devices: vec![
                MemoryPool::Separate {
                    total_bytes: 96 * GIB,
                },
                MemoryPool::Unknown,
            ],
        });
        ledger.reserve(MemoryPlace::Device(0), 90 * GIB).unwrap();
        ledger.reserve(MemoryPlace::Host, 60 * GIB).unwrap();
        assert_eq!(
            ledger.reserve(MemoryPlace::Device(1), 1),
            Err(MemoryRefusal::Unknown)
        );
        assert_eq!(
            ledger.reserve(MemoryPlace::Device(2), 1),
            Err(MemoryRefusal::NoDevice(2))
        );
    }

    #[test]
    fn field_078_a_second_release_is_flagged_and_free_stays_within_the_pool() {
        let mut ledger = unified_128();
        ledger.reserve(MemoryPlace::Device(0), 90 * GIB).unwrap();
        ledger.release(MemoryPlace::Device(0), 90 * GIB).unwrap();
        assert_eq!(
            ledger.release(MemoryPlace::Device(0), 90 * GIB),
            Err(ReleasedTooMuch {
                released_bytes: 90 * GIB,
                reserved_bytes: 0
            })
        );
        assert_eq!(ledger.free_bytes(MemoryPlace::Device(0)), 128 * GIB);
        assert!(
            ledger
                .reserve(MemoryPlace::Host, 18_446_744_073_707_737_660)
                .is_err()
        );
    }

    proptest! {
        #[test]
        fn whatever_is_asked_free_plus_reserved_is_the_pool(steps in proptest::collection::vec((any::<bool>(), 0_usize..4, any::<u64>()), 0..40)) {
            let mut ledger = MemoryLedger::new(NodeMemory {
                host_total_bytes: 1000,
                devices: vec![MemoryPool::Unified { total_bytes: 1000 }, MemoryPool::Separate { total_bytes: 300 }, MemoryPool::Unknown],
            });
            let places = [MemoryPlace::Host, MemoryPlace::Device(0), MemoryPlace::Device(1), MemoryPlace::Device(2)];
            for (is_reserve, place, bytes) in steps {
                let bytes = if bytes % 3 == 0 { bytes } else { bytes % 400 };
                if is_reserve {
                    let _ = ledger.reserve(places[place], bytes);
                } else {
                    let _ = ledger.release(places[place], bytes);
                }
                for place in places {
                    let total = ledger.total_bytes(place).unwrap_or(0);
                    prop_assert_eq!(ledger.free_bytes(place) + ledger.reserved_bytes(place), total);
                }
            }
        }
    }
}
