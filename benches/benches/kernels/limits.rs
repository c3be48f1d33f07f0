//! What the machine gives at most: bytes from memory, and products of numbers that stay in registers.

use std::fmt;
use std::time::Instant;

use anyhow::Result;
use executor::calibrate::read_rate;
use executor::team::Team;

/// Numbers that are multiplied and added up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arithmetic {
    F32,
    /// Pairs of bf16, summed in f32.
    Bf16,
    /// Four bytes, summed in 32 bits.
    Int8,
}

/// Of all cores together.
pub(crate) struct Limits {
    pub(crate) read_bytes_per_sec: f64,
    /// None where the processor has no AVX-512 with such products.
    operations_per_sec: [Option<f64>; 3],
}

impl Arithmetic {
    const ALL: [Arithmetic; 3] = [Arithmetic::F32, Arithmetic::Bf16, Arithmetic::Int8];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Arithmetic::F32 => "the f32 arithmetic",
            Arithmetic::Bf16 => "the bf16 arithmetic",
            Arithmetic::Int8 => "the 8-bit arithmetic",
        }
    }
}

impl Limits {
    pub(crate) fn measure(team: &Team) -> Result<Self> {
        let operations_per_sec = Arithmetic::ALL.map(|arithmetic| peak(team, arithmetic));
        Ok(Self { read_bytes_per_sec: read_rate(team, 0)?, operations_per_sec })
    }

    pub(crate) fn operations_per_sec(&self, arithmetic: Arithmetic) -> Option<f64> {
        self.operations_per_sec[arithmetic as usize]
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory is read at {:.1} GB/s", self.read_bytes_per_sec / 1e9)?;
        for arithmetic in Arithmetic::ALL {
            if let Some(rate) = self.operations_per_sec(arithmetic) {
                write!(f, ", {} does {:.0} G/s", arithmetic.name(), rate / 1e9)?;
            }
        }
        Ok(())
    }
}

/// Operations per second in the shortest of some rounds.
fn peak(team: &Team, arithmetic: Arithmetic) -> Option<f64> {
    const ROUNDS: usize = 10;
    let turns = 1 << 20;
    let mut shortest = f64::INFINITY;
    let mut operations = 0;
    for _ in 0..ROUNDS {
        operations = registers::operations(arithmetic, turns)? * team.members() as u64;
        let start = Instant::now();
        team.run(|_| registers::multiply(arithmetic, turns));
        shortest = shortest.min(start.elapsed().as_secs_f64());
    }
    Some(operations as f64 / shortest)
}

#[cfg(not(target_arch = "x86_64"))]
mod registers {
    use super::Arithmetic;

    pub(super) fn operations(_: Arithmetic, _: usize) -> Option<u64> {
        None
    }

    pub(super) fn multiply(_: Arithmetic, _: usize) {}
}

#[cfg(target_arch = "x86_64")]
mod registers {
    #![expect(unsafe_code, reason = "functions of processor features that were looked for")]

    use std::arch::x86_64::*;
    use std::array;
    use std::hint::black_box;

    use super::Arithmetic;

    /// Sums under way at once: more than a product's latency hides, fewer than the registers.
    const SUMS: usize = 16;

    /// Operations of so many turns; none if the processor lacks the instructions.
    pub(super) fn operations(arithmetic: Arithmetic, turns: usize) -> Option<u64> {
        let (has, lanes) = match arithmetic {
            Arithmetic::F32 => (is_x86_feature_detected!("avx512f"), 16),
            Arithmetic::Bf16 => (is_x86_feature_detected!("avx512bf16"), 32),
            Arithmetic::Int8 => (is_x86_feature_detected!("avx512vnni"), 64),
        };
        has.then_some((turns * SUMS * 2 * lanes) as u64)
    }

    /// Does them.
    pub(super) fn multiply(arithmetic: Arithmetic, turns: usize) {
        if operations(arithmetic, turns).is_none() {
            return;
        }
        // SAFETY: the processor has the instructions.
        unsafe {
            match arithmetic {
                Arithmetic::F32 => f32s(turns),
                Arithmetic::Bf16 => bf16s(turns),
                Arithmetic::Int8 => bytes(turns),
            }
        }
    }

    #[target_feature(enable = "avx512f")]
    fn f32s(turns: usize) {
        let (a, b) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(0.25)));
        let mut sums: [__m512; SUMS] = array::from_fn(|i| _mm512_set1_ps(i as f32));
        for _ in 0..turns {
            sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(*sum, a, b));
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn bf16s(turns: usize) {
        let a = black_box(_mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5), _mm512_set1_ps(0.25)));
        let mut sums: [__m512; SUMS] = array::from_fn(|i| _mm512_set1_ps(i as f32));
        for _ in 0..turns {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, a, a));
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn bytes(turns: usize) {
        let a = black_box(_mm512_set1_epi32(0x0102_0304));
        let mut sums: [__m512i; SUMS] = array::from_fn(|i| _mm512_set1_epi32(i as i32));
        for _ in 0..turns {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbusd_epi32(*sum, a, a));
        }
        black_box(sums);
    }
}
