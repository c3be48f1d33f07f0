//! Where each buffer ends.

use ir::id::{BufferId, Few, StepId, Table};

use crate::clock::Clocks;

/// For each buffer but the output, the step that frees it, and the step's new dependencies where nothing
/// orders all uses yet.
///
/// A user of the buffer that comes after all others frees it; else the first step of its device that does;
/// else its last user, made to wait for the others.
pub(crate) fn place_frees(
    clocks: &Clocks,
    uses: &Table<BufferId, Few<StepId>>,
    owner_lane: impl Fn(BufferId) -> usize,
    lanes: &[Vec<StepId>],
    output: BufferId,
) -> Vec<(BufferId, StepId, Few<StepId>)> {
    let mut frees = Vec::new();
    for (buffer, users) in uses.iter().filter(|(buffer, _)| *buffer != output) {
        // Only the user with the highest number can come after all others.
        let last = *users.iter().max().expect("every buffer is written");
        if users.iter().all(|&user| clocks.is_before(user, last)) {
            frees.push((buffer, last, Few::new()));
        } else if let Some(step) = clocks.first_after(users, &lanes[owner_lane(buffer)]) {
            frees.push((buffer, step, Few::new()));
        } else {
            let others = users.iter().copied().filter(|&user| user != last).collect();
            frees.push((buffer, last, others));
        }
    }
    frees
}
