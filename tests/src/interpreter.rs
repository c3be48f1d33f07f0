//! What a layer graph means: every operation in plain loops over one sequence, without a cache.
//!
//! This is the reference that other ways to compute a model are compared with. It is written to be read,
//! not to be fast: values are held in 32 bits and summed up in 64.

use std::fs;

use anyhow::{Context as _, Result, bail, ensure};
use half::{bf16, f16};
use ir::id::{Id as _, WeightId};
use ir::model::{Model, ModelWeight};
use ir::op::{Activation, Attention, Experts, Linear, Norm, NormKind, Op, Pairing, Rope, Then};
use ir::tensor::DType;
use ir::weight::Source;

/// Rows of features. Expert ids are held as numbers like everything else.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    /// Elements of one row.
    pub features: usize,
    /// Row after row.
    pub data: Vec<f32>,
}

/// One weight in 32 bits, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Outermost axis first.
    pub shape: Vec<usize>,
    /// Elements.
    pub data: Vec<f32>,
}

/// A model with its weights read.
#[derive(Clone, Debug)]
pub struct Interpreter {
    model: Model,
    weights: Vec<Weight>,
}

/// What operations read besides their inputs.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ids of the one sequence.
    pub ids: &'a [u32],
    /// Positions whose logits are wanted.
    pub rows: &'a [usize],
}

impl Matrix {
    /// The row of that number.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.features..][..self.features]
    }

    /// All rows in order.
    pub fn rows(&self) -> std::slice::ChunksExact<'_, f32> {
        self.data.chunks_exact(self.features)
    }

    fn map(&self, f: impl Fn(f32) -> f32) -> Self {
        Self { features: self.features, data: self.data.iter().map(|&x| f(x)).collect() }
    }

    fn zip(&self, other: &Self, f: impl Fn(f32, f32) -> f32) -> Self {
        assert_eq!(self.data.len(), other.data.len(), "elementwise work on unlike shapes");
        let data = self.data.iter().zip(&other.data).map(|(&a, &b)| f(a, b)).collect();
        Self { features: self.features, data }
    }

    fn map_rows(&self, features: usize, f: impl FnMut(&[f32]) -> Vec<f32>) -> Self {
        Self { features, data: self.rows().flat_map(f).collect() }
    }
}

impl Weight {
    /// Matrix number `index` of a stack, or the row of a matrix.
    fn part(&self, index: usize) -> &[f32] {
        let size: usize = self.shape[1..].iter().product();
        &self.data[index * size..][..size]
    }
}

/// All elements of a weight, as its sources say where they lie.
///
/// # Errors
///
/// When a file cannot be read or is shorter than a source reaches.
pub fn read_weight(model: &Model, weight: &ModelWeight) -> Result<Weight> {
    let mut data = Vec::new();
    for source in &weight.sources {
        let path = &model.files[source.file].path;
        let contents = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        data.extend(read_source(&contents, source).with_context(|| weight.name.clone())?);
    }
    let shape: Vec<usize> = weight.shape.iter().map(|&size| size as usize).collect();
    ensure!(shape.iter().product::<usize>() == data.len(), "{} has another shape", weight.name);
    Ok(Weight { shape, data })
}

