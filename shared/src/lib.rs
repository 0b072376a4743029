//! Domain model, wire, codec, specs, units, seeds and detector primitives of Compass; no asynchronous dependency.

pub mod codec;
pub mod wire;
