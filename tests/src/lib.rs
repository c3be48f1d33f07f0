//! What the integration tests share: machines and models made for them, and the reference that defines what a
//! graph means.

pub mod interpreter;
pub mod machines;
pub mod toys;
