//! What travels between processes, named by direction: the frozen [`hello`], and [`v1`], the only protocol version so far.
//!
//! Messages are encoded by the codec (bincode: not self-describing), so no `serde` attribute that changes the shape may appear here or in
//! the model; open vocabularies travel as text. Golden bytes of every message are tests.

pub mod hello;
pub mod v1;
