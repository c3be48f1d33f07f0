//! CPU kernels against limits measured in the same run: criterion reports bytes or operations per second, and the last
//! lines say which share of the read bandwidth, as it was right before or after, or of what their instructions do at
//! most, each kernel reached.
//!
//! They are measured at the highest level of the instruction set. A filter of names that ends in a lower one, as the
//! names then do, measures them at that: `cargo bench --workspace --bench kernels -- /avx2`.

#![expect(clippy::print_stdout, reason = "a bench prints what it measures")]

mod attention;
mod experts;
mod limits;
mod linears;
mod norms;
mod registers;

use std::env;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use criterion::{BenchmarkId, Criterion, Throughput};
use executor::calibrate::last_caches;
use executor::kernels::cpu::arithmetic::Arithmetic;
use executor::kernels::cpu::isa::Isa;
use executor::team::Team;
use ir::machine::DeviceKind;
use limits::Limits;

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
    let isa = level(env::args().skip(1))?;
    // One thread on each core that this process may use, as plans have.
    let machine = probe::machine(None)?;
    let node = machine.devices.rows().iter().find_map(|device| match &device.kind {
        DeviceKind::Numa { cpus, .. } => Some((device, cpus)),
        DeviceKind::Gpu { .. } => None,
    });
    let (node, cpus) = node.context("there is no NUMA node here")?;
    let team = Team::new(cpus)?;
    let limits = Limits::new(last_caches(node));
    let criterion = Criterion::default().configure_from_args().sample_size(10);
    let mut bench = Bench { criterion, team, isa, limits, shares: Vec::new() };
    linears::measure(&mut bench)?;
    attention::measure(&mut bench)?;
    experts::measure(&mut bench)?;
    norms::measure(&mut bench)?;
    println!("{}", bench.limits);
    bench.shares.iter().for_each(|share| println!("{share}"));
    bench.criterion.final_summary();
    Ok(())
}

/// The level that a filter of names ends in, else the highest. Criterion refuses options that it does not know.
fn level(mut arguments: impl Iterator<Item = String>) -> Result<Isa> {
    let highest = Isa::detect();
    let filter = arguments.find(|argument| argument.contains('/')).unwrap_or_default();
    let last = filter.rsplit('/').next().unwrap_or_default();
    if last.is_empty() {
        return Ok(highest);
    }
    let isa: Isa = last.trim_end_matches('$').parse()?;
    ensure!(
        isa.is_available(),
        "this processor does not have {isa}; its highest level is {highest}"
    );
    Ok(isa)
}

impl Bench {
    /// Measures rounds of a kernel, and its share of what bounds it: of memory in the middle one, as reads are
    /// measured, of arithmetic in the shortest.
    ///
    /// # Errors
    /// When there is no memory to measure reads with.
    fn measure(
        &mut self,
        name: &str,
        amount: Amount,
        mut round: impl FnMut(&Team, Isa),
    ) -> Result<()> {
        let (team, isa) = (&self.team, self.isa);
        let mut group = self.criterion.benchmark_group(name);
        group.throughput(match amount {
            Amount::Bytes(bytes) => Throughput::Bytes(bytes),
            Amount::Operations(operations, _) => Throughput::Elements(operations),
        });
        let reads = |limits: &mut Limits| match amount {
            Amount::Bytes(_) => limits.read(team),
            Amount::Operations(..) => Ok(0.0),
        };
        let before = reads(&mut self.limits)?;
        let mut times = Vec::new();
        group.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
            bencher.iter(|| {
                let start = Instant::now();
                round(team, isa);
                times.push(start.elapsed().as_secs_f64());
            });
        });
        group.finish();
        if times.is_empty() {
            return Ok(());
        }
        times.sort_by(f64::total_cmp);
        let share =
            |count: u64, time: usize, limit: f64| count as f64 / times[time] / limit * 100.0;
        self.shares.push(match amount {
            Amount::Bytes(bytes) => {
                let limit = before.max(reads(&mut self.limits)?);
                let share = share(bytes, times.len() / 2, limit);
                format!("{name}: {share:.0} % of the read bandwidth")
            }
            Amount::Operations(operations, arithmetic) => {
                match self.limits.operations_per_sec(team, arithmetic) {
                    Some(limit) => {
                        format!("{name}: {:.0} % of {arithmetic}", share(operations, 0, limit))
                    }
                    None => format!("{name}: {arithmetic} has no limit that could be measured"),
                }
            }
        });
        Ok(())
    }
}

/// Some number between 0 and 0.1.
fn made_up(i: usize) -> f32 {
    (i % 97) as f32 / 970.0
}
