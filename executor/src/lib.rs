pub mod generation;
pub mod sample;
pub mod text;
