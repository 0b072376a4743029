//! The data plane: frames in, through operators, out, over one QUIC connection per pair of nodes.

pub mod core;
