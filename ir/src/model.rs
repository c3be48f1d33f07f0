//! A lowered checkpoint: what `models` makes and `compiler` places.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::graph::LayerGraph;
use crate::id::{CacheId, FileId, RopeId, Table, WeightId};
use crate::op::Rope;
use crate::tensor::DType;
use crate::weight::{Slice, Source};

/// A model as a graph of layers over weights that lie in files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Model {
    /// Name for people: the checkpoint's folder.
    pub name: String,
    /// The class of the language model that its configuration names.
    pub architecture: String,
    /// The folder with configuration and tokenizer.
    pub folder: PathBuf,
    /// Features of the logits.
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
#[serde(deny_unknown_fields)]
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

impl ModelWeight {
    /// A part of it along one axis.
    ///
    /// Fails where it has no such part, and as [`Source::sliced`].
    pub fn sliced(&self, slice: Slice) -> Result<Self> {
        let axis = usize::from(slice.axis);
        let is_there = self.shape.get(axis).is_some_and(|size| slice.start + slice.size <= *size);
        ensure!(is_there, "{} has no part {slice:?}", self.name);
        let cut = |slice: Slice| {
            let sources = self.sources.iter().map(|source| source.sliced(slice));
            let sources: Result<Vec<Source>> = sources.collect();
            sources.with_context(|| format!("cutting {}", self.name))
        };
        let sources = if self.sources.iter().all(|source| source.axes.len() == self.shape.len()) {
            cut(slice)?
        } else if axis == 0 {
            // One source for each matrix of a stack: the stack's axis is cut by leaving matrices out.
            let matrices = slice.start as usize..(slice.start + slice.size) as usize;
            self.sources.get(matrices).context("a stack lacks matrices")?.to_vec()
        } else {
            cut(Slice { axis: slice.axis - 1, ..slice })?
        };
        let mut shape = self.shape.clone();
        shape[axis] = slice.size;
        Ok(Self { shape, sources, ..self.clone() })
    }
}

/// What one layer caches for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelCache {
    /// Key and value heads.
    pub kv_heads: u32,
    /// Features of one head.
    pub head_dim: u32,
}
