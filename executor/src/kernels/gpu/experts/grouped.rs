//! Experts for many tokens: slots are grouped by expert on the device, and a group's tiles share what is read.
//!
//! - Slots are put in the order of their experts; each expert's are cut into *tiles*.
//! - A product for each tile writes gated rows in that order, a second one what `down` makes of them in the order of
//!   slots. A last launch adds each token's, always in the router's order.
//! - How many slots an expert has is known on the device alone: grids are for the largest number of tiles, and those
//!   that do not exist end at once.

#![expect(unsafe_code, reason = "kernels are launched without checks of every index")]

mod matrix;
mod portable;
mod sort;
mod sum;

use anyhow::{Result, ensure};
use cubecl::prelude::*;
use ir::op::Then;
use ir::tensor::Format;
use ir::workspace::experts::TILE_NUMBERS;
use ir::workspace::product_format;

use self::matrix::Tile;
use super::Experts;
use crate::kernels::cpu::pack::PANEL;
use crate::kernels::gpu::cast::Cast;
use crate::kernels::gpu::device::{Gpu, Span};
use crate::kernels::gpu::matrix::{LOAD_BYTES, Stack};
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::words::read_size;

/// How products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// With matrix instructions, which take 16-bit elements.
    Matrix,
    /// With products of f32, on any device.
    Portable,
}

/// The workspace, part by part: see [`ir::workspace::experts::Parts`].
struct Workspace {
    starts: Span,
    order: Span,
    tiles: Span,
    input: Span,
    gated: Span,
    products: Span,
    /// Slots of a tile.
    tile: usize,
    /// The most there may be.
    most_tiles: usize,
}

/// One of the two products of every slot.
struct Pass<'a> {
    /// A row for each token, or for each slot in order.
    input: &'a Span,
    /// Rows of `input`.
    input_rows: usize,
    /// Gate and up, or down.
    stacks: &'a [&'a Stack],
    /// A gate where there are two stacks.
    then: Then,
    /// A row for each slot: in order where there are two stacks.
    out: &'a Span,
}

impl Gpu {
    /// Queues the experts of many tokens.
    pub(super) fn experts_of_many(&self, experts: &Experts<'_>) -> Result<()> {
        let stacks = [experts.gate, experts.down];
        let fits = stacks.iter().all(|stack| {
            let float = narrow_format(stack).float();
            float.is_some_and(|dtype| self.multiplies(dtype)) && matrix::serves(stack.columns())
        });
        self.experts_in_form(experts, if fits { Form::Matrix } else { Form::Portable })
    }

    /// As above, in a form that fits.
    pub(super) fn experts_in_form(&self, experts: &Experts<'_>, form: Form) -> Result<()> {
        let Experts { gate, up, down, tokens, used, .. } = *experts;
        let slots = tokens * used;
        ensure!(
            slots * down.rows().max(gate.rows()) < 1 << 32,
            "{tokens} tokens at {used} experts are beyond 32-bit indices: pass fewer at a time"
        );
        let workspace = Workspace::new(experts, form)?;
        self.sort(experts, &workspace);
        let mut input = experts.x;
        if form == Form::Matrix {
            let shape = [tokens, gate.columns()];
            let narrow = Cast::plain(experts.x, shape, narrow_format(gate), &workspace.input);
            self.cast(&narrow)?;
            input = &workspace.input;
        }
        let gated = Pass {
            input,
            input_rows: tokens,
            stacks: &[gate, up],
            then: Then::Gate(experts.activation),
            out: &workspace.gated,
        };
        let products = Pass {
            input: &workspace.gated,
            input_rows: slots,
            stacks: &[down],
            then: Then::Nothing,
            out: &workspace.products,
        };
        for (pass, next) in [(gated, Some(down)), (products, None)] {
            match form {
                Form::Matrix => self.multiply_narrow(&pass, next, experts, &workspace),
                Form::Portable => self.multiply_wide(&pass, experts, &workspace),
            }
        }
        self.sum(experts, &workspace);
        Ok(())
    }

    fn sort(&self, experts: &Experts<'_>, workspace: &Workspace) {
        let Experts { ids, tokens, used, first_expert, .. } = *experts;
        let (held, slots) = (experts.gate.experts(), tokens * used);
        let starts = || integers(&workspace.starts, held + 1);
        // SAFETY: the spans are as long as the counts say, and the kernels stay within those.
        unsafe {
            sort::sort_slots::launch_unchecked(
                &self.client,
                CubeCount::new_1d(held as u32 + 1),
                CubeDim::new_1d(sort::UNITS as u32),
                integers(ids, slots),
                starts(),
                integers(&workspace.order, slots),
                first_expert,
                held as i32,
                slots,
                self.plane() as usize,
            );
            sort::list_tiles::launch_unchecked(
                &self.client,
                CubeCount::new_single(),
                CubeDim::new_1d(sort::UNITS as u32),
                starts(),
                workspace.tiles(),
                held,
                workspace.most_tiles,
                workspace.tile as u32,
                self.plane() as usize,
            );
        }
    }

