//! What the command lines of all programs share: how they begin and end, how arguments are refused and how files are
//! written.

mod arguments;
mod output;

pub use arguments::run;
pub use output::{check_outputs, write};
