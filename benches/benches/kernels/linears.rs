//! Linears of every format: one row, which memory bounds, and 512, which arithmetic does.

use anyhow::Result;
use executor::calibrate::work::{made_up_matrix, multiply};
use executor::kernels::cpu::arithmetic::Arithmetic;
use ir::tensor::Format;

use crate::{Amount, Bench};

const COLUMNS: usize = 2048;
/// Rows of the matrix for one token: beyond the caches in every format.
const MANY_ROWS: usize = 131_072;
/// Rows of the matrix for many tokens.
const FEW_ROWS: usize = 4096;
const TOKENS: usize = 512;

pub(crate) fn measure(bench: &mut Bench) -> Result<()> {
    for format in Format::ALL {
        let many = made_up_matrix(&bench.team, format, MANY_ROWS, COLUMNS)?;
        let bytes = format.bytes(MANY_ROWS as u64, COLUMNS as u64);
        let (x, mut out) = (vec![0.1; COLUMNS], vec![0.0; MANY_ROWS]);
        bench.measure(
            &format!("linear of one row, {format}"),
            Amount::Bytes(bytes),
            |team, isa| {
                multiply(team, isa, &many, &x, 1, &mut out).expect("the sizes fit together");
            },
        )?;
        let few = made_up_matrix(&bench.team, format, FEW_ROWS, COLUMNS)?;
        let (x, mut out) = (vec![0.1; TOKENS * COLUMNS], vec![0.0; TOKENS * FEW_ROWS]);
        let operations = (2 * TOKENS * FEW_ROWS * COLUMNS) as u64;
        let amount =
            Amount::Operations(operations, Arithmetic::of_linear(bench.isa, format, TOKENS));
        bench.measure(&format!("linear of {TOKENS} rows, {format}"), amount, |team, isa| {
            multiply(team, isa, &few, &x, TOKENS, &mut out).expect("the sizes fit together");
        })?;
    }
    Ok(())
}
