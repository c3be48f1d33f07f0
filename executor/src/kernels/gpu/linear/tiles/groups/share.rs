//! How the matrices, tokens and columns of a launch of [`super`] are shared out among cubes, and what lies where in their
//! shared memory.

use ir::tensor::Format;

use crate::kernels::cpu::pack::{PANEL, VECTOR, packed_bytes};
use crate::kernels::gpu::bf12::VECTOR_LOADS;
use crate::kernels::gpu::device::Gpu;
use crate::kernels::gpu::linear::Linear;
use crate::kernels::gpu::linear::tiles::share::TileShare;
use crate::kernels::gpu::linear::total::Shape;
use crate::kernels::gpu::matrix::{LOAD_BYTES, Layout, Matrix};
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::staged::{STEP, VECTORS};
use crate::kernels::gpu::warpgroup::{BOX_ALIGNMENT, GROUP, LINE_BYTES, RightOperands, lane_sums};

/// Steps that have a place in shared memory: one that is multiplied, the next, which is loaded ahead, and one on its way.
/// Five of 64 tokens in 12 bits fit.
const LEAST_STAGES: usize = 3;
const MOST_STAGES: usize = 8;
/// Bytes of weights that stages have a place for at least, where there is room. (With 36 KiB an H200 reads 12 bits
/// 7 to 8 % more slowly, with 64 up to 3 %; with 20 KiB 8 bits 17 to 23 %.)
const STAGED_BYTES: usize = 48 << 10;
/// Bytes of shared memory of a cube beside its stages: two barriers for each, a sum of squares, and what lies between.
const BESIDE_BYTES: usize = MOST_STAGES * 2 * size_of::<u64>() + size_of::<f32>() + 2 * ALIGNMENT;
/// The most cubes of a cluster: more not every GPU has places for.
const MOST_CUBES: usize = 8;
/// The most tokens of cubes of which a processor has places for two where they decode: two cubes have ten planes, so
/// some quarter of a processor has three, whose registers end at 168. With 96 tokens they need 154 to 166, with 128 196
/// to 208.
const MOST_TOKENS_OF_TWO: usize = 96;
/// The part of all places that clusters of more than two cubes find: processors come in groups of unlike size, no
/// multiples of a cluster. On an H200 clusters of seven find 32 · 7 of 264 places, of eight 45 · 8 of 396, which its
/// profiler says.
const PLACES_OF_CLUSTERS: f64 = 0.85;
/// Steps whose weights are on their way before the launch before is over: of a gate and an up of the 8 B shape in 4 bits,
/// what memory delivers in 0.5 µs. More delay the first activations.
const EARLY_STEPS: usize = 2;
/// The fewest steps of a cube.
const LEAST_STEPS: usize = 4;
/// What stages are aligned to.
pub(super) const ALIGNMENT: usize = BOX_ALIGNMENT;

/// How the matrices of a launch are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::kernels::gpu::linear) struct GroupShare {
    /// Its teams are the cubes of a cluster.
    pub(super) tile: TileShare,
    /// Whether the weights are copied as boxes, as rows are and whole panels. Others are copied as they lie.
    pub(super) has_lines: bool,
    /// Steps that have a place in shared memory.
    pub(super) stages: usize,
    /// Words of shared memory that a cube has at least, so that no more find a place on a processor than are meant to.
    pub(super) least_words: usize,
}

impl GroupShare {
    /// Vectors of the activations in a step.
    pub(super) fn x_vectors(self) -> usize {
        self.tile.tokens * VECTORS
    }

    /// Vectors of a stage.
    pub(super) fn stage(self) -> usize {
        (self.x_vectors() + self.weight_loads()).next_multiple_of(ALIGNMENT / LOAD_BYTES)
    }

    /// Loads of the weights in a step.
    pub(super) fn weight_loads(self) -> usize {
        GROUP * self.panel_loads()
    }

    /// Loads from panel to panel in a stage.
    pub(super) fn panel_loads(self) -> usize {
        match self.tile.layout {
            Layout::Panels => 2 * step_loads(self.tile.panel),
            Layout::RowMajor => PANEL * VECTORS,
        }
    }

    /// Steps of the columns.
    pub(super) fn steps(self) -> usize {
        self.tile.panel.columns / STEP
    }

    /// Steps whose weights each cube copies early.
    pub(super) fn early_steps(self) -> usize {
        EARLY_STEPS.min(self.steps() / self.tile.teams)
    }

    /// Sums of a lane.
    pub(super) fn sums(self) -> usize {
        2 * lane_sums(self.tile.tokens)
    }

