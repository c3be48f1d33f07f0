//! Two GPUs that sum what both know.

use std::sync::{Barrier, Mutex};
use std::thread;

use half::bf16;
use ir::op::Then;
use ir::tensor::{DType, Format};

use super::*;
use crate::kernels::cpu::testing::Random;
use crate::kernels::gpu::linear::{FLOAT_TOKENS, Linear};
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::matrix::testing::{panels, row_major};
use crate::peers::grant;

const MEMBERS: usize = 2;
/// Small terms are of up to a quarter of a piece.
const EXCHANGE: Exchange = Exchange { piece_bytes: 1 << 20, flagged_bytes: 512 << 10 };

/// Two GPUs that reach each other's memory, if there are.
fn gpus() -> Option<Vec<Gpu>> {
    let gpus = (0..MEMBERS).map(Gpu::cuda).collect::<anyhow::Result<Vec<Gpu>>>();
    let granted = gpus.and_then(|gpus| grant(0, 1).and(grant(1, 0)).map(|()| gpus));
    if granted.is_err() {
        eprintln!("skipped: there are no two GPUs that reach each other's memory");
    }
    granted.ok()
}

/// The exchanges at those addresses.
fn exchanges(addresses: [u64; MEMBERS]) -> Exchanges {
    // SAFETY: every test keeps its exchanges until all launches have ended, or launches nothing.
    unsafe { Exchanges::new(&addresses) }
}

/// Both GPUs, whose exchanges lie at those addresses, at one of the sums of a run.
fn group(addresses: [u64; MEMBERS], rank: usize, turn: &Span, number: u32) -> Group {
    let (exchanges, turn) = (exchanges(addresses), turn.clone());
    Group { exchanges, rank: rank as u32, exchange: EXCHANGE, turn, number }
}

/// Whole numbers, so that sums are exact.
fn term(rank: usize, turn: u32, count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 1000) as f32 + 1000.0 * (rank + 3 * turn as usize) as f32).collect()
}

/// Whole numbers that bf16 holds.
fn narrow_term(rank: usize, turn: u32, count: usize) -> Vec<bf16> {
    let more = 64 * rank + 16 * turn as usize;
    (0..count).map(|i| bf16::from_f32((i % 61 + more) as f32)).collect()
}

/// A sum of f32 to which nothing is added.
fn sum<'a>(term: &'a Span, out: &'a Span, count: usize) -> Sum<'a> {
    Sum { term, of_term: DType::F32, residual: None, out, count }
}

/// One of both GPUs, in a thread of its own.
struct Member<'a> {
    gpu: &'a Gpu,
    rank: usize,
    exchange: Span,
    /// Of both.
    addresses: [u64; MEMBERS],
    barrier: &'a Barrier,
}

