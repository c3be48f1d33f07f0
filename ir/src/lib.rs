//! The data that the programs of this workspace exchange: graphs, machines, plans and traces.
//!
//! - It does no I/O, and uses no device and no tensor library.
//! - Of hardware it has the sizes that compiler and executor must agree on: how weights are packed for processors and
//!   GPUs (`packing`), what scratch memory, letters and captured launches take (`workspace`, `letters`, `captured`).
//! - What a value of these types means never depends on who made it.

#![warn(missing_docs)]

pub mod asked;
pub mod captured;
pub mod check;
pub mod counts;
pub mod dag;
mod fingerprint;
pub mod forecast;
pub mod frame;
pub mod graph;
pub mod id;
pub mod layout;
pub mod letters;
pub mod machine;
pub mod model;
pub mod op;
pub mod packing;
pub mod plan;
mod read;
mod ron_text;
pub mod split;
pub mod tensor;
pub mod text;
pub mod trace;
pub mod weight;
pub mod workspace;

/// Makes the short lists of these types: [`id::Few`], [`tensor::Shape`].
pub use smallvec::smallvec;

pub use fingerprint::{fingerprint, fingerprint_of_file, is_sampled};
