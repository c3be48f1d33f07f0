//! Matrix instructions that four planes of a Hopper GPU make together: 64 × N × 16 with bf16 elements and f32 sums,
//! PTX's `wgmma.m64nNk16`.
//!
//! - Of the left operand each of the four planes, which follow one another from a multiple of four on, holds 16 rows,
//!   as [`super::instructions`] lays them down.
//! - Or it lies in shared memory, as the device copies a *box*: 16 columns out of 64 that are 128 bytes of each of some
//!   rows, 64 of them for an operand, line after line; of those, each 16 bytes change places with others of the line, by
//!   the line's number.
//! - The right operand lies in shared memory: 16 bytes are eight rows of a column, 128 bytes eight columns, all columns
//!   of eight rows follow one another, and so do the rows.
//! - Cubes of a *cluster* run at the same time and read each other's shared memory.
//! - What lies in order is copied to shared memory by the device itself (PTX's `cp.async.bulk`). A *barrier*, 8 bytes
//!   of shared memory, turns over when as many units have arrived as it counts and all announced bytes are there; units
//!   wait for the end of the turn whose number is even or odd.
//! - Sums of eight columns are a lane's as of one instruction of a plane. They are registers that only assembly knows,
//!   by number: instructions add to them where they are, which CubeCL's assembly, whose operands are either read or
//!   written, has no word for.

#![expect(unsafe_code, reason = "assembly is given addresses")]

use cubecl::ir::features::Tma;
use cubecl::prelude::*;
use cubecl_cpp::cuda::ptx::tensor_map_address;

use super::device::Gpu;
use super::instructions::{PLANE, Packed};
use super::registers::held;

/// Rows of activations as right operands, in bf16: `[stacks][columns / 8][tokens][8]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RightOperands {
    /// Operands, each of other tokens.
    pub stacks: usize,
    /// Columns of an operand: tokens, and what pads them, whose products nobody reads.
    pub tokens: usize,
    /// Whether the eight are every fourth pair of 32 columns, as [`super::portion`] gives them to lanes, and not
    /// neighbours.
    pub is_spread: bool,
    /// What activations are multiplied with: a power of two.
    pub factor: f32,
}

impl RightOperands {
    /// Tokens of all operands, and what pads them.
    pub fn count(self) -> usize {
        self.stacks * self.tokens
    }
}

/// Planes that make an instruction together.
pub(super) const GROUP: usize = 4;
/// Rows of the left operand that a plane holds.
const ROWS: usize = 16;
/// From eight columns of a right operand to the next, in 16 bytes: the upper half of what describes it.
const EIGHT_COLUMNS: u32 = 8;
/// Bytes of a line of a box.
pub(super) const LINE_BYTES: usize = 128;
/// After so many lines the places of 16 bytes in them come again.
pub(super) const TURN_LINES: usize = 8;
/// What boxes are aligned to in shared memory.
pub(super) const BOX_ALIGNMENT: usize = TURN_LINES * LINE_BYTES;
/// The upper half of what describes a left operand in a box: from eight rows to the next, in 16 bytes, and that the
/// bytes of its lines change places.
const BOX_ROWS: u32 = (BOX_ALIGNMENT / 16) as u32 | 1 << 30;

impl Gpu {
    /// Whether it has these instructions: no GPU before Hopper, which first had clusters, and none after, which copy
    /// images in another way, too.
    pub(crate) fn has_warpgroups(&self) -> bool {
        let features = &self.client.properties().features;
        features.cube_cluster && !features.tma.contains(Tma::Im2colWide)
    }
}

/// Sums of a lane for `columns` columns of one left operand.
pub(super) fn lane_sums(columns: usize) -> usize {
    ROWS * columns / 32
}

/// What assembly calls sum `number`.
fn sum(number: usize) -> String {
    format!("sums{number}")
}

/// The sums of left operand `operand` as a vector of assembly.
fn sums(operand: usize, columns: usize) -> String {
    let count = lane_sums(columns);
    let names: Vec<String> = (operand * count..(operand + 1) * count).map(sum).collect();
    format!("{{{}}}", names.join(", "))
}

