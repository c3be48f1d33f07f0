//! Tensor types: an element type and a shape that may name run-time sizes; and the formats weights are computed in.

use std::fmt;
use std::str::FromStr;

use anyhow::bail;
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

/// The type of one element, as a checkpoint stores it or an activation holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
    /// Signed 32-bit integer: token and expert ids.
    I32,
    /// A byte of a packed weight, whatever it means there.
    U8,
    /// Signed 8-bit integer: keys and values in a cache, where each head of a token has one 32-bit scale.
    I8,
}

/// How a weight matrix is held while it is computed with.
///
/// A block format stores 32 neighbouring elements of one row with one f16 scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Format {
    /// 32-bit floats, for reference results.
    F32,
    /// 16-bit floats.
    F16,
    /// Bfloat16.
    Bf16,
    /// Bfloat16 in 12 bits: sign and mantissa as they are, four bits of exponent above one that a row shares. The same
    /// number down to 2^-14 of the row's largest; smaller ones are off by at most 2^-22 of that.
    Bf12,
    /// Signed 8-bit integers in blocks: 34 bytes for 32 elements.
    Q8,
    /// Signed 4-bit integers in blocks: 18 bytes for 32 elements.
    Q4,
}

/// One axis of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dim {
    /// A size known when the plan is made.
    Fixed(u32),
    /// Tokens fed in this run, over all its sequences.
    Tokens,
    /// Tokens of this run whose logits are wanted: usually the last of each sequence.
    Rows,
}

/// What `Dim::Tokens` and `Dim::Rows` stand for in one run, or at most in any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Extent {
    /// Size of `Dim::Tokens`.
    pub tokens: u32,
    /// Size of `Dim::Rows`.
    pub rows: u32,
}

/// Sizes of axes, outermost first. Nearly all values have two.
pub type Shape = SmallVec<[Dim; 2]>;

/// An element type and a shape.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorType {
    /// Type of every element.
    pub dtype: DType,
    /// Outermost axis first.
    pub shape: Shape,
}

impl Format {
    /// All formats, widest first.
    pub const ALL: [Format; 6] =
        [Format::F32, Format::F16, Format::Bf16, Format::Bf12, Format::Q8, Format::Q4];

    /// Elements that share one scale; 1 where there is none.
    pub fn block(self) -> u32 {
        match self {
            Format::F32 | Format::F16 | Format::Bf16 | Format::Bf12 => 1,
            Format::Q8 | Format::Q4 => 32,
        }
    }

    /// The type of its elements where each lies by itself; `None` for blocks and for small floats.
    pub fn float(self) -> Option<DType> {
        match self {
            Format::F32 => Some(DType::F32),
            Format::F16 => Some(DType::F16),
            Format::Bf16 => Some(DType::Bf16),
            Format::Bf12 | Format::Q8 | Format::Q4 => None,
        }
    }

    /// Bytes of a matrix of `rows` × `columns`, each row padded to whole blocks or bytes; at most `u64::MAX`.
    pub fn bytes(self, rows: u64, columns: u64) -> u64 {
        let blocks = columns.div_ceil(u64::from(self.block()));
        let block_bytes = match self {
            Format::Bf12 => return rows.saturating_mul(columns.saturating_mul(3).div_ceil(2)),
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            // One f16 scale, then 32 elements.
            Format::Q8 => 2 + 32,
            Format::Q4 => 2 + 16,
        };
        rows.saturating_mul(blocks).saturating_mul(block_bytes)
    }
}

impl From<DType> for Format {
    /// The format that keeps every bit of floats that a checkpoint stores; integers become f32, which keeps those below
    /// 2²⁴ as they are.
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 | DType::I32 | DType::U8 | DType::I8 => Format::F32,
            DType::F16 => Format::F16,
            DType::Bf16 => Format::Bf16,
        }
    }
}

impl FromStr for Format {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Self> {
        Ok(match text {
            "f32" => Format::F32,
            "f16" => Format::F16,
            "bf16" => Format::Bf16,
            "bf12" => Format::Bf12,
            "q8" => Format::Q8,
            "q4" => Format::Q4,
            _ => bail!("unknown format {text:?}: f32, f16, bf16, bf12, q8 and q4 exist"),
        })
    }
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 | DType::I8 => 1,
        }
    }

    /// Bytes of one head of a token in a cache: its elements, and the scale that bytes have.
    pub fn head_bytes(self, head_dim: u32) -> u64 {
        let scale_bytes = if self == DType::I8 { size_of::<f32>() as u64 } else { 0 };
        u64::from(head_dim) * self.bytes() + scale_bytes
    }

    /// Whether elements are numbers of a model: what weights and activations are made of.
    pub fn is_float(self) -> bool {
        match self {
            DType::F32 | DType::F16 | DType::Bf16 => true,
            DType::I32 | DType::U8 | DType::I8 => false,
        }
    }
}

impl Dim {
    /// The size of this axis in a run of `extent`.
    pub fn size(self, extent: Extent) -> u32 {
        match self {
            Dim::Fixed(size) => size,
            Dim::Tokens => extent.tokens,
            Dim::Rows => extent.rows,
        }
    }
}

impl TensorType {
    /// Floats of `[tokens, features]`, the shape of nearly every activation.
    pub fn activation(features: u32) -> Self {
        Self { dtype: DType::F32, shape: smallvec![Dim::Tokens, Dim::Fixed(features)] }
    }

    /// Size of the last axis; 1 for a scalar.
    pub fn features(&self, extent: Extent) -> u32 {
        self.shape.last().map_or(1, |dim| dim.size(extent))
    }

    /// Bytes in a run of `extent`; at most `u64::MAX`.
    pub fn bytes(&self, extent: Extent) -> u64 {
        let sizes = self.shape.iter().map(|dim| u64::from(dim.size(extent)));
        sizes.fold(self.dtype.bytes(), u64::saturating_mul)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::U8 => "u8",
            DType::I8 => "i8",
        })
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
            Format::Bf12 => "bf12",
            Format::Q8 => "q8",
            Format::Q4 => "q4",
        })
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Tokens => f.write_str("tokens"),
            Dim::Rows => f.write_str("rows"),
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dims: Vec<String> = self.shape.iter().map(Dim::to_string).collect();
        write!(f, "{}[{}]", self.dtype, dims.join(", "))
    }
}
