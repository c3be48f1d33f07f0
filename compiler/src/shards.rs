//! MLPs and experts cut in shards, which several NUMA nodes, or the GPU and they, compute at the same time.
//!
//! - A shard has some of the intermediate features: rows of the matrices that make them, columns of the one that reads
//!   them. So it is a narrower MLP, and what all shards of a layer make is added up.
//! - A shard's nodes say in their names which it is: each NUMA node gets one of every layer that stays beside the
//!   GPUs. A GPU that fetches them computes one after another.
//! - A NUMA node's shard of a layer may be in several *pieces*, so that a GPU needs a smaller window to fetch them.
//! - One more may be *resident*: its weights are the GPU's own, which so is not idle while NUMA nodes compute theirs.

mod choice;
mod shortage;

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use ir::dag::Node;
use ir::graph::LayerGraph;
use ir::id::{Few, ValueId, WeightId};
use ir::model::Model;
use ir::op::{Experts, Linear, Op, Products, Then};
use ir::tensor::{Dim, TensorType};
use ir::weight::Slice;

use crate::place::group::parts;
use crate::rewrite::{Rewrite, Uses};

pub(crate) use self::choice::with_shards;

/// What stands before the number of a shard in its name, which follows the layer's behind a dot.
const SHARD: &str = "shard";
/// Features that parts are multiples of, best first: what blocks of the block formats are packed in, a block, vectors;
/// and what GPUs load at once.
const GRAINS: [u32; 4] = [64, 32, 16, 8];

/// How layers are cut.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    /// Each shard's share of the features, in any scale.
    shares: Vec<f64>,
    /// What a shard's name ends with.
    names: Vec<String>,
}

impl Cut {
    /// So many shards for each of the numbered NUMA nodes, which divide its share, and a resident one with that part of
    /// the features, which may be none but not all.
    pub(crate) fn new(nodes: &[(usize, f64)], pieces: usize, resident: f64) -> Self {
        assert!(resident < 1.0, "the choice of shards leaves nothing to NUMA nodes");
        let all: f64 = nodes.iter().map(|(_, share)| share).sum();
        let of_node = |&(number, share): &(usize, f64)| {
            (0..pieces).map(move |piece| {
                let piece = if pieces > 1 { format!("-{piece}") } else { String::new() };
                (share / pieces as f64, format!("{SHARD}{number}{piece}"))
            })
        };
        let resident =
            (resident > 0.0).then(|| (all * resident / (1.0 - resident), "resident".into()));
        let (shares, names) = resident.into_iter().chain(nodes.iter().flat_map(of_node)).unzip();
        Self { shares, names }
    }

    /// The features of each shard of a layer of so many; `None` where they are too few.
    fn parts(&self, features: u32) -> Option<Few<u32>> {
        GRAINS.into_iter().find_map(|grain| parts(&self.shares, features, grain))
    }

    /// Whether layers of any of these features are cut alike.
    fn is_alike(&self, other: &Self, features: &BTreeSet<u32>) -> bool {
        let mut features = features.iter();
        self.names == other.names
            && features.all(|&features| self.parts(features) == other.parts(features))
    }
}

/// The features of all layers that can be cut.
fn features(model: &Model) -> BTreeSet<u32> {
    let of_node = |op: &Op| match op.products()? {
        Products::Linear(up) if matches!(up.then, Then::Activate(_) | Then::Gate(_)) => {
            model.weights[up.weights[0]].shape.first().copied()
        }
        Products::Experts(experts) => model.weights[experts.gate].shape.get(1).copied(),
        Products::Linear(_) | Products::Attention(_) => None,
    };
    model.layers.nodes().filter_map(|(_, node)| of_node(&node.work)).collect()
}

/// The layer of a node's name, and which of the NUMA nodes' shards the node is or is a piece of.
pub(crate) fn shard(name: &str) -> Option<(&str, usize)> {
    let (layer, shard) = name.rsplit_once('.')?;
    let number = shard.strip_prefix(SHARD)?;
    let number = number.split_once('-').map_or(number, |(number, _)| number);
    Some((layer, number.parse().ok()?))
}

/// The model with those MLPs and experts for whose layers `is_cut` holds in shards; `None` where that is none.
pub(crate) fn cut(
    model: &Model,
    cut: &Cut,
    is_cut: impl Fn(&str) -> bool,
) -> Result<Option<Model>> {
    let graph = &model.layers;
    let mut cutter = Cutter {
        model: model.clone(),
        rewrite: Rewrite::new(graph),
        uses: Uses::of(graph),
        cut,
        inner: BTreeMap::new(),
    };
    let mut has_cut = false;
    for (_, node) in graph.nodes() {
        if cutter.cut_node(graph, node, &is_cut)? {
            has_cut = true;
        } else {
            cutter.rewrite.copy(node)?;
        }
    }
    let Cutter { mut model, rewrite, .. } = cutter;
    model.layers = rewrite.finish();
    Ok(has_cut.then_some(model))
}

/// A value whose features are made in parts.
struct Shards {
    /// In the new graph.
    values: Vec<ValueId>,
    parts: Few<u32>,
}

struct Cutter<'a> {
    model: Model,
    rewrite: Rewrite<'a>,
    uses: Uses,
    cut: &'a Cut,
    /// What has been made in shards, by its value in the old graph.
    inner: BTreeMap<ValueId, Shards>,
}