/// Declares `count` sums: once in a kernel, outside of loops and of what is called more than once.
#[cube]
pub(super) fn declare_sums(#[comptime] count: usize) {
    gpu_asm!(".reg .f32 sums<{count}>;", count = const count);
}

/// Sets the first `count` sums to zero.
#[cube]
pub(super) fn clear_sums(#[comptime] count: usize) {
    #[unroll]
    for number in 0..count {
        let name = comptime!(sum(number));
        gpu_asm!("mov.f32 {name}, 0f00000000;", name = const name);
    }
}

/// A sum; those who add to it have been waited for.
#[cube]
pub(super) fn read_sum(#[comptime] number: usize) -> f32 {
    let name = comptime!(sum(number));
    let value: f32;
    gpu_asm!("mov.f32 {value}, {name};", name = const name, value = out(_) value);
    value
}

/// Begins to add the products of 32 columns of two left operands: `lefts` are those of the first 16 columns, then of
/// the others. [`wait_for_products()`] waits for them.
#[cube]
pub(super) fn multiply_group(lefts: &Array<Packed>, right: u32, #[comptime] columns: usize) {
    let (first, second) = comptime!((sums(0, columns), sums(1, columns)));
    let instruction =
        comptime!(format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"));
    // From 16 rows to the next.
    let step = comptime!(2 * columns);
    let (a, b) = (held::<Packed>(lefts[0]), held::<Packed>(lefts[1]));
    let (c, d) = (held::<Packed>(lefts[2]), held::<Packed>(lefts[3]));
    let right = held::<u32>(right);
    gpu_asm!(
        "{{ .reg .pred adds; .reg .b32 next, stride; .reg .b64 right<2>; setp.eq.u32 adds, 0, 0; ",
        "mov.u32 stride, {EIGHT_COLUMNS}; add.u32 next, {right}, {step}; ",
        "mov.b64 right0, {{{right}, stride}}; mov.b64 right1, {{next, stride}}; ",
        "wgmma.fence.sync.aligned; ",
        "{instruction} {first}, {a}, right0, adds, 1, 1, 0; ",
        "{instruction} {second}, {b}, right0, adds, 1, 1, 0; ",
        "{instruction} {first}, {c}, right1, adds, 1, 1, 0; ",
        "{instruction} {second}, {d}, right1, adds, 1, 1, 0; ",
        "wgmma.commit_group.sync.aligned; }}",
        instruction = const instruction, first = const first, second = const second,
        EIGHT_COLUMNS = const EIGHT_COLUMNS, step = const step,
        right = in(_) right, a = in(_) a, b = in(_) b, c = in(_) c, d = in(_) d,
    );
}

/// Begins to add the products of 64 columns of two left operands in shared memory, each a box of 64 rows: `left` is
/// [`left_operand()`] of the first, which the second follows.
#[cube]
pub(super) fn multiply_boxes(left: u32, right: u32, #[comptime] columns: usize) {
    let (first, second) = comptime!((sums(0, columns), sums(1, columns)));
    let instruction =
        comptime!(format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16"));
    // From 16 rows to the next, of the left operand from 16 columns to the next, and from box to box.
    let step = comptime!(2 * columns);
    let (left_step, of_box) = comptime!((2u32, (GROUP * ROWS * LINE_BYTES / 16) as u32));
    let (left, right) = (held::<u32>(left), held::<u32>(right));
    gpu_asm!("wgmma.fence.sync.aligned;");
    #[unroll]
    for turn in 0..4usize {
        let (left_by, right_by) = comptime!((left_step * turn as u32, (step * turn) as u32));
        gpu_asm!(
            "{{ .reg .pred adds; .reg .b32 at, rows; .reg .b64 left<2>, right; setp.eq.u32 adds, 0, 0; ",
            "mov.u32 rows, {BOX_ROWS}; add.u32 at, {left}, {left_by}; mov.b64 left0, {{at, rows}}; ",
            "add.u32 at, at, {of_box}; mov.b64 left1, {{at, rows}}; ",
            "mov.u32 rows, {EIGHT_COLUMNS}; add.u32 at, {right}, {right_by}; mov.b64 right, {{at, rows}}; ",
            "{instruction} {first}, left0, right, adds, 1, 1, 0, 0; ",
            "{instruction} {second}, left1, right, adds, 1, 1, 0, 0; }}",
            instruction = const instruction, first = const first, second = const second,
            BOX_ROWS = const BOX_ROWS, EIGHT_COLUMNS = const EIGHT_COLUMNS, of_box = const of_box,
            left_by = const left_by, right_by = const right_by,
            left = in(_) left, right = in(_) right,
        );
    }
    gpu_asm!("wgmma.commit_group.sync.aligned;");
}

/// Waits for the products that this plane's group has begun by [`multiply_group()`] or [`multiply_boxes()`], but for the
/// last `newest` times.
#[cube]
pub(super) fn wait_for_products(#[comptime] newest: u32) {
    gpu_asm!("wgmma.wait_group.sync.aligned {newest};", newest = const newest);
}

/// Waits for this plane's group: no other planes of the cube.
#[cube]
pub(super) fn sync_group() {
    // Barrier 0 is the cube's.
    gpu_asm!("bar.sync 1, {units};", units = const comptime!(GROUP as u32 * PLANE));
}

/// Makes a barrier that counts `arrivals` arrivals. [`show_barriers()`] comes before anybody else uses it.
#[cube]
pub(super) fn make_barrier(barrier: u32, arrivals: u32) {
    let (barrier, arrivals) = (held::<u32>(barrier), held::<u32>(arrivals));
    gpu_asm!(
        "mbarrier.init.shared::cta.b64 [{barrier}], {arrivals};",
        barrier = in(_) barrier, arrivals = in(_) arrivals,
    );
}

/// Lets others see the barriers that this unit made, once it is waited for.
#[cube]
pub(super) fn show_barriers() {
    gpu_asm!("fence.mbarrier_init.release.cluster;");
}

/// Arrives at a barrier.
#[cube]
pub(super) fn arrive(barrier: u32) {
    let barrier = held::<u32>(barrier);
    gpu_asm!("mbarrier.arrive.shared::cta.b64 _, [{barrier}];", barrier = in(_) barrier);
}

/// Arrives at a barrier and announces bytes that are copied. One unit of a plane does, all of whose units come.
#[cube]
pub(super) fn announce(barrier: u32, bytes: u32) {
    let (barrier, bytes) = (held::<u32>(barrier), held::<u32>(bytes));
    gpu_asm!(
        "{{ .reg .pred first; elect.sync _|first, 0xffffffff; ",
        "@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {bytes}; }}",
        barrier = in(_) barrier, bytes = in(_) bytes,
    );
}

/// Waits until a turn of a barrier is over: the first and every other one, or those between.
#[cube]
pub(super) fn wait_for_turn(barrier: u32, is_odd: u32) {
    let (barrier, is_odd) = (held::<u32>(barrier), held::<u32>(is_odd));
    gpu_asm!(
        "{{ .reg .pred over; again: mbarrier.try_wait.parity.shared::cta.b64 over, [{barrier}], {is_odd}; ",
        "@over bra done; bra again; done: }}",
        barrier = in(_) barrier, is_odd = in(_) is_odd,
    );
}

/// Begins to copy `bytes` bytes, a multiple of 16 that has been announced at the barrier, from global memory, from the
/// first of `from` on. One unit of a plane does, all of whose units come, as with [`copy_box()`].
#[cube]
pub(super) fn copy_in_bulk(from: &[Packed], to: u32, bytes: u32, barrier: u32) {
    // SAFETY: the bytes that are announced at the barrier are there.
    let pointer = unsafe { from.as_ptr_unchecked() };
    let (to, bytes, barrier) = (held::<u32>(to), held::<u32>(bytes), held::<u32>(barrier));
    gpu_asm!(
        "{{ .reg .pred first; .reg .u64 global; elect.sync _|first, 0xffffffff; cvta.to.global.u64 global, {from}; ",
        "@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes ",
        "[{to}], [global], {bytes}, [{barrier}]; }}",
        from = in(_) pointer, to = in(_) to, bytes = in(_) bytes, barrier = in(_) barrier,
    );
}

/// Begins to copy a box, all of whose bytes have been announced at the barrier, from 4 bytes number `word` of line `line`
/// of layer `layer` of a matrix on. What lies outside of the matrix becomes zeros.
#[cube]
pub(super) fn copy_box(
    matrix: &TensorMap<u32, Tiled>,
    word: u32,
    line: u32,
    layer: u32,
    to: u32,
    barrier: u32,
) {
    let map = tensor_map_address::<u32, Tiled>(matrix);
    let (word, line, layer) = (held::<u32>(word), held::<u32>(line), held::<u32>(layer));
    let (to, barrier) = (held::<u32>(to), held::<u32>(barrier));
    gpu_asm!(
        "{{ .reg .pred first; elect.sync _|first, 0xffffffff; ",
        "@first cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes ",
        "[{to}], [{map}, {{{word}, {line}, {layer}}}], [{barrier}]; }}",
        map = in(_) map, word = in(_) word, line = in(_) line, layer = in(_) layer,
        to = in(_) to, barrier = in(_) barrier,
    );
}

/// The lower half of what describes a left operand that is a box, which begins at `address` in shared memory, a multiple
/// of [`BOX_ALIGNMENT`].
#[cube]
pub(super) fn left_operand(address: u32) -> u32 {
    (address & 0x3ffffu32) >> 4u32
}

/// The lower half of what describes a right operand of `columns` columns that begins at `address` in shared memory.
#[cube]
pub(super) fn right_operand(address: u32, #[comptime] columns: usize) -> u32 {
    (address & 0x3ffffu32) >> 4u32 | comptime!((columns as u32) << 16)
}

/// Where a cube sees the first element of a stretch of its shared memory.
#[cube]
pub(super) fn shared_address<T: CubePrimitive>(stretch: &[T]) -> u32 {
    // SAFETY: only where it points to is asked for.
    let pointer = unsafe { stretch.as_ptr_unchecked() };
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 whole; cvta.to.shared.u64 whole, {p}; cvt.u32.u64 {d}, whole; }}",
        p = in(_) pointer, d = out(_) address,
        options(pure, nomem),
    );
    address
}

