//! Tests that cross modules: properties of what is planned, and a small fleet in virtual time.

pub(crate) mod fixture;
mod fleet;
mod properties;
mod story;
mod tree;
