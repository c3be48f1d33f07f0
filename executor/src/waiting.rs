//! Looking again and again for what another thread does, without a system call that wakes anybody.

use std::hint::spin_loop;
use std::thread;
use std::time::{Duration, Instant};

/// How long a waiter spins at first: longer than the gap between two steps of a lane (below 10 µs) and between steps of
/// unlike lanes of a tensor-parallel layer, shorter than a scheduler's slice.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
/// How long a waiter spins between two yields once it knows that its CPU is its own: a yield is a system call, and
/// those of many threads stand in each other's way.
const LONG_SPIN: Duration = Duration::from_millis(1);
/// A yield that takes longer than this gave the CPU to somebody else (alone it takes below 1 µs).
const SHARED_CPU: Duration = Duration::from_micros(5);
/// Length of a sleep between two looks.
pub(crate) const NAP: Duration = Duration::from_micros(50);
/// Pauses between two looks at the clock: 64 take about 1 µs.
const PAUSES: u32 = 64;

/// Spins until `is_done` or `limit` is over; says which.
pub(crate) fn spin_for(limit: Duration, is_done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..PAUSES {
            if is_done() {
                return true;
            }
            spin_loop();
        }
        if start.elapsed() >= limit {
            return false;
        }
    }
}

/// Spins and gives way in turn until `is_done`, for `limit` at most; whether somebody else wanted the CPU, which ends
/// it at once.
pub(crate) fn give_way(limit: Duration, is_done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    let (mut yields, mut taken) = (0, 0);
    while start.elapsed() < limit {
        let before = Instant::now();
        thread::yield_now();
        yields += 1;
        // One long yield may have been an interrupt.
        taken += u32::from(before.elapsed() > SHARED_CPU);
        let spin = if yields > 2 { LONG_SPIN } else { SPIN };
        if taken > 1 || spin_for(spin, &is_done) {
            break;
        }
    }
    taken > 1
}

/// Looks until `is_done` or `limit` is over: for `spin` without a system call, then without sleeping for as long as
/// nobody else wants the CPU; says which.
pub(crate) fn look_for(spin: Duration, limit: Duration, is_done: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    if !spin_for(spin, &is_done) && give_way(limit, &is_done) {
        while !is_done() && start.elapsed() < limit {
            thread::sleep(NAP);
        }
    }
    is_done()
}
