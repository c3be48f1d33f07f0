//! Every operation with this project's GPU kernels, on device memory whose places are known before the first run.
//!
//! - Only queueing happens here: nothing waits for the device but what crosses to the host or stands beside fetches.
//! - Decodes and prompts of some hundred tokens are captured once and replayed as a whole; what crosses to the host
//!   meanwhile goes by letters.

mod ahead;
mod attention;
mod borrowed;
mod caches;
mod copies;
mod experts;
mod home_tables;
mod inner;
mod inputs;
mod linear;
mod mail;
mod memory;
mod moves;
mod norm;
mod output;
mod replay;
mod rotations;
mod runs;
mod scratch;
mod stamps;
mod state;
mod stretches;
mod sums;
mod upload;
mod weights;

#[cfg(test)]
mod tests;

pub(crate) use self::home_tables::HomeTables;
pub(crate) use self::replay::GraphKey;
pub(crate) use self::state::State;
pub(crate) use self::stretches::stretches;
