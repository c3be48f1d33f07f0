//! Which kernel each operation uses at a level, in words.

use ir::tensor::Format;

use super::arithmetic::Arithmetic;
use super::attention::tiles::LEAST_ROWS;
use super::cache::Element;
use super::isa::Isa;
use super::tile::Kernel;

/// The most rows of a linear that are looked at: beyond them its kernel stays the same.
const MOST_ROWS: usize = 1024;

/// Operations with the kernel that serves them at `isa`, for `hybrid-exec features`; of linears one line for each range
/// of rows.
pub fn describe(isa: Isa) -> Vec<(String, String)> {
    let lanes = match isa {
        Isa::Portable => "plain Rust",
        Isa::Avx2 | Isa::Avx2Vnni => "vectors of 8 floats",
        Isa::Avx512 | Isa::Avx512Vnni | Isa::Avx512Bf16Vnni | Isa::Amx => "vectors of 16 floats",
    };
    let fused = if isa == Isa::Portable { "" } else { ", FMA" };
    let vectors = format!("{lanes}{fused}");
    let mut rows = vec![("embedding, positions".into(), "copies and conversions of rows".into())];
    rows.push(("norm".into(), vectors.clone()));
    rows.extend(Format::ALL.into_iter().flat_map(|format| linears(isa, format)));
    for (cache, element) in [
        ("f32", Element::F32),
        ("f16", Element::F16),
        ("bf16", Element::Bf16),
        ("i8", Element::Int8),
    ] {
        rows.push((format!("attention, {cache} cache"), attention(isa, element)));
    }
    // Elements that turn together lie apart in most models; neighbours are turned one pair at a time.
    let neighbours = if isa == Isa::Portable { "" } else { "; pairs of neighbours in plain Rust" };
    rows.push(("rotary, in attention".into(), format!("{lanes}{neighbours}")));
    for elementwise in ["activation, gate", "sum, sigmoid gate", "soft cap"] {
        rows.push((elementwise.into(), vectors.clone()));
    }
    rows.push(("router".into(), "plain Rust".into()));
    rows.push(("experts".into(), "linears of the tokens that share one".into()));
    rows.push(("selected rows".into(), "copies of rows".into()));
    rows
}

fn attention(isa: Isa, element: Element) -> String {
    let many = Arithmetic::of_attention(isa, element);
    if many == Arithmetic::AmxBf16 {
        let few = Arithmetic::Avx512Bf16;
        format!("{many} from {LEAST_ROWS} queries and heads on, {few} for fewer")
    } else {
        many.to_string()
    }
}

/// The kernels of a format's linears, by the rows that they are for.
fn linears(isa: Isa, format: Format) -> Vec<(String, String)> {
    let mut ranges: Vec<(usize, String)> = Vec::new();
    for rows in 1..=MOST_ROWS {
        let kernel = linear(isa, format, rows);
        if ranges.last().is_none_or(|(_, last)| *last != kernel) {
            ranges.push((rows, kernel));
        }
    }
    let ends = ranges.iter().skip(1).map(|(first, _)| Some(first - 1)).chain([None]);
    let name = |first: usize, end: Option<usize>| match end {
        None if first == 1 => format!("linear {format}"),
        None => format!("linear {format}, {first} rows and more"),
        Some(end) if end == first => format!("linear {format}, {first} row"),
        Some(end) => format!("linear {format}, {first} to {end} rows"),
    };
    let ends: Vec<Option<usize>> = ends.collect();
    let named = ranges.into_iter().zip(ends);
    named.map(|((first, kernel), end)| (name(first, end), kernel)).collect()
}

fn linear(isa: Isa, format: Format, rows: usize) -> String {
    let arithmetic = Arithmetic::of_linear(isa, format, rows);
    format!("{arithmetic}, {} at a time", Kernel::choose(isa, format, rows).rows)
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
        let tiles = "AMX tiles of bf16 from 16 queries and heads on, AVX-512 dot products of bf16 for fewer";
        check(Isa::Amx, "attention, bf16 cache", tiles);
        check(Isa::Amx, "attention, f16 cache", "AVX-512 FMA of f32");
        check(Isa::Avx2, "attention, i8 cache", "AVX2 products of 16-bit integers");
        check(Isa::Avx2Vnni, "attention, i8 cache", "AVX-VNNI dot products of 8-bit integers");
        check(Isa::Amx, "attention, i8 cache", "AVX-512 VNNI dot products of 8-bit integers");
    }

    #[test]
    fn linears_are_told_by_ranges_of_rows() {
        check(Isa::Portable, "linear q8", "plain Rust, 4 at a time");
        check(Isa::Amx, "linear f32", "AVX-512 FMA of f32, 12 at a time");
        let pairs = "AVX-512 dot products of bf16";
        check(Isa::Avx512Bf16Vnni, "linear bf12, 1 to 32 rows", &format!("{pairs}, 8 at a time"));
        let more = format!("{pairs}, 12 at a time");
        check(Isa::Avx512Bf16Vnni, "linear bf12, 33 rows and more", &more);
        for isa in Isa::ALL {
            let linears: Vec<_> = describe(isa).into_iter().map(|(name, _)| name).collect();
            for format in Format::ALL {
                let name = format!("linear {format}");
                let is_its = |row: &&String| **row == name || row.starts_with(&format!("{name}, "));
                assert!(linears.iter().any(|row| is_its(&row)), "{format} at {isa}");
            }
        }
    }
}
