//! What the command lines of all programs share: how arguments are refused and how files are written.

mod arguments;
mod output;

pub use arguments::parse;
pub use output::{check_outputs, write};
