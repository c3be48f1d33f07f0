//! Nominal speeds: what a device of a kind reaches, until a calibration measures it.

use ir::machine::{LinearRate, RatePoint, RateSource, Rates};
use ir::tensor::Format;
use ir::workspace::{LIBRARY_BYTES, MAX_PACKED_ROWS, MAX_PLANE_ROWS};

use crate::gpu::Gpu;

/// One core reads 17 GB/s (Emerald Rapids) to 32 GB/s (two cores of Zen 4 together 64).
const CORE_BYTES_PER_SEC: f64 = 28e9;
/// Sixteen Emerald Rapids cores read 108 to 124 GB/s together; a full socket has twice the channels in use.
const NODE_BYTES_PER_SEC: f64 = 220e9;
/// Dispatch of a team that spins, with one barrier.
const TEAM_STEP_NANOS: f64 = 2_000.0;
/// A captured launch takes 2 µs on an H200 beside what it reads; one that is not captured, 5 µs of its host.
const LAUNCH_NANOS: f64 = 2_000.0;
/// One token's attention beside its cache and beyond a launch, as measured on an H200: its parts are merged.
const ATTENTION_NANOS: f64 = 3_900.0;
/// A context takes 527 MiB on an H200 (driver 580, CUDA 13.0) and the vendor library's code 66 MiB; the rest is for
/// kernels of ours.
pub(crate) const GPU_RESERVED_BYTES: u64 = 640 << 20;
/// What the executor gives cuBLASLt.
pub(crate) const GPU_LIBRARY_BYTES: u64 = LIBRARY_BYTES;
/// As 32 graphs of 512, of 1024 and of 2048 launches take on an H100 (driver 580, CUDA 13.0).
pub(crate) const GPU_LAUNCH_BYTES: u64 = 2560;
/// Sixteen Emerald Rapids cores read 97 GB/s beside a copy to an H200, and about 110 GB/s alone; the copy runs at 48
/// instead of 55 GB/s.
const BESIDE_FETCH: f64 = 97.0 / 110.0;
/// Share of the arithmetic peak that good kernels reach: 85 % of bf16 on Zen 4, 80 % of dense bf16 on an H200.
const REACHED: f64 = 0.8;

/// Some cores of a node.
///
/// `cores` of the node's `node_cores` share its bandwidth evenly.
pub(crate) fn node_rates(cores: u32, node_cores: u32, flags: &[String]) -> Rates {
    let (cores, node_cores) = (f64::from(cores), f64::from(node_cores));
    let node_bytes = (CORE_BYTES_PER_SEC * node_cores).min(NODE_BYTES_PER_SEC);
    let read_bytes_per_sec = node_bytes * (cores / node_cores).min(1.0);
    let has = |flag: &str| flags.iter().any(|known| known == flag);
    // Operations a second of one core at 2.4 to 3.7 GHz. Zen 4 measured: 117 G in f32, twice that in bf16 dot
    // products, four times in int8.
    let f32 = if has("avx512f") {
        117e9
    } else if has("avx2") {
        80e9
    } else {
        // Four lanes, two units: NEON and SSE.
        40e9
    };
    let bf16 = if has("amx_bf16") {
        // Sixteen Emerald Rapids cores are to reach 10 T together.
        800e9
    } else if has("avx512_bf16") {
        2.0 * f32
    } else {
        f32
    };
    // Without AVX-512, too, blocks multiply as bytes: kernels reach 122 G in 8 bits and 196 G in 4 bits on a core of
    // Zen 3 whose f32 reaches 97 G, and 2.5 times its f32 with AVX-VNNI.
    let (q8, q4) = if has("amx_int8") {
        (1600e9, 1600e9)
    } else if has("avx512_vnni") {
        (4.0 * f32, 4.0 * f32)
    } else if has("avx_vnni") {
        (2.5 * f32, 2.5 * f32)
    } else if has("avx2") {
        (1.25 * f32, 2.0 * f32)
    } else {
        (f32, f32)
    };
    let curve = |format, peak: f64| linear(format, read_bytes_per_sec, peak * cores * REACHED);
    Rates {
        source: RateSource::Nominal,
        read_bytes_per_sec,
        step_nanos: TEAM_STEP_NANOS,
        linear: vec![
            curve(Format::F32, f32),
            curve(Format::F16, f32),
            curve(Format::Bf16, bf16),
            curve(Format::Bf12, bf16),
            curve(Format::Q8, q8),
            curve(Format::Q4, q4),
        ],
        // Attention scores go through exponentials: half of what a plain product reaches.
        attention_flops_per_sec: f32 * cores * REACHED / 2.0,
        attention_nanos: 0.0,
        prompt_score_nanos: 0.0,
        score_nanos: 0.0,
        experts: Vec::new(),
        shared_experts: Vec::new(),
        cache_bytes_per_sec: read_bytes_per_sec * REACHED,
        other_caches: Vec::new(),
        beside_fetch: BESIDE_FETCH,
    }
}

