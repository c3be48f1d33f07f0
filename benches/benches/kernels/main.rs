//! CPU kernels against limits measured in the same run: criterion reports bytes or operations per second, and the last
//! lines say which share of the read bandwidth or of the arithmetic each kernel reached.

#![expect(clippy::print_stdout, reason = "a bench prints what it measures")]

mod attention;
mod experts;
mod limits;
mod linears;
mod norms;

use std::time::Instant;

use anyhow::Result;
use criterion::{BenchmarkId, Criterion, Throughput};
use executor::kernels::cpu::isa::Isa;
use executor::team::Team;
use limits::{Arithmetic, Limits};

/// What bounds a kernel, and how much of it one round takes.
enum Amount {
    /// Memory, in bytes.
    Bytes(u64),
    /// Arithmetic, in multiplications and additions.
    Operations(u64, Arithmetic),
}

/// What kernels are measured with, and what was found.
struct Bench {
    criterion: Criterion,
    team: Team,
    isa: Isa,
    limits: Limits,
    shares: Vec<String>,
}

fn main() -> Result<()> {
    let cpus: Vec<u32> = (0..std::thread::available_parallelism()?.get() as u32).collect();
    let team = Team::new(&cpus)?;
    let limits = Limits::measure(&team)?;
    let criterion = Criterion::default().configure_from_args().sample_size(10);
    let mut bench = Bench { criterion, team, isa: Isa::detect(), limits, shares: Vec::new() };
    linears::measure(&mut bench)?;
    attention::measure(&mut bench)?;
    experts::measure(&mut bench)?;
    norms::measure(&mut bench);
    println!("{}", bench.limits);
    bench.shares.iter().for_each(|share| println!("{share}"));
    bench.criterion.final_summary();
    Ok(())
}

impl Bench {
    /// Measures rounds of a kernel, and its share of what bounds it in the shortest.
    fn measure(&mut self, name: &str, amount: Amount, mut round: impl FnMut(&Team, Isa)) {
        let (team, isa) = (&self.team, self.isa);
        let mut group = self.criterion.benchmark_group(name);
        let (count, limit, unit) = match amount {
            Amount::Bytes(bytes) => {
                group.throughput(Throughput::Bytes(bytes));
                (bytes, Some(self.limits.read_bytes_per_sec), "the read bandwidth")
            }
            Amount::Operations(operations, arithmetic) => {
                group.throughput(Throughput::Elements(operations));
                (operations, self.limits.operations_per_sec(arithmetic), arithmetic.name())
            }
        };
        let mut shortest = f64::INFINITY;
        group.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
            bencher.iter(|| {
                let start = Instant::now();
                round(team, isa);
                shortest = shortest.min(start.elapsed().as_secs_f64());
            });
        });
        group.finish();
        if let Some(limit) = limit.filter(|_| shortest.is_finite()) {
            let share = count as f64 / shortest / limit * 100.0;
            self.shares.push(format!("{name}: {share:.0} % of {unit}"));
        }
    }
}

/// Some number between 0 and 0.1.
fn made_up(i: usize) -> f32 {
    (i % 97) as f32 / 970.0
}
