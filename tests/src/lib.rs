//! What the integration tests share: machines and models made for them.

pub mod machines;
pub mod toys;
