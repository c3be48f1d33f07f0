//! What is said where nothing fits: what lacks how many bytes, and what to ask for instead.

use anyhow::Result;

use crate::explain::bytes;
use crate::options::{Options, Request};
use crate::place::{Offer, cache_block_bytes};
use crate::task::Task;

/// Why none of the offers, which lack memory with so many cache blocks, is taken. Those with the fewest blocks say
/// whether the cache is what does not fit.
pub(super) fn too_large(
    task: &Task<'_>,
    options: &Options,
    offers: &[Offer],
    blocks: u32,
    with_blocks: impl FnOnce(u32) -> Result<Vec<Offer>>,
) -> Result<String> {
    let Some(offer) = offers.first() else { return Ok("no device can run the model".into()) };
    let target = task.target;
    let (device, missing) = offer.candidate.missing.expect("an offer that fits is taken");
    let capacity = target.machine.devices[device].memory_bytes;
    let even = if offers.len() > 1 { "even " } else { "" };
    let lacks = format!(
        "{missing} bytes ({}) are missing on {}, which has {capacity} bytes ({}), {even}with {} at a context of {} \
         tokens",
        bytes(missing),
        target.name(device),
        bytes(capacity),
        offer.candidate.name,
        target.context
    );
    let fits = |offers: Vec<Offer>| offers.iter().any(|offer| offer.candidate.missing.is_none());
    let sequences = target.max_sequences;
    // One context, and something of each sequence.
    let fewest = target.blocks_per_sequence().max(sequences);
    if fewest < blocks && fits(with_blocks(fewest)?) {
        let least = cache_block_bytes(task) * u64::from(fewest);
        let least = format!("{least} bytes ({})", bytes(least));
        return Ok(match options.kv_cache_bytes {
            None => format!(
                "the KV cache of {sequences} sequences does not fit beside the model: {lacks}; lower --max-sequences \
                 or --context, or let sequences share a smaller cache with --kv-cache, of {least} at least"
            ),
            Some(_) => format!(
                "the KV cache does not fit beside the model: {lacks}; lower --kv-cache, which is {least} at least"
            ),
        });
    }
    let mut advice = Vec::new();
    if sequences > 1 {
        advice.push("lower --max-sequences");
    }
    advice.push("lower --context");
    advice.push("choose a --format of fewer bytes");
    if options.gpu_memory_bytes.is_some() {
        advice.push("raise --gpu-memory");
    }
    if options.request != Request::Any || !options.pins.is_empty() {
        advice.push("leave more of the choice of devices to the compiler");
    }
    let last = advice.pop().expect("a format can always be chosen");
    Ok(format!("the model does not fit: {lacks}; {} or {last}", advice.join(", ")))
}
