//! The instructions that kernels multiply and add up with at a level.

use std::fmt;

use ir::tensor::Format;

use super::cache::Element;
use super::encode::Encoding;
use super::isa::Isa;
use super::tile::Kernel;

/// Instructions that products are made and added up with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Those that the compiler takes for plain Rust.
    Plain,
    /// Eight f32 multiplied and added.
    Avx2F32,
    /// Pairs of 16-bit integers, summed in 32 bits, of 256.
    Avx2Words,
    /// Pairs of bytes, summed in 16 bits and then in 32, of 256.
    Avx2Bytes,
    /// Pairs of a 4-bit code and a byte, summed in 16 bits, of 256.
    Avx2Nibbles,
    /// Four bytes, summed in 32 bits, of 256 (AVX-VNNI).
    Avx2Vnni,
    /// Sixteen f32 multiplied and added.
    Avx512F32,
    /// Pairs of 16-bit integers, summed in 32 bits, of 512.
    Avx512Words,
    /// Four bytes, summed in 32 bits, of 512.
    Avx512Vnni,
    /// Pairs of bf16, summed in f32, of 512.
    Avx512Bf16,
    /// Tiles of bf16, summed in f32.
    AmxBf16,
    /// Tiles of bytes, summed in 32 bits.
    AmxBytes,
}

impl Arithmetic {
    /// That of a linear, or of a mixture whose experts have so many tokens each.
    pub fn of_linear(isa: Isa, format: Format, tokens: usize) -> Self {
        let kernel = Kernel::choose(isa, format, tokens);
        match (kernel.encoding, isa) {
            (_, Isa::Portable) => Self::Plain,
            (Encoding::Tiles, _) => Self::AmxBf16,
            (Encoding::ByteTiles, _) => Self::AmxBytes,
            (Encoding::Pairs, _) => Self::Avx512Bf16,
            (Encoding::Blocks { .. }, Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx) => {
                Self::Avx512Vnni
            }
            (Encoding::Blocks { .. }, Isa::Avx2Vnni) => Self::Avx2Vnni,
            (Encoding::Blocks { .. }, Isa::Avx2 | Isa::Avx512) if format == Format::Q4 => {
                Self::Avx2Nibbles
            }
            (Encoding::Blocks { .. }, Isa::Avx2 | Isa::Avx512) => Self::Avx2Bytes,
            (Encoding::Float | Encoding::Rounded, Isa::Avx2 | Isa::Avx2Vnni) => Self::Avx2F32,
            (Encoding::Rounded, _) if format == Format::Bf12 && !kernel.unpacks => Self::Avx2F32,
            (Encoding::Float | Encoding::Rounded, _) => Self::Avx512F32,
        }
    }

    /// That of attention of many queries to a cache. Few do without tiles.
    pub fn of_attention(isa: Isa, element: Element) -> Self {
        let is_bytes = element == Element::Int8;
        match isa {
            Isa::Portable => Self::Plain,
            Isa::Avx2 if is_bytes => Self::Avx2Words,
            Isa::Avx2Vnni if is_bytes => Self::Avx2Vnni,
            Isa::Avx512 if is_bytes => Self::Avx512Words,
            Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx if is_bytes => Self::Avx512Vnni,
            Isa::Avx512Bf16Vnni if element == Element::Bf16 => Self::Avx512Bf16,
            Isa::Amx if element == Element::Bf16 => Self::AmxBf16,
            Isa::Avx2 | Isa::Avx2Vnni => Self::Avx2F32,
            Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => Self::Avx512F32,
        }
    }
}

impl fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arithmetic::Plain => "plain Rust",
            Arithmetic::Avx2F32 => "AVX2 FMA of f32",
            Arithmetic::Avx2Words => "AVX2 products of 16-bit integers",
            Arithmetic::Avx2Bytes => "AVX2 products of 8-bit integers",
            Arithmetic::Avx2Nibbles => "AVX2 products of 4-bit and 8-bit integers",
            Arithmetic::Avx2Vnni => "AVX-VNNI dot products of 8-bit integers",
            Arithmetic::Avx512F32 => "AVX-512 FMA of f32",
            Arithmetic::Avx512Words => "AVX-512 products of 16-bit integers",
            Arithmetic::Avx512Vnni => "AVX-512 VNNI dot products of 8-bit integers",
            Arithmetic::Avx512Bf16 => "AVX-512 dot products of bf16",
            Arithmetic::AmxBf16 => "AMX tiles of bf16",
            Arithmetic::AmxBytes => "AMX tiles of 8-bit integers",
        })
    }
}
