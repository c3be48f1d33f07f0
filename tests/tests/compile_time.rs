//! How long large models take to place, with the allocator of `hybridc`.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use compiler::Options;
use compiler::options::Objective;
use mimalloc::MiMalloc;
use tests::machines::{eight_unlike, gpu, linked, numa};
use tests::made_up::{LlamaShape, MadeUp};
use tests::shortest;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// One after the other: a placement takes all cores.
static ALONE: Mutex<()> = Mutex::new(());

const GIB: u64 = 1 << 30;

#[test]
fn eighty_blocks_beside_a_small_gpu_take_few_seconds() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
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

#[test]
fn seventy_billion_parameters_over_eight_unlike_devices_take_about_a_second() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().expect("a folder for the headers");
    MadeUp::llama(LlamaShape::LLAMA_70B).write(folder.path(), 4).expect("headers are written");
    let machine = eight_unlike();
    let compile = |objective| {
        let options = Options { objective, max_sequences: 4, ..Options::default() };
        let model = models::lower(folder.path()).expect("the headers are a model");
        let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ());
        plan.and_then(|plan| plan.to_ron()).expect("it fits");
    };
    for objective in Objective::ALL {
        // Half of it, on two cores by themselves; a machine that others use too is at times a third as fast.
        let most = Duration::from_secs(2);
        let taken = shortest(most, || compile(objective));
        assert!(taken < most, "for {objective} it took {taken:?}");
    }
}
