//! Which kernel each operation uses at a level, in words.

use ir::tensor::Format;

use super::encode::Encoding;
use super::isa::Isa;
use super::tile::Kernel;

/// Operations with the kernel that serves them at `isa`, for `hybrid-exec features`.
pub fn describe(isa: Isa) -> Vec<(String, String)> {
    let mut rows = Vec::new();
    for format in Format::ALL {
        let (few, many) = (linear(isa, format, 1), linear(isa, format, 512));
        if few == many {
            rows.push((format!("linear {format}"), few));
        } else {
            rows.push((format!("linear {format}, few tokens"), few));
            rows.push((format!("linear {format}, many tokens"), many));
        }
    }
    let vectors = match isa {
        Isa::Portable => "plain Rust",
        Isa::Avx2 | Isa::Avx2Vnni => "vectors of 8 floats, FMA",
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => {
            "vectors of 16 floats, FMA"
        }
    };
    rows.push(("experts".into(), "those of their formats' linears".into()));
    rows.push(("attention, rotary".into(), vectors.into()));
    if isa == Isa::Amx {
        let tiles = "AMX tiles of bf16, where the cache is in bf16";
        rows.push(("attention, many tokens".into(), tiles.into()));
    }
    rows.push(("norm, activation".into(), vectors.into()));
    rows.push(("router".into(), "plain Rust".into()));
    rows.push(("cache, rows of tables".into(), "copies and conversions in plain Rust".into()));
    rows
}

fn linear(isa: Isa, format: Format, tokens: usize) -> String {
    let kernel = Kernel::choose(isa, format, tokens);
    let products = match (kernel.encoding, isa) {
        (_, Isa::Portable) => "plain Rust",
        (Encoding::Tiles, _) => "AMX tiles of bf16",
        (Encoding::ByteTiles, _) => "AMX tiles of 8-bit integers",
        (Encoding::Pairs, _) => "AVX-512 dot products of bf16",
        (Encoding::Blocks { .. }, Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx) => {
            "AVX-512 VNNI dot products of 8-bit integers"
        }
        (Encoding::Blocks { .. }, Isa::Avx2Vnni) => "AVX-VNNI dot products of 8-bit integers",
        (Encoding::Blocks { .. }, Isa::Avx2 | Isa::Avx512) => "AVX2 products of 8-bit integers",
        (Encoding::Float | Encoding::Rounded, Isa::Avx2 | Isa::Avx2Vnni) => "AVX2 FMA of f32",
        (Encoding::Rounded, _) if format == Format::Bf12 && !kernel.unpacks => "AVX2 FMA of f32",
        (Encoding::Float | Encoding::Rounded, _) => "AVX-512 FMA of f32",
    };
    format!("{products}, {} tokens at a time", kernel.rows)
}
