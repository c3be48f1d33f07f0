//! What the kernels' tests share: teams, numbers, and a measure of likeness.

use std::panic::resume_unwind;
use std::thread;

use hwlocality::Topology;

use crate::team::Team;

/// Runs `test` with a team of `members`, on a thread of its own because a team binds the thread that makes it.
pub(crate) fn with_team(members: usize, test: impl FnOnce(&Team) + Send) {
    on_its_own_thread(|| {
        let topology = Topology::new().unwrap();
        let all: Vec<u32> =
            topology.cpuset().iter_set().map(|index| usize::from(index) as u32).collect();
        let cpus: Vec<u32> = all.into_iter().cycle().take(members).collect();
        test(&Team::new(&cpus).unwrap());
    });
}

/// Runs `test` on a thread that ends with it.
pub(crate) fn on_its_own_thread(test: impl FnOnce() + Send) {
    if let Err(payload) = thread::scope(|scope| scope.spawn(test).join()) {
        resume_unwind(payload);
    }
}

/// A sequence of numbers that look random and are the same every time (xorshift64*).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Evenly between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.float()).collect()
    }
}

/// The largest distance, as a share of the largest magnitude in `expected`.
pub(crate) fn distance(actual: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(actual.len(), expected.len());
    let largest = expected.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    let distances = actual.iter().zip(expected).map(|(&a, b)| (f64::from(a) - b).abs());
    // `max` would drop what is not a number.
    let worse = |worst: f64, d: f64| if worst.is_nan() || d <= worst { worst } else { d };
    distances.fold(0.0, worse) / largest.max(1e-30)
}

/// By the Taylor series, which in 64 bits is good to 1e-12 up to 4.
pub(crate) fn erf_in_64_bits(x: f64) -> f64 {
    if x.abs() > 4.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..120 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}
