//! What the integration tests share: machines, models and checkpoints without data made for them, and the
//! reference that defines what a graph means.

pub mod made_up;

pub mod interpreter;
pub mod machines;
pub mod toys;
