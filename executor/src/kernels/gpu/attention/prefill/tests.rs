use ir::tensor::DType;

use super::*;
use crate::kernels::gpu::attention::testing::*;
use crate::kernels::gpu::testing::gpu;

fn check(attention: &Attention, run: &Run, what: &str) {
    let Some(gpu) = gpu() else { return };
    check_with(&gpu, attention, run, DType::F32, what);
    check_with(&gpu, attention, run, DType::F16, what);
    if gpu.multiplies(DType::Bf16) {
        check_with(&gpu, attention, run, DType::Bf16, what);
    } else {
        eprintln!("skipped {what} with matrix instructions: the device has none");
    }
}

fn check_with(gpu: &Gpu, attention: &Attention, run: &Run, element: DType, what: &str) {
    let cached = Cached::filled(gpu, run, attention, element);
    let count = run.rows() * (attention.heads * attention.head_dim) as usize;
    let queries: Vec<f32> = noise(count, 9).iter().map(|q| q * 4.0).collect();
    let on_device = run.upload(gpu);
    let (cache, tokens) = (cached.cache(), on_device.tokens());
    let call = Prefill { attention, cache, tokens, queries: &gpu.upload(&queries) };
    let expected = reference(attention, run, &cached, &queries);
    let assert_close = |out: &Span, tolerance, how: &str| {
        let what = format!("{what}, {element:?}, {how}");
        let actual: Vec<f32> = gpu.download(out, count);
        assert_close(&actual, &expected, tolerance, &what);
        assert!(actual[expected.len()..].iter().all(|x| x.is_nan()), "{what}: padding was written");
    };
    let out = gpu.poisoned(count * 4);
    gpu.prefill_portable(&call, &out);
    assert_close(&out, 2e-5, "portable");

    // Where matrix instructions multiply them, queries and weights are rounded as the cache's elements are.
    let tolerance = if element == DType::Bf16 { 2e-2 } else { 4e-3 };
    let out = gpu.poisoned(count * 4);
    gpu.prefill(&call, &out);
    assert_close(&out, tolerance, "as dispatched");
    if matrix::serves(attention.head_dim) && gpu.multiplies(element) {
        for (stacks, planes) in [(1, 2), (1, 4), (1, 8), (2, 1), (2, 4)] {
            let step = matrix::Step::of(attention.head_dim, stacks, planes);
            let fits = step.bytes() <= gpu.client.properties().hardware.max_shared_memory_size;
            // Two stacks of longer heads have more sums than a unit has registers.
            if fits && (stacks == 1 || attention.head_dim <= 128) {
                let out = gpu.poisoned(count * 4);
                gpu.prefill_matrix(&call, &out, step);
                assert_close(&out, tolerance, &format!("{planes} planes of {stacks} stacks"));
            }
        }
    }
}

#[test]
fn few_tiles_are_cut_smaller() {
    // Heads of 128 on 132 processors with 228 KiB of shared memory each: 64 and 128 rows of one stack, then of two.
    let planes = |cubes| {
        let step = matrix::Step::new(128, 228 << 10, cubes, 132);
        [step.rows(), step.planes()]
    };
    assert_eq!([1, 66].map(planes), [[64, 4]; 2]);
    assert_eq!([67, 264].map(planes), [[128, 8]; 2]);
    assert_eq!(planes(265), [128, 4]);
    // Longer heads leave registers for one stack.
    assert_eq!(matrix::Step::new(256, 228 << 10, 265, 132).planes(), 8);
}

#[test]
fn tokens_see_their_own_sequence_up_to_themselves() {
    let run = Run::new(&[(0, 70), (99, 1), (15, 64), (0, 3), (16, 165)]).padded(5);
    check(&plain(4, 2, 64), &run, "sequences");
}

#[test]
fn heads_have_many_sizes() {
    let run = Run::new(&[(40, 9), (77, 133)]);
    for head_dim in [4, 16, 32, 48, 80, 96, 128, 256] {
        check(&plain(2, 1, head_dim), &run, &format!("{head_dim}"));
    }
}

#[test]
fn a_split_may_cut_a_group() {
    let run = Run::new(&[(33, 5), (64, 30)]);
    let cut = Attention { group: 4, first_head: 3, kv_heads: 3, ..plain(6, 1, 32) };
    check(&cut, &run, "cut group");
}

#[test]
fn windows_hide_earlier_tokens() {
    let run = Run::new(&[(5, 2), (31, 40), (200, 100), (0, 290)]);
    for window in [1, 7, 32, 100] {
        for (kv_heads, head_dim) in [(2, 32), (4, 16)] {
            let attention = Attention { window: Some(window), ..plain(4, kv_heads, head_dim) };
            check(&attention, &run, &format!("window {window}, heads of {head_dim}"));
        }
    }
    let one = Run::new(&[(0, 65)]);
    check(&Attention { window: Some(24), ..plain(4, 4, 16) }, &one, "a window of 24");
}

#[test]
fn scores_are_capped() {
    let run = Run::new(&[(50, 20), (3, 70)]);
    let attention = Attention { soft_cap: Some(1.5), scale: 0.7, ..plain(4, 2, 32) };
    check(&attention, &run, "cap");
}

#[test]
fn sequences_that_pad_a_run_have_no_tiles() {
    let run = Run::new(&[(0, 0), (3, 70), (0, 0), (1, 2)]);
    check(&plain(2, 2, 32), &run, "empty sequences");
}
