//! What the integration tests share: the reference that defines what a graph means.

pub mod interpreter;
