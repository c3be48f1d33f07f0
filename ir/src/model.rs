//! A lowered checkpoint: what `models` makes and `compiler` places.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::graph::LayerGraph;
use crate::id::{CacheId, FileId, RopeId, Table, WeightId};
use crate::op::Rope;
use crate::tensor::DType;
use crate::weight::Source;

/// A model as a graph of layers over weights that lie in files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// Name for people: the checkpoint's folder.
    pub name: String,
    /// The `architectures` value of its configuration.
    pub architecture: String,
    /// The folder with configuration and tokenizer.
    pub folder: PathBuf,
    /// Rows of the logits.
    pub vocabulary: u32,
    /// The most tokens of one sequence the model was made for.
    pub context: u32,
    /// Files that weights lie in.
    pub files: Table<FileId, CheckpointFile>,
    /// Every weight the layers use.
    pub weights: Table<WeightId, ModelWeight>,
    /// One for each attention layer.
    pub caches: Table<CacheId, ModelCache>,
    /// Shared rotary embeddings.
    pub ropes: Table<RopeId, Rope>,
    /// The computation. Its only output is the logits, `[rows, vocabulary]`.
    pub layers: LayerGraph,
}

/// One file of a checkpoint, and enough to notice that it has changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointFile {
    /// Absolute, or relative to the folder of the plan.
    pub path: PathBuf,
    /// Size of the file.
    pub bytes: u64,
    /// See [`crate::fingerprint()`].
    pub fingerprint: u64,
}

/// A weight as the checkpoint has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelWeight {
    /// The checkpoint's name for it.
    pub name: String,
    /// One axis for a scale or bias, two for a matrix `[outputs, inputs]`, three for a stack of matrices.
    pub shape: Vec<u32>,
    /// The stored element type.
    pub stored: DType,
    /// One source for the whole weight, or one for each row of its first axis.
    pub sources: Vec<Source>,
}

/// What one layer caches for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelCache {
    /// Key and value heads.
    pub kv_heads: u32,
    /// Features of one head.
    pub head_dim: u32,
}
