//! Two GPUs that sum what both know.

use std::sync::{Barrier, Mutex};
use std::thread;

use ir::workspace::exchange_bytes;

use super::*;
use crate::peers::grant;

const MEMBERS: usize = 2;
const PIECE_BYTES: usize = 1 << 20;

/// Whole numbers, so that sums are exact.
fn term(rank: usize, turn: u32, count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 1000) as f32 + 1000.0 * (rank + 3 * turn as usize) as f32).collect()
}

#[test]
fn terms_of_two_members_are_summed_run_after_run() {
    let gpus = (0..MEMBERS).map(Gpu::cuda).collect::<anyhow::Result<Vec<Gpu>>>();
    let Ok(gpus) = gpus.and_then(|gpus| grant(0, 1).and(grant(1, 0)).map(|()| gpus)) else {
        eprintln!("skipped: there are no two GPUs that reach each other's memory");
        return;
    };
    // One unit's, several cubes', the most with flags; one more; a few pieces with a rest, many; one with flags again.
    let flagged = exchange_flagged_bytes(PIECE_BYTES as u64) as usize / 8;
    let counts = [4, 4096, flagged, flagged + 4, 1_000_004, 3_500_008, 4096];
    let (addresses, barrier) = (Mutex::new([0_u64; MEMBERS]), Barrier::new(MEMBERS));
    let member = |rank: usize| {
        let gpu = &gpus[rank];
        let bytes = exchange_bytes(MEMBERS, PIECE_BYTES as u64) as usize;
        let exchange = gpu.allocate(bytes).unwrap();
        gpu.clear_exchange(&exchange).unwrap();
        addresses.lock().unwrap()[rank] = exchange.address().unwrap();
        barrier.wait();
        let table = gpu.upload(&*addresses.lock().unwrap());
        for number in 1..=3 {
            let turn = gpu.upload(&[number]);
            let terms = counts.map(|count| gpu.upload(&term(rank, number, count)));
            let outs = counts.map(|count| gpu.poisoned(count * size_of::<f32>()));
            gpu.sync().unwrap();
            barrier.wait();
            gpu.start_sums(&exchange).unwrap();
            for (i, count) in (0..).zip(counts) {
                let group = Group {
                    addresses: &table,
                    members: MEMBERS as u32,
                    rank: rank as u32,
                    piece_bytes: PIECE_BYTES,
                    turn: &turn,
                    number: i as u32,
                };
                gpu.sum_over_peers(&group, &terms[i], &outs[i], count).unwrap();
            }
            gpu.flush().unwrap();
            barrier.wait();
            for (out, count) in outs.iter().zip(counts) {
                let others = term(0, number, count).into_iter().zip(term(1, number, count));
                let expected: Vec<f32> = others.map(|(a, b)| a + b).collect();
                assert!(
                    gpu.download::<f32>(out, count) == expected,
                    "{count} numbers, run {number}"
                );
            }
            assert_eq!(gpu.lost_member(&exchange, number).unwrap(), None);
        }
    };
    thread::scope(|scope| {
        for rank in 0..MEMBERS {
            let member = &member;
            scope.spawn(move || member(rank));
        }
    });
}

#[test]
fn what_does_not_come_in_fours_is_refused() {
    let Some(gpu) = crate::kernels::gpu::testing::gpu() else { return };
    let span = gpu.upload(&[0_u32; 64]);
    let group = |number| Group {
        addresses: &span,
        members: 2,
        rank: 0,
        piece_bytes: PIECE_BYTES,
        turn: &span,
        number,
    };
    let refusal = |number, count| {
        gpu.sum_over_peers(&group(number), &span, &span, count).unwrap_err().to_string()
    };
    assert_eq!(refusal(0, 6), "GPUs sum numbers in fours, not 6");
    assert_eq!(refusal(SUMS - 1, 8), "a run has more than 8191 sums over GPUs");
}

#[test]
fn who_waits_for_a_member_that_left_does_not_wait_long() {
    let gpus = (0..MEMBERS).map(Gpu::cuda).collect::<anyhow::Result<Vec<Gpu>>>();
    let Ok(gpus) = gpus.and_then(|gpus| grant(0, 1).and(grant(1, 0)).map(|()| gpus)) else {
        eprintln!("skipped: there are no two GPUs that reach each other's memory");
        return;
    };
    let bytes = exchange_bytes(MEMBERS, PIECE_BYTES as u64) as usize;
    let exchanges = gpus.iter().map(|gpu| gpu.allocate(bytes).unwrap()).collect::<Vec<_>>();
    gpus.iter().zip(&exchanges).for_each(|(gpu, exchange)| gpu.clear_exchange(exchange).unwrap());
    let addresses = exchanges.iter().map(|exchange| exchange.address().unwrap());
    let addresses = addresses.collect::<Vec<_>>();
    let [table, others] = [0, 1].map(|gpu: usize| gpus[gpu].upload(&addresses));
    gpus[1].leave_sums(&others, MEMBERS as u32, 0);
    gpus[1].sync().unwrap();
    // A small term and one of several pieces: all members learn that the second did not come.
    for (run, count) in [(1, 64), (2, 1_000_000)] {
        let gpu = &gpus[0];
        let (turn, term) = (gpu.upload(&[run]), gpu.upload(&term(0, run, count)));
        let out = gpu.upload(&vec![0.0_f32; count]);
        let group = Group {
            addresses: &table,
            members: MEMBERS as u32,
            rank: 0,
            piece_bytes: PIECE_BYTES,
            turn: &turn,
            number: 0,
        };
        gpu.start_sums(&exchanges[0]).unwrap();
        gpu.sum_over_peers(&group, &term, &out, count).unwrap();
        gpu.flush().unwrap();
        gpus[1].leave_sums(&others, MEMBERS as u32, run);
        gpus[1].flush().unwrap();
        let start = std::time::Instant::now();
        assert!(gpu.download::<f32>(&out, count).iter().all(|sum| sum.is_nan()));
        assert!(start.elapsed().as_secs() < 5, "half of what patience takes");
        for (gpu, exchange) in gpus.iter().zip(&exchanges) {
            assert_eq!(gpu.lost_member(exchange, run).unwrap(), Some(1));
            assert_eq!(gpu.lost_member(exchange, run + 1).unwrap(), None);
        }
    }
}
