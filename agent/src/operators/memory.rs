//! What a stateful operator remembers, per query.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::OperatorError;

/// Queries remembered by one worker; of more, the longest unused is forgotten.
const QUERIES_MAX: usize = 64;

/// One state per query, each with the time of its last use.
pub(super) struct Memory<S> {
    states: BTreeMap<String, (u64, S)>,
    uses: u64,
}

impl<S> Default for Memory<S> {
    fn default() -> Self {
        Self {
            states: BTreeMap::new(),
            uses: 0,
        }
    }
}

impl<S: Default + Serialize + DeserializeOwned> Memory<S> {
    /// The state of a query, new if there is none.
    pub(super) fn of(&mut self, query: &str) -> &mut S {
        self.uses += 1;
        if !self.states.contains_key(query) {
            self.make_room();
        }
        let entry = self.states.entry(query.to_owned()).or_default();
        entry.0 = self.uses;
        &mut entry.1
    }

    fn make_room(&mut self) {
        if self.states.len() < QUERIES_MAX {
            return;
        }
        let oldest = self.states.iter().min_by_key(|(_, (used, _))| *used);
        if let Some(query) = oldest.map(|(query, _)| query.clone()) {
            self.states.remove(&query);
        }
    }

    pub(super) fn snapshot(&mut self, query: &str) -> Result<Vec<u8>, OperatorError> {
        serde_json::to_vec(self.of(query)).map_err(|e| OperatorError::State(e.to_string()))
    }

    pub(super) fn restore(&mut self, query: &str, state: &[u8]) -> Result<(), OperatorError> {
        let state =
            serde_json::from_slice(state).map_err(|e| OperatorError::State(e.to_string()))?;
        *self.of(query) = state;
        Ok(())
    }

    pub(super) fn forget(&mut self, query: &str) {
        self.states.remove(query);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_apart_bounded_and_survive_a_snapshot() {
        let mut memory = Memory::<u64>::default();
        *memory.of("a") = 7;
        let state = memory.snapshot("a").unwrap();
        for n in 0..QUERIES_MAX {
            *memory.of(&n.to_string()) = n as u64;
        }
        assert_eq!(memory.states.len(), QUERIES_MAX);
        assert_eq!(*memory.of("a"), 0, "the longest unused was forgotten");
        memory.restore("a", &state).unwrap();
        assert_eq!(*memory.of("a"), 7);
        assert!(matches!(
            memory.restore("a", b"nonsense"),
            Err(OperatorError::State(_))
        ));
        assert_eq!(*memory.of("a"), 7);
        memory.forget("a");
        assert_eq!(*memory.of("a"), 0);
    }
}
