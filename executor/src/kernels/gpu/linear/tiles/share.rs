//! How the matrices, tokens and columns of a launch are shared out among cubes and planes.

use crate::kernels::cpu::pack::{PANEL, packed_bytes};
use crate::kernels::gpu::device::Gpu;
use crate::kernels::gpu::linear::Linear;
use crate::kernels::gpu::linear::rights::{OPERAND_TOKENS, PLANE};
use crate::kernels::gpu::matrix::Layout;
use crate::kernels::gpu::panel::Panel;
use crate::kernels::gpu::portion::portion_columns;
use crate::kernels::gpu::staged::{STAGES, STEP, STRIDE, VECTORS};

/// Tokens of a cube: few kinds, since each is compiled for itself.
const CUBE_TOKENS: [usize; 3] = [16, 32, 64];
/// Planes of a cube for each of [`CUBE_TOKENS`], whose registers fit a processor.
const CUBE_PLANES: [usize; 3] = [16, 16, 8];
/// Processors that take all that the L2 cache gives: one reads 64 bytes a clock, of 5.5 TB/s on an H200.
const CACHE_PROCESSORS: f64 = 50.0;

/// How the matrices of a launch are shared out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::kernels::gpu::linear) struct TileShare {
    pub(super) panel: Panel,
    pub(super) layout: Layout,
    /// Of one output, each taken by other planes.
    pub(super) matrices: usize,
    /// Planes of a matrix that take other rows.
    pub(super) bands: usize,
    /// Teams of a cube.
    pub(super) teams: usize,
    /// Tokens of a cube: whole operands.
    pub(super) tokens: usize,
}

impl TileShare {
    /// Planes of a team.
    pub(super) fn members(self) -> usize {
        self.matrices * self.bands
    }

    /// Planes of a cube.
    pub(super) fn planes(self) -> usize {
        self.members() * self.teams
    }

    /// 16-byte vectors from stage to stage of a team.
    pub(super) fn stage(self) -> usize {
        self.tokens * STRIDE
    }

    /// 16-byte vectors that a unit copies of a step, at most.
    pub(super) fn copies(self) -> usize {
        (self.tokens * VECTORS).div_ceil(self.members() * PLANE)
    }

    /// Bytes of shared memory of a cube: activations on their way, sums, and a place for squares that no norm needs.
    pub(super) fn shared_bytes(self) -> usize {
        let sums = (self.planes() * PANEL * self.tokens + 1) * size_of::<f32>();
        self.teams * STAGES * self.stage() * 16 + sums
    }

    /// Portions of a step.
    pub(super) fn portions(self) -> usize {
        STEP / portion_columns(self.panel)
    }

    /// Portions that a plane has in registers.
    pub(super) fn kept(self) -> usize {
        if self.portions() == 1 { 3 } else { 4 }
    }

    /// Steps of a team, the last of which may lie beyond the columns.
    pub(super) fn rounds(self) -> usize {
        self.panel.columns.div_ceil(STEP).div_ceil(self.teams)
    }

    /// Groups of tokens whose sums a plane has.
    pub(super) fn groups(self) -> usize {
        self.tokens / OPERAND_TOKENS
    }
}

impl Gpu {
    /// How a launch is shared out: the fewest tokens a cube of which all cubes are there at once, else the most.
    pub(in crate::kernels::gpu::linear) fn tile_share(&self, linear: &Linear<'_>) -> TileShare {
        let kind = CUBE_TOKENS.iter().position(|&tokens| linear.tokens <= tokens);
        let last = kind.unwrap_or(CUBE_TOKENS.len() - 1);
        let mut all = (0..=last).map(|kind| self.share_of_kind(linear, kind));
        let fits = |share: &TileShare| {
            let stacks = linear.tokens.div_ceil(share.tokens) as u32;
            linear.cubes(share.bands * PANEL) * stacks <= self.processors()
        };
        all.find(fits).unwrap_or_else(|| self.share_of_kind(linear, last))
    }

    /// How the planes of a cube of some tokens share its matrices, rows and columns, so that least time is spent on
    /// reading: with more rows activations are read less often, more cubes read at the same time.
    fn share_of_kind(&self, linear: &Linear<'_>, kind: usize) -> TileShare {
        let (panel, layout) = (linear.matrices[0].panel(), linear.matrices[0].layout());
        let matrices = linear.matrices_of_output();
        let (tokens, planes) = (CUBE_TOKENS[kind], CUBE_PLANES[kind]);
        let panel_bytes = packed_bytes(panel.format, PANEL, panel.columns);
        let time = |bands: &usize| {
            let cubes = linear.cubes(bands * PANEL);
            let waves = f64::from(cubes.div_ceil(self.processors()));
            let bytes = matrices * bands * panel_bytes + tokens * panel.columns * 2;
            bytes as f64 * waves.max(f64::from(cubes) / CACHE_PROCESSORS)
        };
        let bands = [1, 2, 4].into_iter().filter(|bands| 2 * bands * matrices <= planes);
        let bands = bands.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(1);
        let most_bytes = self.client.properties().hardware.max_shared_memory_size;
        let share = |teams| TileShare { panel, layout, matrices, bands, teams, tokens };
        let steps = panel.columns.div_ceil(STEP);
        let fits = |teams: &usize| share(*teams).shared_bytes() <= most_bytes;
        share((1..=steps.min(planes / (bands * matrices))).rev().find(fits).unwrap_or(1))
    }
}
