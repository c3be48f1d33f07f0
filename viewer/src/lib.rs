//! The inspector: where every layer runs, why, what moves, and how long it was expected to take and took.
//!
//! - It runs nothing and decides nothing: what-if questions go to the compiler as a subprocess.
//! - `scene` joins plan and trace into plain data; everything that draws reads only that.

pub mod quantity;
pub mod scene;