/// Lets both GPUs do their part at the same time, once each has an exchange.
fn meet(gpus: &[Gpu], part: impl Fn(&Member<'_>) + Sync) {
    let (addresses, barrier) = (Mutex::new([0_u64; MEMBERS]), Barrier::new(MEMBERS));
    thread::scope(|scope| {
        for (rank, gpu) in gpus.iter().enumerate() {
            let (addresses, barrier, part) = (&addresses, &barrier, &part);
            scope.spawn(move || {
                let exchange = gpu.allocate(EXCHANGE.bytes(MEMBERS) as usize).unwrap();
                gpu.clear_exchange(&exchange).unwrap();
                addresses.lock().unwrap()[rank] = exchange.address().unwrap();
                barrier.wait();
                let addresses = *addresses.lock().unwrap();
                part(&Member { gpu, rank, exchange, addresses, barrier });
            });
        }
    });
}

/// What a member has of a sum, and what it is to get.
struct Known {
    term: Span,
    of_term: DType,
    residual: Option<Span>,
    expected: Vec<f32>,
}

/// Both GPUs make sums of so many numbers in each of some runs, of what `known` says that the GPU of a rank has in a run
/// of the sum at a place.
fn check_sums(
    gpus: &[Gpu],
    runs: u32,
    counts: &[usize],
    known: impl Fn(&Gpu, usize, u32, usize) -> Known + Sync,
) {
    meet(gpus, |&Member { gpu, rank, ref exchange, addresses, barrier }| {
        for run in 1..=runs {
            let turn = gpu.upload(&[run]);
            let known: Vec<Known> = (0..counts.len()).map(|at| known(gpu, rank, run, at)).collect();
            let outs = counts.iter().map(|count| gpu.poisoned(count * size_of::<f32>()));
            let outs: Vec<Span> = outs.collect();
            gpu.sync().unwrap();
            barrier.wait();
            gpu.start_sums(exchange).unwrap();
            for (at, (&count, out)) in counts.iter().zip(&outs).enumerate() {
                let group = group(addresses, rank, &turn, at as u32);
                let Known { term, of_term, residual, .. } = &known[at];
                let (of_term, residual) = (*of_term, residual.as_ref());
                let sum = Sum { term, of_term, residual, out, count };
                gpu.sum_over_peers(&group, &sum).unwrap();
            }
            gpu.flush().unwrap();
            barrier.wait();
            for ((out, &count), known) in outs.iter().zip(counts).zip(&known) {
                assert!(
                    gpu.download::<f32>(out, count) == known.expected,
                    "{count} numbers, run {run}"
                );
            }
            assert_eq!(gpu.lost_member(exchange, run).unwrap(), None);
        }
    });
}

#[test]
fn terms_of_two_members_are_summed_run_after_run() {
    let Some(gpus) = gpus() else { return };
    // One unit's, several cubes', the most with flags; one more; a few pieces with a rest, many; one with flags again.
    let flagged = EXCHANGE.flagged_bytes as usize / 8;
    let counts = [4, 4096, flagged, flagged + 4, 1_000_004, 3_500_008, 4096];
    check_sums(&gpus, 3, &counts, |gpu, rank, run, at| {
        let [a, b] = [0, 1].map(|rank| term(rank, run, counts[at]));
        let expected = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        let term = gpu.upload(&term(rank, run, counts[at]));
        Known { term, of_term: DType::F32, residual: None, expected }
    });
}

#[test]
fn terms_in_16_bits_are_summed_and_each_member_adds_a_residual() {
    let Some(gpus) = gpus() else { return };
    // With flags, a piece, a few pieces with a rest.
    let flagged = EXCHANGE.flagged_bytes as usize / 8;
    let counts = [8, flagged, flagged + 8, 500_008, 1_600_000, 4096];
    check_sums(&gpus, 2, &counts, |gpu, rank, run, at| {
        let count = counts[at];
        // Sums with and without take turns. Not the same on both, so that one added to a term shows.
        let residual = (at % 2 == 0).then(|| term(rank, run, count));
        let added = residual.clone().unwrap_or_else(|| vec![0.0; count]);
        let [a, b] = [0, 1].map(|rank| narrow_term(rank, run, count));
        let terms = a.iter().zip(&b).map(|(a, b)| a.to_f32() + b.to_f32());
        let expected = terms.zip(added).map(|(sum, more)| sum + more).collect();
        let term = gpu.upload(&narrow_term(rank, run, count));
        let residual = residual.map(|residual| gpu.upload(&residual));
        Known { term, of_term: DType::Bf16, residual, expected }
    });
}

#[test]
fn linears_sum_what_they_make() {
    let Some(gpus) = gpus() else { return };
    // In f32 and f16 by rows, in 12 bits for one token and for more, and in blocks: a rest, and more cubes than fit.
    let cases = [
        (Layout::RowMajor, Format::F32, 1, 67),
        (Layout::RowMajor, Format::Bf16, 2, 4096),
        (Layout::Panels, Format::F16, 1, 100),
        (Layout::Panels, Format::Bf12, 1, 4096),
        (Layout::Panels, Format::Bf12, 3, 2048),
        (Layout::Panels, Format::Q8, 1, 16384),
        (Layout::Panels, Format::Q4, 4, 100),
        (Layout::Panels, Format::Q8, 12, 1024),
        (Layout::Panels, Format::Q8, 20, 100),
    ];
    let columns = [512, 256];
    let (alone, wrong) = (Mutex::new([const { Vec::new() }; MEMBERS]), Mutex::new(Vec::new()));
    meet(&gpus, |&Member { gpu, rank, ref exchange, addresses, barrier }| {
        let turn = gpu.upload(&[1_u32]);
        gpu.start_sums(exchange).unwrap();
        gpu.sync().unwrap();
        barrier.wait();
        for (number, (layout, format, tokens, rows)) in cases.into_iter().enumerate() {
            let (columns, seed) = (columns[rank], 3 + rank as u64);
            let sample = match layout {
                Layout::Panels => panels(gpu, format, rows, columns, seed),
                Layout::RowMajor => row_major(gpu, format, rows, columns, seed),
            };
            // Members need not take the same kernel: shares of unlike size, or unlike GPUs, do not.
            let is_narrow =
                tokens > FLOAT_TOKENS || tokens > 2 && rank == 1 && gpu.has_warpgroups();
            // As in plans, there is room for more tokens.
            let room = (tokens + FLOAT_TOKENS) * rows;
            let x = Random(7).floats(tokens * columns);
            let narrow: Vec<bf16> = x.iter().map(|&x| bf16::from_f32(x)).collect();
            let x = if is_narrow { gpu.upload(&narrow) } else { gpu.upload(&x) };
            let order = gpu.right_operands(&sample.matrix, tokens).filter(|_| is_narrow);
            let x = order.map_or(x.clone(), |order| gpu.ordered(&x, [tokens, columns], order));
            let residual = gpu.upload(&Random(9).floats(room));
            let multiply = |sum: Option<&Group>| -> Vec<f32> {
                let out = gpu.poisoned(room * size_of::<f32>());
                let linear = Linear {
                    x: &x,
                    element: if is_narrow { DType::Bf16 } else { DType::F32 },
                    order,
                    tokens,
                    norm: None,
                    matrices: &[&sample.matrix],
                    biases: &[None],
                    then: Then::Nothing,
                    residual: (rank == 0).then_some(&residual),
                    outputs: &[&out],
                    made: DType::F32,
                    made_order: None,
                    ahead: &[],
                    sum,
                };
                gpu.linear(&linear).unwrap();
                gpu.download(&out, tokens * rows)
            };
            let term = multiply(None);
            alone.lock().unwrap()[rank] = term;
            barrier.wait();
            let sums = multiply(Some(&group(addresses, rank, &turn, number as u32)));
            let terms = alone.lock().unwrap();
            let expected: Vec<f32> = terms[0].iter().zip(&terms[1]).map(|(a, b)| a + b).collect();
            drop(terms);
            // A member that panics here would be waited for.
            if sums != expected {
                let case = format!("{format} {layout:?}, {tokens} tokens, {rows} rows");
                wrong.lock().unwrap().push(case);
            }
            barrier.wait();
        }
        assert_eq!(gpu.lost_member(exchange, 1).unwrap(), None);
    });
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn what_does_not_come_in_whole_vectors_is_refused() {
    let Some(gpu) = crate::kernels::gpu::testing::gpu() else { return };
    let span = gpu.upload(&[0_u32; 64]);
    let refusal = |number, count| {
        let group = group([0; MEMBERS], 0, &span, number);
        let of = |of_term| Sum { of_term, ..sum(&span, &span, count) };
        [DType::F32, DType::Bf16]
            .map(|term| gpu.sum_over_peers(&group, &of(term)).unwrap_err().to_string())
    };
    let together = [4, 8].map(|numbers| format!("GPUs sum {numbers} numbers at a time, not 6"));
    assert_eq!(refusal(0, 6), together);
    assert_eq!(refusal(SUMS - 1, 8), ["a run has more than 8191 sums over GPUs"; 2]);
}

#[test]
fn who_waits_for_a_member_that_left_does_not_wait_long() {
    let Some(gpus) = gpus() else { return };
    let bytes = EXCHANGE.bytes(MEMBERS) as usize;
    let spans = gpus.iter().map(|gpu| gpu.allocate(bytes).unwrap()).collect::<Vec<_>>();
    gpus.iter().zip(&spans).for_each(|(gpu, exchange)| gpu.clear_exchange(exchange).unwrap());
    let addresses = spans.iter().map(|exchange| exchange.address().unwrap());
    let addresses: [u64; MEMBERS] = addresses.collect::<Vec<_>>().try_into().unwrap();
    let exchanges = exchanges(addresses);
    gpus[1].leave_sums(&exchanges, 0);
    gpus[1].sync().unwrap();
    // A small term and one of several pieces: all members learn that the second did not come.
    for (run, count) in [(1, 64), (2, 1_000_000)] {
        let gpu = &gpus[0];
        let (turn, term) = (gpu.upload(&[run]), gpu.upload(&term(0, run, count)));
        let out = gpu.upload(&vec![0.0_f32; count]);
        let group = group(addresses, 0, &turn, 0);
        gpu.start_sums(&spans[0]).unwrap();
        gpu.sum_over_peers(&group, &sum(&term, &out, count)).unwrap();
        gpu.flush().unwrap();
        gpus[1].leave_sums(&exchanges, run);
        // A member that meets the others for the first time takes nothing back.
        gpus[1].leave_sums(&exchanges, 0);
        gpus[1].flush().unwrap();
        let start = std::time::Instant::now();
        assert!(gpu.download::<f32>(&out, count).iter().all(|sum| sum.is_nan()));
        assert!(start.elapsed().as_secs() < 5, "half of what patience takes");
        for (gpu, exchange) in gpus.iter().zip(&spans) {
            assert_eq!(gpu.lost_member(exchange, run).unwrap(), Some(1));
            assert_eq!(gpu.lost_member(exchange, run + 1).unwrap(), None);
        }
    }
}
