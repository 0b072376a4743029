//! A tree of seeds: a child generator per purpose and per entity, so that a new draw somewhere does not move other results.

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// A node of the seed tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seed(pub u64);

impl Seed {
    /// The seed for a purpose (and, through chaining, for an entity) below this one.
    #[must_use]
    pub fn child(self, purpose: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        hash.update(purpose.as_bytes());
        let digest = hash.finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        Self(u64::from_le_bytes(first))
    }

    /// The seed for the n-th of several like entities below this one.
    #[must_use]
    pub fn index(self, n: u64) -> Self {
        self.child(&format!("#{n}"))
    }

    /// A generator that starts from this seed.
    pub fn rng(self) -> StdRng {
        StdRng::seed_from_u64(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng;

    #[test]
    fn children_differ_by_purpose_and_parent_and_repeat() {
        let root = Seed(7);
        assert_eq!(root.child("search"), Seed(7).child("search"));
        assert_ne!(root.child("search"), root.child("profile"));
        assert_ne!(root.index(1), root.index(2));
        assert_ne!(Seed(7).child("a"), Seed(8).child("a"));
        assert_eq!(root.rng().random::<u64>(), root.rng().random::<u64>());
    }
}
