//! What the integration tests share: checkpoints without data, and the reference for what a graph means.

pub mod made_up;

pub mod interpreter;
