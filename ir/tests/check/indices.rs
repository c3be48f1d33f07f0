//! Elements that kernels of GPUs count.

use ir::plan::Plan;

use crate::findings;
use crate::plans::{one_device, streamed};

/// What a plan writes too much of where one of its programs takes so many tokens.
fn uncounted(mut plan: Plan, program: usize, tokens: u32) -> Vec<String> {
    plan.programs[program].max.tokens = tokens;
    let found = findings(&plan).into_iter();
    found.filter(|found| found.contains("count them in 32 bits")).collect()
}

#[test]
fn gpus_count_elements_in_32_bits() {
    // Tokens have eight features.
    let many = 1 << 29;
    assert_eq!(
        uncounted(streamed(), 0, many)[0],
        "s0 (embed) of prefill: it writes 4294967296 elements to b0 of gpu0, whose kernels count them in 32 bits: \
         lower --prefill-tokens"
    );
    assert_eq!(
        uncounted(streamed(), 1, many)[0],
        "s0 (embed) of decode: it writes 4294967296 elements to b0 of gpu0, whose kernels count them in 32 bits: \
         lower --max-sequences"
    );
    assert_eq!(uncounted(streamed(), 0, many - 1), [""; 0]);
    assert_eq!(uncounted(one_device(), 0, u32::MAX), [""; 0]);
}
