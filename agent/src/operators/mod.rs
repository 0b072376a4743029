//! What built-in operators compute; they run in workers.

mod describe;

pub use describe::{Descriptors, describe};
