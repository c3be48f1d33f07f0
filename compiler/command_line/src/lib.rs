//! What the command lines of all programs share: how they begin and end, how arguments are refused, how users are told
//! something, and how files are read and written.

mod arguments;
mod input;
mod output;
mod tell;

pub use arguments::{misuse, output_file, run};
pub use input::{FileKind, read, read_text};
pub use output::{check_outputs, write};
pub use tell::tell;
