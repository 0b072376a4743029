//! Emulated and real fleets, the link emulator, benchmarks and the demo.
//!
//! Start at [`commands`], the command line. [`cluster`] starts processes, [`relay`] emulates the links between nodes,
//! [`demo`] tells a story with both, [`fetch`] gets what it shows with `--real`, [`mod@bench`] measures. `compass-testbed` links every
//! program of the project and starts their processes by executing itself in a role, so nothing has to be installed.

pub mod bench;
pub mod cluster;
pub mod commands;
pub mod demo;
pub mod fetch;
pub mod relay;

pub use commands::main;