/// Four numbers of the cube's shared memory, at a multiple of 16 bytes.
#[cube]
pub(super) fn load_four(address: u32) -> Packed {
    let address = held::<u32>(address);
    let four: Packed;
    gpu_asm!("ld.shared.v4.u32 {four}, [{address}];", address = in(_) address, four = out(_) four);
    four
}

/// Two numbers of the cube's shared memory, at a multiple of 8 bytes.
#[cube]
pub(super) fn load_two(address: u32) -> Vector<u32, Const<2>> {
    let address = held::<u32>(address);
    let two: Vector<u32, Const<2>>;
    gpu_asm!("ld.shared.v2.u32 {two}, [{address}];", address = in(_) address, two = out(_) two);
    two
}

/// Waits for all cubes of the cluster, and shows them what this one wrote to shared memory. Planes come whole.
#[cube]
pub(super) fn sync_cluster() {
    gpu_asm!("barrier.cluster.arrive.release.aligned;");
    gpu_asm!("barrier.cluster.wait.acquire.aligned;");
}

/// The number at that place of the shared memory of a cube of the cluster, which is laid out as this one's.
#[cube]
pub(super) fn load_of_cube(values: &[u32], rank: u32) -> u32 {
    let address = shared_address::<u32>(values);
    let (address, rank) = (held::<u32>(address), held::<u32>(rank));
    let value: u32;
    gpu_asm!(
        "{{ .reg .u32 there; mapa.shared::cluster.u32 there, {address}, {rank}; ",
        "ld.shared::cluster.u32 {value}, [there]; }}",
        address = in(_) address, rank = in(_) rank, value = out(_) value,
    );
    value
}

/// Four numbers at that place, a multiple of 16 bytes, of the shared memory of a cube of the cluster.
#[cube]
pub(super) fn load_four_of_cube(values: &[u32], rank: u32) -> Packed {
    let address = shared_address::<u32>(values);
    let (address, rank) = (held::<u32>(address), held::<u32>(rank));
    let four: Packed;
    gpu_asm!(
        "{{ .reg .u32 there; mapa.shared::cluster.u32 there, {address}, {rank}; ",
        "ld.shared::cluster.v4.u32 {four}, [there]; }}",
        address = in(_) address, rank = in(_) rank, four = out(_) four,
    );
    four
}