/// Bytes and dense bf16 operations a second, from data sheets; the H200's bytes are a measured copy.
const GPUS: &[(&str, f64, f64)] = &[
    ("B200", 8.0e12, 2250e12),
    ("H200", 4.25e12, 989e12),
    ("H100 PCIe", 2.0e12, 756e12),
    ("H100", 3.35e12, 989e12),
    ("A100-SXM4-80GB", 2.04e12, 312e12),
    ("A100 80GB", 1.94e12, 312e12),
    ("A100", 1.56e12, 312e12),
    ("L40S", 0.86e12, 362e12),
    ("L40", 0.86e12, 181e12),
    ("L4", 0.3e12, 121e12),
    ("A40", 0.7e12, 150e12),
    ("A10", 0.6e12, 125e12),
    ("RTX A6000", 0.77e12, 155e12),
    ("RTX 6000 Ada", 0.96e12, 364e12),
    ("RTX 5090", 1.79e12, 210e12),
    ("RTX 4090", 1.01e12, 165e12),
    ("RTX 4080", 0.72e12, 97e12),
    ("RTX 3090", 0.94e12, 71e12),
    ("RTX 3080", 0.76e12, 60e12),
    ("V100", 0.9e12, 112e12),
    ("T4", 0.32e12, 65e12),
];

/// Part of what products of many rows reach with the vendor's library that a GPU's own kernels reach, by its `name`: of
/// packed matrices seven tenths on an H200, a third by kernels of other GPUs there; of others in bf16 half on Hopper,
/// and a ninth where that is 32 rows at a time; f16 is multiplied without tensor cores.
fn own_part(format: Format, name: &str) -> f64 {
    match format {
        Format::F32 => 1.0,
        Format::F16 => 1.0 / 15.0,
        Format::Bf16 if is_hopper(name) => 1.0 / 2.0,
        Format::Bf16 => 1.0 / 9.0,
        Format::Bf12 | Format::Q8 | Format::Q4 if is_hopper(name) => 0.7,
        Format::Bf12 | Format::Q8 | Format::Q4 => 1.0 / 3.0,
    }
}

/// Whether a GPU of that name has the matrix instructions of warpgroups.
pub(crate) fn is_hopper(name: &str) -> bool {
    // The second is found in H200 and GH200, too.
    ["H100", "H20", "H800"].iter().any(|hopper| name.contains(hopper))
}

/// Whether a GPU's name holds that of a model: `A100` in `NVIDIA A100-SXM4-40GB`, but not in `RTX A1000`.
fn is_named(gpu: &str, model: &str) -> bool {
    let mut behind = gpu.match_indices(model).map(|(at, _)| &gpu[at + model.len()..]);
    behind.any(|behind| !behind.starts_with(|next: char| next.is_ascii_digit()))
}

