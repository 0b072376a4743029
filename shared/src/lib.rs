//! The vocabulary every part of Compass shares: ids, units, time, seeds, the domain model, the wire and the files people write.
//!
//! Start at [`model`]. This crate has no asynchronous dependency, reads no clock and opens no socket.

pub mod api;
pub mod codec;
pub mod detect;
pub mod evaluate;
pub mod ids;
pub mod model;
pub mod seed;
pub mod settings;
pub mod spec;
pub mod time;
pub mod units;
pub mod vision;
pub mod wire;