impl Cutter<'_> {
    /// Cuts a node of the old graph, if it is to be and can be.
    fn cut_node(
        &mut self,
        graph: &LayerGraph,
        node: &Node<Op>,
        is_cut: &impl Fn(&str) -> bool,
    ) -> Result<bool> {
        if let Op::Experts(experts) = &node.work {
            return Ok(is_cut(&node.name) && self.cut_experts(node, experts)?);
        }
        let Op::Linear(linear) = &node.work else { return Ok(false) };
        if let Some(shards) = self.inner.remove(&node.inputs[0]) {
            self.cut_down(node, linear, &shards)?;
            return Ok(true);
        }
        let is_up = is_cut(&node.name) && self.has_down(graph, node, is_cut);
        let shards = if is_up { self.cut_up(node, linear)? } else { None };
        let is_made = shards.is_some();
        self.inner.extend(shards.map(|shards| (node.outputs[0], shards)));
        Ok(is_made)
    }

    /// Whether nothing but one plain linear, which is cut too, reads what a linear activates.
    fn has_down(&self, graph: &LayerGraph, up: &Node<Op>, is_cut: &impl Fn(&str) -> bool) -> bool {
        let Op::Linear(Linear { then: Then::Activate(_) | Then::Gate(_), residual: false, .. }) =
            &up.work
        else {
            return false;
        };
        let Some(reader) = self.uses.sole_reader(&up.outputs) else { return false };
        let reader = graph.node(reader);
        let is_down = matches!(&reader.work, Op::Linear(down)
            if down.norm.is_none() && down.then == Then::Nothing && down.weights.len() == 1);
        is_down && reader.inputs[0] == up.outputs[0] && is_cut(&reader.name)
    }

    /// Cuts what is activated by rows; `None` where the features are too few.
    fn cut_up(&mut self, node: &Node<Op>, up: &Linear) -> Result<Option<Shards>> {
        let weight = up.weights[0];
        let features = self.model.weights[weight].shape[0];
        let Some(parts) = self.cut.parts(features) else { return Ok(None) };
        let inputs = self.rewrite.renamed(&node.inputs);
        let mut values = Vec::new();
        for (shard, (start, size)) in ranges(&parts).enumerate() {
            let mut op = up.clone();
            for weight in op.weights.iter_mut().chain(op.biases.iter_mut().flatten()) {
                *weight = self.slice(*weight, Slice { axis: 0, start, size }, shard)?;
            }
            let mut ty = self.ty(node);
            if let Some(features) = ty.shape.last_mut() {
                *features = Dim::Fixed(size);
            }
            values.push(self.rewrite.add(self.name(node, shard), Op::Linear(op), &inputs, ty)?);
        }
        Ok(Some(Shards { values, parts }))
    }

    /// Cuts by columns, and adds up.
    fn cut_down(&mut self, node: &Node<Op>, down: &Linear, shards: &Shards) -> Result<()> {
        let inputs = self.rewrite.renamed(&node.inputs[1..]);
        let mut terms = Vec::new();
        for (shard, (start, size)) in ranges(&shards.parts).enumerate() {
            let mut op = down.clone();
            op.weights[0] = self.slice(op.weights[0], Slice { axis: 1, start, size }, shard)?;
            let mut inputs = [&[shards.values[shard]], &inputs[..]].concat();
            if shard > 0 {
                // What is added to the sum is added once.
                op.biases.fill(None);
                op.residual = false;
                inputs.truncate(1);
            }
            let ty = self.ty(node);
            terms.push(self.rewrite.add(self.name(node, shard), Op::Linear(op), &inputs, ty)?);
        }
        self.add_up(node, &terms)
    }

    /// Cuts each expert as an MLP, and adds up; false where the features are too few.
    fn cut_experts(&mut self, node: &Node<Op>, experts: &Experts) -> Result<bool> {
        // The most used of a mixture are a node of their own because they are for a GPU.
        if experts.part.is_some_and(|part| part.first == 0) {
            return Ok(false);
        }
        let features = self.model.weights[experts.gate].shape[1];
        let Some(parts) = self.cut.parts(features) else { return Ok(false) };
        let inputs = self.rewrite.renamed(&node.inputs);
        let mut terms = Vec::new();
        for (shard, (start, size)) in ranges(&parts).enumerate() {
            let rows = Slice { axis: 1, start, size };
            let op = Op::Experts(Experts {
                gate: self.slice(experts.gate, rows, shard)?,
                up: self.slice(experts.up, rows, shard)?,
                down: self.slice(experts.down, Slice { axis: 2, ..rows }, shard)?,
                ..experts.clone()
            });
            let ty = self.ty(node);
            terms.push(self.rewrite.add(self.name(node, shard), op, &inputs, ty)?);
        }
        self.add_up(node, &terms)?;
        Ok(true)
    }

    /// Lets the sum of terms stand for what the node made.
    fn add_up(&mut self, node: &Node<Op>, terms: &[ValueId]) -> Result<()> {
        let mut sum = terms[0];
        for (shard, &term) in terms.iter().enumerate().skip(1) {
            let name = format!("{}.sum{shard}", node.name);
            sum = self.rewrite.add(name, Op::Add, &[sum, term], self.ty(node))?;
        }
        self.rewrite.rename(&node.outputs, &[sum]);
        Ok(())
    }

    /// A new weight: a part of another.
    fn slice(&mut self, weight: WeightId, slice: Slice, shard: usize) -> Result<WeightId> {
        let mut part = self.model.weights[weight].sliced(slice)?;
        part.name += &format!(" ({})", self.cut.names[shard]);
        Ok(self.model.weights.push(part))
    }

    fn name(&self, node: &Node<Op>, shard: usize) -> String {
        format!("{}.{}", node.name, self.cut.names[shard])
    }

    fn ty(&self, node: &Node<Op>) -> TensorType {
        self.model.layers.value(node.outputs[0]).ty.clone()
    }
}

/// `(start, size)` of each part.
fn ranges(parts: &[u32]) -> impl Iterator<Item = (u32, u32)> {
    parts.iter().scan(0, |end, &size| {
        let start = *end;
        *end += size;
        Some((start, size))
    })
}
