//! How long a large model takes to place beside a small GPU; alone in its file, since other tests would slow it down.

use std::time::Duration;

use compiler::Options;
use tests::machines::{gpu, linked, numa};
use tests::made_up::{LlamaShape, MadeUp};
use tests::shortest;

const GIB: u64 = 1 << 30;

#[test]
fn eighty_blocks_beside_a_small_gpu_take_few_seconds() {
    let model = MadeUp::llama(LlamaShape::LLAMA_70B).model();
    let machine = linked(vec![gpu(0, 40 * GIB), numa(0, 128 * GIB), numa(1, 128 * GIB)]);
    let compile = || {
        let plan = compiler::compile(&model, &machine, &Options::default(), &mut |_, _| ());
        plan.expect("it fits");
    };
    // A third of it, on two cores by themselves; a machine that others use too is at times a third as fast.
    let most = Duration::from_secs(3);
    let taken = shortest(most, compile);
    assert!(taken < most, "it took {taken:?}");
}
