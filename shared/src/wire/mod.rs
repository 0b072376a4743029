//! What travels between processes: the frozen hello and the versioned messages.

pub mod hello;