    /// Words of shared memory that stages have, and sums afterwards.
    pub(super) fn words(self, shape: Shape) -> usize {
        let staged = self.stages * self.stage() * LOAD_BYTES / size_of::<u32>();
        staged.max(shape.cells()).max(self.least_words)
    }
}

/// Rows that panels hold: whole vectors.
pub(super) fn held_rows(matrix: &Matrix) -> usize {
    matrix.rows().next_multiple_of(VECTOR)
}

/// Lines of a whole panel.
pub(super) fn panel_lines(panel: Panel) -> usize {
    panel.stride() * LOAD_BYTES / LINE_BYTES
}

/// Lines of a step of a whole panel.
pub(super) fn step_lines(panel: Panel) -> usize {
    2 * step_loads(panel) * LOAD_BYTES / LINE_BYTES
}

/// Loads of a step of 16 rows, of the two times 16 of a panel.
pub(super) fn step_loads(panel: Panel) -> usize {
    packed_bytes(panel.format, PANEL, STEP) / LOAD_BYTES / 2 - loads_before(panel)
}

/// Loads in front of the first step of 16 rows.
pub(super) fn loads_before(panel: Panel) -> usize {
    if matches!(panel.format, Format::Bf12) { VECTOR_LOADS } else { 0 }
}

impl Gpu {
    /// How a launch is shared out: among as many cubes as processors have places for at a time.
    pub(super) fn group_share(&self, linear: &Linear<'_>, operands: RightOperands) -> GroupShare {
        let tokens = operands.tokens;
        let (panel, layout) = (linear.matrices[0].panel(), linear.matrices[0].layout());
        let matrices = linear.matrices_of_output();
        let bands = GROUP / matrices;
        let tiles = linear.cubes(bands * PANEL) * operands.stacks as u32;
        let places = places(layout, tokens);
        let teams = cluster_cubes(tiles, panel.columns / STEP, places * self.processors());
        let tile = TileShare { panel, layout, matrices, bands, teams, tokens };
        let most_bytes = self.most_bytes_for_places(places as usize);
        let is_whole = |matrix: &&Matrix| {
            layout == Layout::RowMajor || held_rows(matrix).is_multiple_of(PANEL)
        };
        let has_lines = linear.matrices.iter().all(is_whole);
        // Where more cubes than find places wait for one, processors take them as they come to be free.
        let are_all_there = tiles * teams as u32 <= places * self.processors();
        let least_bytes =
            if are_all_there { self.least_bytes_for_places(places as usize) } else { 0 };
        let least_words = least_bytes / size_of::<u32>();
        let share = GroupShare { tile, has_lines, stages: MOST_STAGES, least_words };
        let room = most_bytes.saturating_sub(BESIDE_BYTES) / LOAD_BYTES;
        let wanted = STAGED_BYTES.div_ceil(share.weight_loads() * LOAD_BYTES);
        let stages = wanted.min(room / share.stage()).clamp(LEAST_STAGES, MOST_STAGES);
        GroupShare { stages, ..share }
    }
}

/// Cubes that a processor has places for: the registers of planes that decode for many tokens leave none for a second
/// cube.
fn places(layout: Layout, tokens: usize) -> u32 {
    if layout == Layout::Panels && tokens > MOST_TOKENS_OF_TWO { 1 } else { 2 }
}

/// Cubes of a cluster: the most that leave each enough of `steps`, and of which all of `tiles` clusters are there at
/// once.
fn cluster_cubes(tiles: u32, steps: usize, places: u32) -> usize {
    let fits = |&cubes: &usize| {
        // Processors come in pairs.
        let part = if cubes == 2 { 1.0 } else { PLACES_OF_CLUSTERS };
        steps >= cubes * LEAST_STEPS && f64::from(tiles) * cubes as f64 <= f64::from(places) * part
    };
    (2..=MOST_CUBES).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_fill_processors_and_leave_each_cube_some_steps() {
        // Matrices of the 8 B shape on 132 processors: output, down, q with k and v, gate with up.
        let of = |tiles, columns: usize| cluster_cubes(tiles, columns / STEP, 264);
        assert_eq!([of(32, 4096), of(32, 14336), of(48, 4096), of(224, 4096)], [7, 7, 4, 1]);
        // Of more tokens, of which a processor has a place for one cube.
        let of_many = |tiles, columns: usize| cluster_cubes(tiles, columns / STEP, 132);
        assert_eq!([of_many(32, 4096), of_many(48, 4096), of_many(224, 4096)], [3, 2, 1]);
        // Of two stacks.
        assert_eq!([of_many(64, 4096), of_many(96, 4096)], [2, 1]);
        // Few columns are shared by few.
        let columns = [256, 512, 832, 1088, 1344, 1600, 1856, 2048];
        assert_eq!(columns.map(|columns| of(3, columns)), [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}
