//! Telling the user something beside a program's results.

use std::fmt::Display;
use std::io::Write as _;

/// Writes a line to standard error. Where nobody reads that any more, the work goes on all the same.
pub fn tell(line: impl Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
