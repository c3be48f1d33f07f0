//! Which kernel each operation uses at a level, in words.

use ir::tensor::Format;

use super::arithmetic::Arithmetic;
use super::cache::Element;
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
    rows.push(("attention, f32 and f16 cache".into(), attention(isa, Element::F32)));
    rows.push(("attention, bf16 cache".into(), attention(isa, Element::Bf16)));
    rows.push(("attention, i8 cache".into(), attention(isa, Element::Int8)));
    // Elements that turn together lie apart in most models; neighbours are turned one pair at a time.
    let neighbours = if isa == Isa::Portable { "" } else { "; pairs of neighbours in plain Rust" };
    rows.push(("rotary".into(), format!("{lanes}{neighbours}")));
    rows.push(("norm, activation".into(), vectors));
    rows.push(("router".into(), "plain Rust".into()));
    rows.push(("cache, rows of tables".into(), "copies and conversions in plain Rust".into()));
    rows
}

fn attention(isa: Isa, element: Element) -> String {
    let many = Arithmetic::of_attention(isa, element);
    if many == Arithmetic::AmxBf16 {
        format!("{many} for many queries, {} for few", Arithmetic::Avx512Bf16)
    } else {
        many.to_string()
    }
}

fn linear(isa: Isa, format: Format, tokens: usize) -> String {
    let arithmetic = Arithmetic::of_linear(isa, format, tokens);
    format!("{arithmetic}, {} tokens at a time", Kernel::choose(isa, format, tokens).rows)
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
        check(Isa::Avx2Vnni, "attention, bf16 cache", "AVX2 FMA of f32");
        check(Isa::Avx512Bf16Vnni, "attention, bf16 cache", "AVX-512 dot products of bf16");
        let tiles = "AMX tiles of bf16 for many queries, AVX-512 dot products of bf16 for few";
        check(Isa::Amx, "attention, bf16 cache", tiles);
        check(Isa::Amx, "attention, f32 and f16 cache", "AVX-512 FMA of f32");
        check(Isa::Avx2, "attention, i8 cache", "AVX2 products of 16-bit integers");
        check(Isa::Avx2Vnni, "attention, i8 cache", "AVX-VNNI dot products of 8-bit integers");
        check(Isa::Amx, "attention, i8 cache", "AVX-512 VNNI dot products of 8-bit integers");
    }
}