/// A GPU, by its name; by its clocks where the name is not known.
pub(crate) fn gpu_rates(gpu: &Gpu, has_library: bool) -> Rates {
    let known = GPUS.iter().find(|(name, _, _)| is_named(&gpu.name, name));
    let (bytes, bf16) = match known {
        Some(&(_, bytes, bf16)) => (bytes, bf16),
        None => (
            // The slowest of the table where the driver does not tell.
            gpu.memory_bytes_per_sec.unwrap_or(0.3e12),
            // Each core's multiply-adds, and four times that in tensor cores (Ampere and Ada with bf16).
            gpu.core_hertz.map_or(65e12, |hertz| hertz * 2.0 * 4.0),
        ),
    };
    // Streaming kernels reach 87 % of the copy rate on an H200.
    let read_bytes_per_sec = bytes * 0.87;
    let library = bf16 * REACHED;
    let own = |format: Format| library * own_part(format, &gpu.name);
    let reached = |format: Format| if has_library { library } else { own(format) };
    let curve = |format, peak: f64| linear(format, read_bytes_per_sec, peak);
    let most_rows = if is_hopper(&gpu.name) { MAX_PACKED_ROWS } else { MAX_PLANE_ROWS };
    let unpacked = has_library.then_some((most_rows, library));
    let panels = |format, bytes| packed(format, bytes, own(format), unpacked);
    let blocks = |format| panels(format, read_bytes_per_sec);
    Rates {
        source: RateSource::Nominal,
        read_bytes_per_sec,
        step_nanos: LAUNCH_NANOS,
        linear: vec![
            // Without tensor cores: a fifteenth on an H200.
            curve(Format::F32, bf16 * REACHED / 15.0),
            curve(Format::F16, reached(Format::F16)),
            curve(Format::Bf16, reached(Format::Bf16)),
            // On an H200 one row takes 0.84 of the time in 16 bits.
            panels(Format::Bf12, read_bytes_per_sec * 0.9),
            blocks(Format::Q8),
            blocks(Format::Q4),
        ],
        // A vendor's attention reaches 411 of 989 T on an H200.
        attention_flops_per_sec: bf16 * 0.4,
        attention_nanos: ATTENTION_NANOS,
        prompt_score_nanos: 0.0,
        score_nanos: 0.0,
        experts: Vec::new(),
        shared_experts: Vec::new(),
        cache_bytes_per_sec: read_bytes_per_sec * REACHED,
        other_caches: Vec::new(),
        beside_fetch: 1.0,
    }
}

/// Bound by memory for few tokens, by arithmetic for many; the roofline's knee and a point beyond it.
fn linear(format: Format, bytes_per_sec: f64, ops_per_sec: f64) -> LinearRate {
    /// Tokens of the last point: beyond it the time grows with the tokens.
    const MANY_TOKENS: u32 = 512;
    let weight_bytes = format.bytes(1, 1024) as f64 / 1024.0;
    let at = |tokens: u32| {
        let arithmetic = ops_per_sec / (2.0 * f64::from(tokens));
        let weights_per_sec = arithmetic.min(bytes_per_sec / weight_bytes);
        RatePoint { tokens, weights_per_sec, nanos: 0.0 }
    };
    let knee = (ops_per_sec * weight_bytes / (2.0 * bytes_per_sec)) as u32;
    let mut tokens = vec![1, knee.clamp(2, MANY_TOKENS - 1), MANY_TOKENS];
    tokens.dedup();
    LinearRate { format, points: tokens.into_iter().map(at).collect() }
}

