//! The model under construction: weights found by name and checked against the configuration, nodes pushed.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use ir::id::{RopeId, ValueId, WeightId};
use ir::model::{Model, ModelWeight};
use ir::op::Op;
use ir::smallvec;
use ir::tensor::{DType, Dim, TensorType};
use ir::weight::Source;

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::rope::Rotary;

/// A model under construction, and what it is made from.
pub(crate) struct Lowering<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) config: &'a Config,
    pub(crate) model: Model,
    /// Weights made so far. A weight that two nodes use is one weight.
    named: BTreeMap<String, WeightId>,
}

impl<'a> Lowering<'a> {
    /// A model without layers.
    pub(crate) fn new(checkpoint: &'a Checkpoint, config: &'a Config, architecture: &str) -> Self {
        let folder = checkpoint.folder();
        let name =
            folder.file_name().map_or("model".into(), |name| name.to_string_lossy().into_owned());
        let model = Model {
            name,
            architecture: architecture.into(),
            folder: folder.to_path_buf(),
            files: checkpoint.files().clone(),
            ..Model::default()
        };
        Self { checkpoint, config, model, named: BTreeMap::new() }
    }

    /// The first of several key prefixes under which the checkpoint has `tensor`; the first of all if none.
    pub(crate) fn prefix(&self, prefixes: &[&'static str], tensor: &str) -> &'static str {
        let found = prefixes.iter().find(|prefix| self.has(&format!("{prefix}{tensor}")));
        found.unwrap_or(&prefixes[0])
    }

    /// Whether the checkpoint has a tensor of that name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.checkpoint.get(name).is_some()
    }

    /// The whole tensor of that name, which must have this shape.
    pub(crate) fn source(&self, name: &str, shape: &[u32]) -> Result<Source> {
        let tensor = self.checkpoint.tensor(name)?;
        let file = self.checkpoint.files()[tensor.file].path.display();
        let dtype = match tensor.entry.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::Bf16,
            other => bail!(
                "{file}: tensor {name:?} is stored as {other}; F32, F16 and BF16 are supported"
            ),
        };
        ensure!(
            tensor.entry.shape.iter().copied().eq(shape.iter().map(|&size| u64::from(size))),
            "{file}: tensor {name:?} has shape {:?}, but config.json asks for {shape:?}",
            tensor.entry.shape
        );
        Ok(Source::contiguous(tensor.file, dtype, tensor.entry.offset, shape))
    }

    /// The whole tensor of that name as a weight.
    pub(crate) fn weight(&mut self, name: &str, shape: &[u32]) -> Result<WeightId> {
        if let Some(&id) = self.named.get(name) {
            return Ok(id);
        }
        let source = self.source(name, shape)?;
        Ok(self.view(name, source))
    }

    /// A view of a stored tensor as a weight with a name of its own.
    pub(crate) fn view(&mut self, name: &str, source: Source) -> WeightId {
        let (shape, stored) = (source.shape(), source.dtype);
        self.add_weight(ModelWeight { name: name.into(), shape, stored, sources: vec![source] })
    }

    /// Matrices of one shape and element type as a stack.
    pub(crate) fn stack(&mut self, name: &str, sources: Vec<Source>) -> Result<WeightId> {
        let (first, stored) = (sources[0].shape(), sources[0].dtype);
        ensure!(
            sources.iter().all(|source| source.dtype == stored),
            "{}: the matrices of {name:?} are stored in different element types",
            self.checkpoint.files()[sources[0].file].path.display()
        );
        let count = u32::try_from(sources.len()).expect("experts are counted in 32 bits");
        let shape = [vec![count], first].concat();
        Ok(self.add_weight(ModelWeight { name: name.into(), shape, stored, sources }))
    }

    fn add_weight(&mut self, weight: ModelWeight) -> WeightId {
        let name = weight.name.clone();
        let id = self.model.weights.push(weight);
        self.named.insert(name, id);
        id
    }

    /// A rotary embedding for layers to share. The model's context is at least what it was made for.
    pub(crate) fn add_rope(&mut self, Rotary { rope, context }: Rotary) -> RopeId {
        self.model.context = self.model.context.max(context);
        let known = self.model.ropes.iter().find(|(_, known)| **known == rope).map(|(id, _)| id);
        known.unwrap_or_else(|| self.model.ropes.push(rope))
    }

    /// Adds a node that makes `features` for each row of its first input, or for each token where it has none.
    pub(crate) fn push(
        &mut self,
        name: impl Into<Arc<str>>,
        op: Op,
        inputs: &[ValueId],
        features: u32,
    ) -> Result<ValueId> {
        let rows = inputs.first().map_or(Dim::Tokens, |&input| self.rows(input));
        let shape = smallvec![rows, Dim::Fixed(features)];
        self.model.layers.push_one(name, op, inputs, TensorType { dtype: DType::F32, shape })
    }

    /// What the rows of a value count.
    pub(crate) fn rows(&self, value: ValueId) -> Dim {
        self.model.layers.value(value).ty.shape[0]
    }

    /// Features of a value.
    pub(crate) fn features(&self, value: ValueId) -> u32 {
        match self.model.layers.value(value).ty.shape[1] {
            Dim::Fixed(features) => features,
            Dim::Tokens | Dim::Rows => unreachable!("lowering makes [rows, features] only"),
        }
    }

    /// Outputs of a matrix, or elements of a vector.
    pub(crate) fn outputs(&self, weight: WeightId) -> u32 {
        self.model.weights[weight].shape[0]
    }

    /// The product of two sizes of the configuration.
    pub(crate) fn product(&self, left: u32, right: u32) -> Result<u32> {
        left.checked_mul(right).ok_or_else(|| {
            self.config.error(format_args!("{left} times {right} features are too many"))
        })
    }
}