    /// A pass of matrix instructions, whose results are narrowed where a `next` stack is multiplied with them.
    fn multiply_narrow(
        &self,
        pass: &Pass<'_>,
        next: Option<&Stack>,
        experts: &Experts<'_>,
        workspace: &Workspace,
    ) {
        let (panel, rows) = (pass.panel(), pass.stacks[0].rows());
        let slots = experts.tokens * experts.used;
        let tile = Tile {
            slots: workspace.tile,
            is_bf16: narrow_format(pass.stacks[0]) == Format::Bf16,
            makes_bf16: next.map(narrow_format) == Some(Format::Bf16),
        };
        // Four neighbouring rows are stored at once, in 16 bits or in 32.
        let words = if next.is_some() { 2 } else { 4 };
        // SAFETY: as above; tiles and the order hold what the sorting left there.
        unsafe {
            matrix::multiply_tiles::launch_unchecked(
                &self.client,
                CubeCount::new_2d(
                    rows.div_ceil(matrix::rows_of_cube(pass.stacks.len())) as u32,
                    workspace.most_tiles as u32,
                ),
                CubeDim::new_2d(matrix::PLANE as u32, matrix::PLANES as u32),
                words,
                pass.input.argument(pass.input_rows * panel.columns / 8, LOAD_BYTES),
                pass.weights(),
                workspace.tiles(),
                integers(&workspace.order, slots),
                pass.out.argument(slots * rows / 4, words * size_of::<u32>()),
                rows,
                experts.used,
                pass.then,
                tile,
                panel,
            );
        }
    }

    fn multiply_wide(&self, pass: &Pass<'_>, experts: &Experts<'_>, workspace: &Workspace) {
        let (panel, rows) = (pass.panel(), pass.stacks[0].rows());
        let slots = experts.tokens * experts.used;
        let size = read_size(panel.columns);
        let vectors = pass.input_rows * panel.columns / size;
        // SAFETY: as above.
        unsafe {
            portable::multiply_tiles::launch_unchecked(
                &self.client,
                CubeCount::new_2d(rows.div_ceil(PANEL) as u32, workspace.most_tiles as u32),
                CubeDim::new_1d(portable::UNITS as u32),
                size,
                pass.input.argument(vectors, size * size_of::<f32>()),
                pass.weights(),
                workspace.tiles(),
                integers(&workspace.order, slots),
                pass.out.argument(slots * rows, size_of::<f32>()),
                rows,
                experts.used,
                pass.then,
                panel,
            );
        }
    }

    fn sum(&self, experts: &Experts<'_>, workspace: &Workspace) {
        let Experts { tokens, used, down, .. } = *experts;
        let (slots, features) = (tokens * used, down.rows());
        let size = read_size(features);
        let vectors = features / size;
        let (count, dim) = self.grid(tokens * vectors);
        let bytes = size * size_of::<f32>();
        // SAFETY: as above.
        unsafe {
            sum::sum_slots::launch_unchecked(
                &self.client,
                count,
                dim,
                size,
                workspace.products.argument(slots * vectors, bytes),
                integers(experts.ids, slots),
                experts.weights.argument(slots, size_of::<f32>()),
                experts.out.argument(tokens * vectors, bytes),
                experts.first_expert,
                down.experts() as i32,
                used,
                vectors,
                tokens * vectors,
            );
        }
    }
}

impl Workspace {
    fn new(experts: &Experts<'_>, form: Form) -> Result<Self> {
        let Experts { gate, tokens, used, workspace, .. } = *experts;
        let held = gate.experts();
        let sizes = experts.sizes();
        let parts = sizes.parts().in_order().map(|bytes| bytes as usize);
        let needed: usize = parts.iter().sum();
        ensure!(
            needed <= workspace.bytes(),
            "{tokens} tokens at {used} experts need {needed} of {} bytes of workspace",
            workspace.bytes()
        );
        let mut start = 0;
        let [starts, order, tiles, input, gated, products] = parts.map(|bytes| {
            let part = workspace.part(start, bytes);
            start += bytes;
            part
        });
        let slots = tokens * used;
        let tile = match form {
            Form::Matrix => matrix::tile(slots / held),
            Form::Portable => portable::TILE,
        };
        let most_tiles = sizes.most_tiles(tile as u32) as usize;
        Ok(Self { starts, order, tiles, input, gated, products, tile, most_tiles })
    }

    fn tiles(&self) -> BufferArg {
        integers(&self.tiles, self.most_tiles * TILE_NUMBERS as usize)
    }
}

impl Pass<'_> {
    fn panel(&self) -> Panel {
        self.stacks[0].panel()
    }

    fn weights<T: FromIterator<BufferArg>>(&self) -> T {
        self.stacks.iter().map(|stack| stack.data().loads()).collect()
    }
}

/// What matrix instructions multiply a stack's elements in; they take no f32.
fn narrow_format(stack: &Stack) -> Format {
    product_format(stack.format(), true)
}

fn integers(span: &Span, count: usize) -> BufferArg {
    span.argument(count, size_of::<u32>())
}