fn read_source(contents: &[u8], source: &Source) -> Result<Vec<f32>> {
    let mut positions = vec![0];
    for stride in source.axes.iter().flatten() {
        positions = positions
            .into_iter()
            .flat_map(|start| (0..u64::from(stride.size)).map(move |i| start + i * stride.stride))
            .collect();
    }
    let bytes = source.dtype.bytes();
    let element = |position: u64| -> Result<f32> {
        let start = (source.offset + position * bytes) as usize;
        let stored = contents.get(start..start + bytes as usize).context("beyond the file")?;
        Ok(match (source.dtype, stored) {
            (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
            (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
            (dtype, _) => bail!("weights are not stored as {dtype}"),
        })
    };
    positions.into_iter().map(element).collect()
}

impl Interpreter {
    /// Reads all weights of a model.
    pub fn load(model: Model) -> Result<Self> {
        let weights = model.weights.rows().iter().map(|weight| read_weight(&model, weight));
        let weights = weights.collect::<Result<_>>()?;
        Ok(Self { model, weights })
    }

    /// Logits `[rows, vocabulary]` at some positions of one sequence of tokens.
    pub fn logits(&self, ids: &[u32], rows: &[usize]) -> Result<Matrix> {
        let batch = Batch { ids, rows };
        let layers = &self.model.layers;
        let mut values: Vec<Option<Matrix>> = vec![None; layers.values().len()];
        for (_, node) in layers.nodes() {
            let inputs: Vec<&Matrix> = node
                .inputs
                .iter()
                .map(|input| {
                    values[input.index()].as_ref().context("a value is read before its time")
                })
                .collect::<Result<_>>()?;
            let outputs =
                self.run(&node.work, &inputs, &batch).with_context(|| node.name.clone())?;
            ensure!(outputs.len() == node.outputs.len(), "{} makes too few values", node.name);
            for (output, value) in node.outputs.iter().zip(outputs) {
                values[output.index()] = Some(value);
            }
        }
        let &[output] = layers.outputs() else { bail!("a model has one output") };
        values[output.index()].take().context("the output is not computed")
    }

    /// What one operation makes of its inputs.
    pub fn run(&self, op: &Op, inputs: &[&Matrix], batch: &Batch<'_>) -> Result<Vec<Matrix>> {
        Ok(match (op, inputs) {
            (Op::Embed { table, scale }, []) => {
                let table = self.weight(*table);
                let rows = batch.ids.iter().flat_map(|&id| table.part(id as usize));
                vec![Matrix { features: table.shape[1], data: rows.map(|x| x * scale).collect() }]
            }
            (Op::AddPosition { table, offset }, [x]) => {
                let table = self.weight(*table);
                let positions = (0..batch.ids.len()).map(|position| position + *offset as usize);
                let data = positions.flat_map(|row| table.part(row)).copied().collect();
                vec![x.zip(&Matrix { features: x.features, data }, |x, position| x + position)]
            }
            (Op::Norm(norm), [x]) => vec![self.norm(norm, x)],
            (Op::Norm(norm), [x, residual]) => vec![self.norm(norm, x).zip(residual, |x, r| x + r)],
            (Op::Linear(linear), [x, residual @ ..]) => self.linear(linear, x, residual),
            (Op::Attention(attention), [q, k, v]) => vec![self.attention(attention, q, k, v)],
            (Op::Activate(activation), [x]) => vec![x.map(|x| activate(*activation, x))],
            (Op::Gate(activation), [gate, up]) => vec![gated(*activation, gate, up)],
            (Op::Add, [a, b]) => vec![a.zip(b, |a, b| a + b)],
            (Op::SigmoidGate, [gate, x]) => {
                let mut gates = gate.data.iter();
                vec![x.map_rows(x.features, |row| {
                    let gate = sigmoid(*gates.next().expect("one gate a row"));
                    row.iter().map(|x| gate * x).collect()
                })]
            }
            (Op::Route { used, renormalise }, [logits]) => {
                route(logits, *used as usize, *renormalise)
            }
            (Op::Experts(experts), [x, ids, weights, ..]) => {
                vec![self.experts(experts, x, ids, weights)]
            }
            (Op::SelectRows, [x]) => {
                let data = batch.rows.iter().flat_map(|&row| x.row(row)).copied().collect();
                vec![Matrix { features: x.features, data }]
            }
            (Op::SoftCap { cap }, [x]) => vec![x.map(|x| cap * (x / cap).tanh())],
            (op, inputs) => bail!("{op} of {} inputs", inputs.len()),
        })
    }

    fn weight(&self, id: WeightId) -> &Weight {
        &self.weights[id.index()]
    }

    fn norm(&self, norm: &Norm, x: &Matrix) -> Matrix {
        x.map_rows(x.features, |row| self.norm_row(norm, row))
    }

    fn norm_row(&self, norm: &Norm, row: &[f32]) -> Vec<f32> {
        let mean_of = |f: &dyn Fn(f64) -> f64| {
            row.iter().map(|&x| f(f64::from(x))).sum::<f64>() / row.len() as f64
        };
        let mean = match norm.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => mean_of(&|x| x),
        };
        let variance = mean_of(&|x| (x - mean) * (x - mean));
        let factor = 1.0 / (variance + f64::from(norm.epsilon)).sqrt();
        let normed = row.iter().enumerate().map(|(i, &x)| {
            let scale =
                norm.scale.map_or(1.0, |scale| self.weight(scale).data[i] + norm.scale_offset);
            let bias = norm.bias.map_or(0.0, |bias| self.weight(bias).data[i]);
            ((f64::from(x) - mean) * factor) as f32 * scale + bias
        });
        normed.collect()
    }

    fn linear(&self, linear: &Linear, x: &Matrix, residual: &[&Matrix]) -> Vec<Matrix> {
        let normed = linear.norm.as_ref().map(|norm| self.norm(norm, x));
        let x = normed.as_ref().unwrap_or(x);
        let products = linear.weights.iter().zip(&linear.biases).map(|(&weight, bias)| {
            let weight = self.weight(weight);
            x.map_rows(weight.shape[0], |row| {
                let mut product = times(&weight.data, row);
                if let Some(bias) = bias {
                    product
                        .iter_mut()
                        .zip(&self.weight(*bias).data)
                        .for_each(|(x, bias)| *x += bias);
                }
                product
            })
        });
        let products: Vec<Matrix> = products.collect();
        let mut outputs = match linear.then {
            Then::Nothing => products,
            Then::Activate(activation) => {
                products.iter().map(|product| product.map(|x| activate(activation, x))).collect()
            }
            Then::Gate(activation) => vec![gated(activation, &products[0], &products[1])],
        };
        if linear.residual {
            outputs[0] = outputs[0].zip(residual[0], |x, residual| x + residual);
        }
        outputs
    }

    fn attention(&self, attention: &Attention, q: &Matrix, k: &Matrix, v: &Matrix) -> Matrix {
        let head_dim = attention.head_dim as usize;
        let length = q.rows().len();
        let rope = attention.rope.map(|rope| &self.model.ropes[rope]);
        let frequencies = rope.map(|rope| rope.frequencies.at(rope.dims, length as u32));
        let prepared = |x: &Matrix, norm: &Option<Norm>| {
            let mut position = 0;
            x.map_rows(x.features, |row| {
                let turned = row.chunks_exact(head_dim).flat_map(|head| {
                    let mut head = match norm {
                        Some(norm) => self.norm_row(norm, head),
                        None => head.to_vec(),
                    };
                    if let (Some(rope), Some(frequencies)) = (rope, &frequencies) {
                        rotate(rope, frequencies, position, &mut head);
                    }
                    head
                });
                let turned = turned.collect();
                position += 1;
                turned
            })
        };
        let q = prepared(q, &attention.q_norm);
        let k = prepared(k, &attention.k_norm);
        let mut position: usize = 0;
        q.map_rows(q.features, |row| {
            let first =
                attention.window.map_or(0, |window| (position + 1).saturating_sub(window as usize));
            let seen = first..position + 1;
            position += 1;
            let heads = row.chunks_exact(head_dim).enumerate().flat_map(|(head, query)| {
                let key_head = (attention.first_head as usize + head) / attention.group as usize;
                let columns = key_head * head_dim..(key_head + 1) * head_dim;
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|token| {
                        let score =
                            dot(query, &k.row(token)[columns.clone()]) * f64::from(attention.scale);
                        match attention.soft_cap {
                            Some(cap) => f64::from(cap) * (score / f64::from(cap)).tanh(),
                            None => score,
                        }
                    })
                    .collect();
                let weights = softmax(&scores);
                let mut sum = vec![0.0; head_dim];
                for (token, weight) in seen.clone().zip(weights) {
                    let value = &v.row(token)[columns.clone()];
                    sum.iter_mut().zip(value).for_each(|(sum, &x)| *sum += weight * f64::from(x));
                }
                sum.into_iter().map(|x| x as f32).collect::<Vec<f32>>()
            });
            heads.collect()
        })
    }

    fn experts(&self, experts: &Experts, x: &Matrix, ids: &Matrix, weights: &Matrix) -> Matrix {
        let [gates, ups, downs] =
            [experts.gate, experts.up, experts.down].map(|id| self.weight(id));
        let mut token = 0;
        x.map_rows(x.features, |row| {
            let mut sum = vec![0.0; row.len()];
            for (&id, &weight) in ids.row(token).iter().zip(weights.row(token)) {
                let first = experts.first() as usize;
                let Some(expert) = (id as usize).checked_sub(first) else { continue };
                if expert >= gates.shape[0] {
                    continue;
                }
                let gate = times(gates.part(expert), row);
                let up = times(ups.part(expert), row);
                let product: Vec<f32> = gate
                    .iter()
                    .zip(up)
                    .map(|(&gate, up)| activate(experts.activation, gate) * up)
                    .collect();
                let down = times(downs.part(expert), &product);
                sum.iter_mut().zip(down).for_each(|(sum, x)| *sum += weight * x);
            }
            token += 1;
            sum
        })
    }
}

