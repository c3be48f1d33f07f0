//! What the machine gives at most: bytes from memory, and products of numbers that stay in registers.

use std::fmt;
use std::time::Instant;

use anyhow::Result;
use executor::calibrate::read_rate;
use executor::kernels::cpu::arithmetic::Arithmetic;
use executor::team::Team;

use crate::registers::Turns;

/// Of all cores together.
pub(crate) struct Limits {
    /// The least and the most that was seen.
    read_bytes_per_sec: [f64; 2],
    /// Bytes of the last-level caches.
    cached: usize,
    /// Of what kernels were found to multiply with.
    operations_per_sec: Vec<(Arithmetic, f64)>,
}

impl Limits {
    pub(crate) fn new(cached: usize) -> Self {
        Self { read_bytes_per_sec: [f64::INFINITY, 0.0], cached, operations_per_sec: Vec::new() }
    }

    /// Bytes per second that are read from memory now.
    pub(crate) fn read(&mut self, team: &Team) -> Result<f64> {
        let rate = read_rate(team, self.cached)?;
        let [least, most] = self.read_bytes_per_sec;
        self.read_bytes_per_sec = [least.min(rate), most.max(rate)];
        Ok(rate)
    }

    /// Operations per second, measured when it is first asked for; none of plain Rust, whose instructions are the
    /// compiler's choice.
    pub(crate) fn operations_per_sec(
        &mut self,
        team: &Team,
        arithmetic: Arithmetic,
    ) -> Option<f64> {
        let known = self.operations_per_sec.iter().find(|(known, _)| *known == arithmetic);
        if let Some((_, rate)) = known {
            return Some(*rate);
        }
        let rate = peak(team, Turns::of(arithmetic)?);
        self.operations_per_sec.push((arithmetic, rate));
        Some(rate)
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [least, most] = self.read_bytes_per_sec.map(|rate| rate / 1e9);
        write!(f, "memory is read at {least:.1} to {most:.1} GB/s")?;
        for (arithmetic, rate) in &self.operations_per_sec {
            write!(f, ", {arithmetic} do {:.0} G/s", rate / 1e9)?;
        }
        Ok(())
    }
}

/// Operations per second in the shortest of some rounds: of many, since the slowest core ends a round.
fn peak(team: &Team, turns: Turns) -> f64 {
    const ROUNDS: usize = 30;
    /// Some milliseconds of each round.
    const COUNT: usize = 1 << 20;
    let mut shortest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        team.run(|_| turns.take(COUNT));
        shortest = shortest.min(start.elapsed().as_secs_f64());
    }
    (turns.operations() * COUNT * team.members()) as f64 / shortest
}
