//! Checkpoints as they are published, read into the layer graphs that the compiler places.
//!
//! - Only headers and configuration are read: no tensor is, except for each file's fingerprint, and for
//!   two that are one if they are the same.
//! - Nothing here knows a device.
//! - Whatever the files hold, the answer is a model or an error that names file and cause.

pub mod checkpoint;
mod config;
pub mod header;

mod blocks;
mod decoder;
mod families;
mod lowering;
mod rope;

use std::path::Path;

use anyhow::Result;
use ir::model::Model;

use crate::checkpoint::Checkpoint;
use crate::config::Config;

/// Reads the checkpoint at `path` — a `.safetensors` file, the index of a sharded one, or the folder of
/// either — with the `config.json` beside it, into a graph of layers over byte ranges.
///
/// Nodes are not fused: each linear has one weight, and norms, gates and residual additions stand alone.
///
/// # Errors
///
/// One line that names the file and the field or tensor which is missing, malformed or contradictory.
pub fn lower(path: &Path) -> Result<Model> {
    lower_and_list_unused(path).map(|(model, _)| model)
}

/// What [`lower`] gives, and the names of tensors that no node of the graph uses, but for those of a vision tower:
/// where there are any, the configuration may be of another model.
///
/// # Errors
///
/// As [`lower`].
pub fn lower_and_list_unused(path: &Path) -> Result<(Model, Vec<String>)> {
    let checkpoint = Checkpoint::open(path)?;
    let config = Config::read(checkpoint.folder())?;
    let model = families::lower(&checkpoint, &config)?;
    let unused = checkpoint
        .unused(&model)
        .filter(|name| !families::is_beside(&model.architecture, name))
        .map(str::to_owned)
        .collect();
    Ok((model, unused))
}
