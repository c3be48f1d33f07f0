//! CPU kernels against the limit measured in the same run: criterion reports bytes or operations per second,
//! and the last lines say which share of the read bandwidth each format's single row reached.

#![expect(clippy::print_stdout, reason = "a bench prints what it measures")]

use std::time::Instant;

use anyhow::Result;
use criterion::{BenchmarkId, Criterion, Throughput};
use executor::calibrate::read_rate;
use executor::kernels::cpu::isa::Isa;
use executor::kernels::cpu::linear::{Linear, linear};
use executor::kernels::cpu::pack::{PackedMatrix, pack};
use executor::team::Team;
use ir::op::Then;
use ir::tensor::Format;

const COLUMNS: usize = 2048;
/// Rows of the matrix for few tokens: beyond the caches in every format.
const MANY_ROWS: usize = 65_536;
/// Rows of the matrix for many tokens.
const FEW_ROWS: usize = 4096;

fn main() -> Result<()> {
    let mut criterion = Criterion::default().configure_from_args().sample_size(10);
    let cpus: Vec<u32> = (0..std::thread::available_parallelism()?.get() as u32).collect();
    let team = Team::new(&cpus)?;
    let isa = Isa::detect();
    let limit = read_rate(&team, 0)?;
    let mut shares = Vec::new();
    for format in Format::ALL {
        let many = matrix(&team, format, MANY_ROWS)?;
        let bytes = format.bytes(MANY_ROWS as u64, COLUMNS as u64);
        let mut group = criterion.benchmark_group(format!("one row, {format}"));
        group.throughput(Throughput::Bytes(bytes));
        let (x, mut out) = (vec![0.1; COLUMNS], vec![0.0; MANY_ROWS]);
        let mut shortest = f64::INFINITY;
        group.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
            bencher.iter(|| {
                let start = Instant::now();
                multiply(&team, isa, &many, &x, 1, &mut out);
                shortest = shortest.min(start.elapsed().as_secs_f64());
            });
        });
        group.finish();
        shares.push((format, bytes as f64 / shortest / limit));

        let few = matrix(&team, format, FEW_ROWS)?;
        let mut group = criterion.benchmark_group(format!("512 rows, {format}"));
        group.throughput(Throughput::Elements((2 * 512 * FEW_ROWS * COLUMNS) as u64));
        let (x, mut out) = (vec![0.1; 512 * COLUMNS], vec![0.0; 512 * FEW_ROWS]);
        group.bench_function(BenchmarkId::from_parameter(isa), |bencher| {
            bencher.iter(|| multiply(&team, isa, &few, &x, 512, &mut out));
        });
        group.finish();
    }
    println!("read bandwidth {:.1} GB/s", limit / 1e9);
    for (format, share) in shares {
        println!("one row, {format}: {:.0} % of it", share * 100.0);
    }
    criterion.final_summary();
    Ok(())
}

fn matrix(team: &Team, format: Format, rows: usize) -> Result<PackedMatrix> {
    pack(team, format, rows, COLUMNS, &|range, values| {
        for (i, value) in values.iter_mut().enumerate() {
            *value = ((range.start + i) % 97) as f32 / 970.0;
        }
    })
}

fn multiply(
    team: &Team,
    isa: Isa,
    matrix: &PackedMatrix,
    x: &[f32],
    tokens: usize,
    out: &mut [f32],
) {
    let weights = [matrix];
    let work = Linear {
        x,
        tokens,
        norm: None,
        weights: &weights,
        biases: &[],
        then: Then::Nothing,
        residual: None,
    };
    linear(team, isa, &work, &mut [out]).expect("the sizes fit together");
}