/// The same of a GPU's packed matrices. Where there is a vendor's library, `library` says up to how many rows they are
/// multiplied with as they lie, and how fast it is: for more rows they are first read and written in 16 bits.
fn packed(
    format: Format,
    bytes_per_sec: f64,
    ops_per_sec: f64,
    library: Option<(u32, f64)>,
) -> LinearRate {
    /// From hundreds of rows on; between two points the time grows evenly.
    const MANY_ROWS: [u32; 3] = [512, 1024, 2048];
    let packed_bytes = format.bytes(1, 1024) as f64 / 1024.0;
    let mut rate = linear(format, bytes_per_sec, ops_per_sec);
    let Some((most_rows, library_ops_per_sec)) = library else { return rate };
    let point =
        |tokens, seconds: f64| RatePoint { tokens, weights_per_sec: 1.0 / seconds, nanos: 0.0 };
    let arithmetic = |tokens: u32, ops_per_sec: f64| 2.0 * f64::from(tokens) / ops_per_sec;
    rate.points.retain(|point| point.tokens < most_rows);
    let as_it_lies = (packed_bytes / bytes_per_sec).max(arithmetic(most_rows, ops_per_sec));
    rate.points.push(point(most_rows, as_it_lies));
    let unpacked_bytes = packed_bytes + Format::Bf16.bytes(1, 1024) as f64 / 1024.0;
    let more = MANY_ROWS.into_iter().filter(|&tokens| tokens > most_rows + 1);
    rate.points.extend([most_rows + 1].into_iter().chain(more).map(|tokens| {
        let seconds = unpacked_bytes / bytes_per_sec + arithmetic(tokens, library_ops_per_sec);
        point(tokens, seconds)
    }));
    rate
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tokens_are_bound_by_memory_and_many_by_arithmetic() {
        let rate = linear(Format::Bf16, 60e9, 400e9);
        assert!((rate.weights_per_sec(1) - 30e9).abs() < 1.0);
        assert!((rate.weights_per_sec(512) - 400e9 / 1024.0).abs() < 1.0);
        assert!(rate.weights_per_sec(1024) < rate.weights_per_sec(512));
    }

    #[test]
    fn many_tokens_pay_for_unpacking_once() {
        let rows = linear(Format::Q4, 3.7e12, 800e12);
        let packed = packed(Format::Q4, 3.7e12, 500e12, Some((256, 800e12)));
        let seconds = |rate: &LinearRate, tokens| 1.0 / rate.weights_per_sec(tokens);
        assert_eq!(seconds(&packed, 1), seconds(&rows, 1));
        // No GPU multiplies faster than its arithmetic, however few bytes it reads.
        for slow in [50e12, 800e12] {
            let packed = super::packed(Format::Q4, 0.8e12, slow, Some((256, slow)));
            for tokens in [19, 48, 64, 256] {
                let ops = 2.0 * f64::from(tokens) * packed.weights_per_sec(tokens);
                assert!(ops <= slow * 1.001, "{ops} of {slow}");
            }
        }
        // 0.56 bytes are read and 2 written.
        for tokens in [512, 2048] {
            let unpacking = seconds(&packed, tokens) - 2.0 * f64::from(tokens) / 800e12;
            assert!((unpacking * 3.7e12 - 2.5625).abs() < 1e-6, "{unpacking}");
        }
    }

    #[test]
    fn without_the_library_prompts_are_slower_and_least_so_on_hopper() {
        let gpu = |name: &str| Gpu {
            ordinal: 0,
            name: name.to_owned(),
            memory_bytes: 80 << 30,
            memory_bytes_per_sec: None,
            core_hertz: None,
            pcie_bytes_per_sec: 50e9,
            has_nvlink: false,
        };
        let lost = |name, format| {
            let rate = |has_library| {
                let rates = gpu_rates(&gpu(name), has_library);
                let of_format = rates.linear.iter().find(|rate| rate.format == format);
                of_format.unwrap().weights_per_sec(2048)
            };
            rate(true) / rate(false)
        };
        let gpus = [("NVIDIA H100 80GB HBM3", 2.0, 1.0..1.5), ("NVIDIA L40S", 9.0, 2.0..3.1)];
        for (name, bf16, q4) in gpus {
            assert!((lost(name, Format::Bf16) - bf16).abs() < 0.1, "{name}");
            assert!(q4.contains(&lost(name, Format::Q4)), "{name}");
            assert_eq!(lost(name, Format::F32), 1.0);
        }
    }

    #[test]
    fn other_models_whose_names_go_on_with_digits_are_not_taken_for_known_ones() {
        let model = |gpu: &str| GPUS.iter().find(|(name, ..)| is_named(gpu, name)).map(|gpu| gpu.0);
        for gpu in ["NVIDIA RTX A1000", "NVIDIA RTX A4000", "NVIDIA T400 4GB", "NVIDIA L400"] {
            assert_eq!(model(gpu), None, "{gpu}");
        }
        assert_eq!(model("NVIDIA GH200 480GB"), Some("H200"));
        assert_eq!(model("NVIDIA A10G"), Some("A10"));
        assert_eq!(model("NVIDIA A100-SXM4-40GB"), Some("A100"));
        assert_eq!(model("NVIDIA L40S"), Some("L40S"));
    }

    #[test]
    fn a_longer_name_is_found_before_its_beginning() {
        for (index, (name, _, _)) in GPUS.iter().enumerate() {
            let earlier = GPUS[..index].iter().find(|(earlier, _, _)| name.contains(earlier));
            assert_eq!(earlier, None, "{name} is never reached");
        }
    }
}
