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
    let lanes = match isa {
        Isa::Portable => "plain Rust",
        Isa::Avx2 | Isa::Avx2Vnni => "vectors of 8 floats",
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => "vectors of 16 floats",
    };
    let vectors: String = if isa == Isa::Portable { lanes.into() } else { format!("{lanes}, FMA") };
    rows.push(("experts".into(), "those of their formats' linears".into()));
    rows.push(("attention, f32 and f16 cache".into(), vectors.clone()));
    rows.push(("attention, bf16 cache".into(), bf16_attention(isa).unwrap_or(&vectors).into()));
    rows.push(("attention, i8 cache".into(), i8_attention(isa).into()));
    // Elements that turn together lie apart in most models; neighbours are turned one pair at a time.
    let neighbours = if isa == Isa::Portable { "" } else { "; pairs of neighbours in plain Rust" };
    rows.push(("rotary".into(), format!("{lanes}{neighbours}")));
    rows.push(("norm, activation".into(), vectors));
    rows.push(("router".into(), "plain Rust".into()));
    rows.push(("cache, rows of tables".into(), "copies and conversions in plain Rust".into()));
    rows
}

/// Where products with a cache in bf16 are not those of floats that it is widened to.
fn bf16_attention(isa: Isa) -> Option<&'static str> {
    match isa {
        Isa::Portable | Isa::Avx2 | Isa::Avx2Vnni | Isa::Avx512 | Isa::Avx512Vnni => None,
        Isa::Avx512Bf16Vnni => Some("AVX-512 dot products of bf16"),
        Isa::Amx => Some("AMX tiles of bf16 for many queries, AVX-512 dot products for few"),
    }
}

fn i8_attention(isa: Isa) -> &'static str {
    match isa {
        Isa::Portable => "plain Rust",
        Isa::Avx2 => "AVX2 products of 16-bit integers",
        Isa::Avx2Vnni => "AVX-VNNI dot products of 8-bit integers",
        Isa::Avx512 => "AVX-512 products of 16-bit integers",
        Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => {
            "AVX-512 VNNI dot products of 8-bit integers"
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(isa: Isa, operation: &str, expected: &str) {
        let rows = describe(isa);
        let kernel = rows.iter().find(|(name, _)| name == operation).map(|(_, kernel)| kernel);
        assert_eq!(kernel.map(String::as_str), Some(expected), "{operation} at {isa}");
    }

    #[test]
    fn attention_is_told_by_what_the_cache_holds() {
        check(Isa::Portable, "attention, bf16 cache", "plain Rust");
        check(Isa::Avx2Vnni, "attention, bf16 cache", "vectors of 8 floats, FMA");
        check(Isa::Avx512Bf16Vnni, "attention, bf16 cache", "AVX-512 dot products of bf16");
        check(Isa::Amx, "attention, f32 and f16 cache", "vectors of 16 floats, FMA");
        check(Isa::Avx2, "attention, i8 cache", "AVX2 products of 16-bit integers");
        check(Isa::Avx2Vnni, "attention, i8 cache", "AVX-VNNI dot products of 8-bit integers");
        check(Isa::Amx, "attention, i8 cache", "AVX-512 VNNI dot products of 8-bit integers");
    }
}
