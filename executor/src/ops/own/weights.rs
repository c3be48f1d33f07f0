//! The weights of one device, packed for the kernels.

use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail};
use ir::id::{Table, WeightId};
use ir::op;
use ir::plan::Weight;

use crate::checkpoint::{Checkpoint, Stored, matrices};
use crate::fetch::Home;
use crate::kernels::cpu::norm::Norm;
use crate::kernels::cpu::pack::{Fill, PackedMatrix, WideRows, stack};
use crate::kernels::cpu::table::{Lookup, RowTable};
use crate::team::Team;

/// One row for each weight of the plan.
#[derive(Default)]
pub(crate) struct Weights {
    held: Table<WeightId, Held>,
}

enum Held {
    Elsewhere,
    Vector(Vec<f32>),
    /// One matrix, or one for each expert of a stack.
    Matrices(Home),
    /// What is only looked up.
    Table(RowTable),
}

impl Weights {
    /// Adds the plan's next weight, which is on another device.
    pub(crate) fn skip(&mut self) {
        self.held.push(Held::Elsewhere);
    }

    /// Adds the plan's next weight. Every member of the team reads and packs the parts that it touches first.
    pub(crate) fn hold(
        &mut self,
        weight: &Weight,
        checkpoint: &Checkpoint,
        team: &Team,
    ) -> Result<()> {
        let sources = matrices(weight)?;
        let (rows, columns) = weight_dims(weight);
        let first = sources.first().context("it has no source")?;
        if weight.shape.len() < 2 {
            let mut vector = vec![0.0; columns];
            checkpoint.matrix(first, 1, columns)?.read(0..1, &mut vector)?;
            self.held.push(Held::Vector(vector));
            return Ok(());
        }
        let mut stack = stack(team, weight.format, rows, columns, sources.len())?;
        let mut wide = WideRows::new(team, columns)?;
        for (matrix, source) in stack.iter_mut().zip(&sources) {
            read(checkpoint, source, (rows, columns), |fill| {
                matrix.fill(team, &mut wide, fill);
                Ok(())
            })?;
        }
        self.held.push(Held::Matrices(stack.into()));
        Ok(())
    }

    /// Adds the plan's next weight, a matrix of floats whose rows are only looked up.
    pub(crate) fn hold_table(
        &mut self,
        weight: &Weight,
        checkpoint: &Checkpoint,
        team: &Team,
    ) -> Result<()> {
        let sources = matrices(weight)?;
        let [source] = sources.as_slice() else { bail!("a table is not one matrix") };
        let (rows, columns) = weight_dims(weight);
        let table = read(checkpoint, source, (rows, columns), |fill| {
            RowTable::new(team, weight.format, rows, columns, fill)
        })?;
        self.held.push(Held::Table(table));
        Ok(())
    }

    /// Every vector and every matrix that is held packed, as numbers row after row.
    pub(crate) fn unpacked(&self) -> Vec<Vec<f32>> {
        let matrix = |matrix: &PackedMatrix| {
            let mut values = vec![0.0; matrix.rows() * matrix.columns()];
            for (row, values) in values.chunks_exact_mut(matrix.columns()).enumerate() {
                matrix.read_row(row, values);
            }
            values
        };
        let unpacked = |held: &Held| match held {
            Held::Vector(vector) => vec![vector.clone()],
            Held::Matrices(stack) => stack.iter().map(matrix).collect(),
            Held::Table(_) | Held::Elsewhere => Vec::new(),
        };
        self.held.rows().iter().flat_map(unpacked).collect()
    }

    /// A scale or a bias.
    pub(super) fn vector(&self, weight: WeightId) -> Result<&[f32]> {
        match self.held.get(weight) {
            Some(Held::Vector(vector)) => Ok(vector),
            Some(Held::Matrices(_) | Held::Table(_)) => {
                bail!("{weight} is a matrix and is read as a vector")
            }
            Some(Held::Elsewhere) | None => bail!("{weight} is not on this device"),
        }
    }

    /// A matrix `[outputs, inputs]`.
    pub(super) fn matrix(&self, weight: WeightId) -> Result<&PackedMatrix> {
        match self.stack(weight)? {
            [matrix] => Ok(matrix),
            stack => bail!("{weight} is a stack of {} matrices", stack.len()),
        }
    }

    /// A matrix whose rows are looked up.
    pub(super) fn lookup(&self, weight: WeightId) -> Result<Lookup<'_>> {
        match self.held.get(weight) {
            Some(Held::Table(table)) => Ok(Lookup::Rows(table)),
            _ => self.matrix(weight).map(Lookup::Packed),
        }
    }

    /// One matrix for each expert.
    pub(super) fn stack(&self, weight: WeightId) -> Result<&[PackedMatrix]> {
        match self.held.get(weight) {
            Some(Held::Matrices(stack)) => Ok(stack),
            Some(Held::Vector(_)) => bail!("{weight} is a vector and is read as a matrix"),
            Some(Held::Table(_)) => bail!("{weight} is a table and is multiplied with"),
            Some(Held::Elsewhere) | None => bail!("{weight} is not on this device"),
        }
    }

    /// A matrix or a stack, for a GPU that fetches it.
    pub(crate) fn home(&self, weight: WeightId) -> Option<Home> {
        match self.held.get(weight)? {
            Held::Matrices(stack) => Some(Home::clone(stack)),
            Held::Vector(_) | Held::Table(_) | Held::Elsewhere => None,
        }
    }

    /// A norm with its weights.
    pub(super) fn norm(&self, norm: &op::Norm) -> Result<Norm<'_>> {
        let vector = |weight: Option<WeightId>| weight.map(|id| self.vector(id)).transpose();
        Ok(Norm {
            kind: norm.kind,
            scale: vector(norm.scale)?,
            bias: vector(norm.bias)?,
            epsilon: norm.epsilon,
            scale_offset: norm.scale_offset,
        })
    }
}

/// Hands `make` the rows of a source, `(rows, columns)`.
fn read<T>(
    checkpoint: &Checkpoint,
    source: &Stored,
    (rows, columns): (usize, usize),
    make: impl FnOnce(&Fill<'_>) -> Result<T>,
) -> Result<T> {
    let matrix = checkpoint.matrix(source, rows, columns)?;
    let failed = OnceLock::new();
    let made = make(&|range, values| {
        if let Err(error) = matrix.read(range, values) {
            // The first is told.
            drop(failed.set(error));
        }
    })?;
    failed.into_inner().map_or(Ok(made), Err)
}

/// Rows and columns of a weight, or of one matrix of a stack; a vector is one row.
pub(crate) fn weight_dims(weight: &Weight) -> (usize, usize) {
    match weight.shape.as_slice() {
        [] => (1, 1),
        [columns] => (1, *columns as usize),
        [.., rows, columns] => (*rows as usize, *columns as usize),
    }
}