/// A matrix `[outputs, inputs]` times a vector of inputs.
fn times(matrix: &[f32], vector: &[f32]) -> Vec<f32> {
    matrix.chunks_exact(vector.len()).map(|row| dot(row, vector) as f32).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

/// `exp(x) / Σ exp(x)`, shifted so that nothing overflows.
pub fn softmax(scores: &[f64]) -> Vec<f64> {
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

fn gated(activation: Activation, gate: &Matrix, up: &Matrix) -> Matrix {
    gate.zip(up, |gate, up| activate(activation, gate) * up)
}

fn activate(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Relu => x.max(0.0),
        Activation::Silu => x * sigmoid(x),
        Activation::Gelu => {
            let x = f64::from(x);
            (0.5 * x * (1.0 + error_function(x / 2f64.sqrt()))) as f32
        }
        Activation::GeluTanh => {
            let root = (2.0 / std::f32::consts::PI).sqrt();
            0.5 * x * (1.0 + (root * (x + 0.044_715 * x * x * x)).tanh())
        }
    }
}

/// `erf(x)`: its Taylor series, which 60 terms bring below 1e-12 for |x| < 4, where it is 1 within 2e-8.
fn error_function(x: f64) -> f64 {
    if x.abs() >= 4.0 {
        return x.signum();
    }
    let mut power = x;
    let mut sum = x;
    for n in 1..60 {
        power *= -x * x / f64::from(n);
        sum += power / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

/// Ids and weights of the `used` most likely experts of each row; of equals, the first.
fn route(logits: &Matrix, used: usize, renormalise: bool) -> Vec<Matrix> {
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for row in logits.rows() {
        let likely = softmax(&row.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
        let mut order: Vec<usize> = (0..likely.len()).collect();
        order.sort_by(|&a, &b| likely[b].total_cmp(&likely[a]));
        order.truncate(used);
        let sum: f64 =
            if renormalise { order.iter().map(|&expert| likely[expert]).sum() } else { 1.0 };
        ids.extend(order.iter().map(|&expert| expert as f32));
        weights.extend(order.iter().map(|&expert| (likely[expert] / sum) as f32));
    }
    vec![Matrix { features: used, data: ids }, Matrix { features: used, data: weights }]
}

fn rotate(rope: &Rope, frequencies: &[f32], position: usize, head: &mut [f32]) {
    for (pair, frequency) in frequencies.iter().enumerate() {
        let (a, b) = match rope.pairing {
            Pairing::Halves => (pair, pair + rope.dims as usize / 2),
            Pairing::Neighbours => (2 * pair, 2 * pair + 1),
        };
        // In 32 bits, as transformers turns: at long positions the rounding of the angle matters.
        let (sin, cos) = (position as f32 * frequency).sin_cos();
        let (sin, cos) = (sin * rope.magnitude, cos * rope.magnitude);
        (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[b] * cos + head[a] * sin);
    }
}
