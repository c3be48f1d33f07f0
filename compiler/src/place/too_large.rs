//! What is said where nothing fits: what lacks how many bytes, and what to ask for instead.

use anyhow::Result;
use ir::id::DeviceId;

use crate::explain::bytes;
use crate::options::{Options, Request};
use crate::place::Offer;
use crate::target::Target;
use crate::task::Task;

/// Why none of the offers, which lack memory, is taken. Those with the fewest cache blocks say whether the cache is
/// what does not fit, those with fewer tokens of a prefill whether what it computes with is.
pub(super) fn too_large(
    task: &Task<'_>,
    options: &Options,
    offers: &[Offer],
    offers_of: impl Fn(&Task<'_>) -> Result<Vec<Offer>>,
) -> Result<String> {
    let Some(offer) = offers.first() else { return Ok("no device can run the model".into()) };
    let target = task.target;
    // The device that lacks most, then those that lack something as well.
    let (device, missing) = offer.candidate.missing.expect("an offer that fits is taken");
    let others = offer.devices.iter().map(|(id, held)| (id, held.missing_bytes()));
    let others = others.filter(|(id, missing)| *id != device && *missing > 0);
    let lacks = |(device, missing): (DeviceId, u64), are_missing: &str| {
        let capacity = target.machine.devices[device].memory_bytes;
        format!(
            "{missing} bytes ({}){are_missing} on {}, which has {capacity} bytes ({})",
            bytes(missing),
            target.name(device),
            bytes(capacity),
        )
    };
    let mut all_lack = lacks((device, missing), " are missing");
    for other in others {
        all_lack += &format!(", and {}", lacks(other, ""));
    }
    let even = if offers.len() > 1 { "even " } else { "" };
    let lacks = format!(
        "{all_lack}, {even}with {} at a context of {} tokens",
        offer.candidate.name, target.context
    );
    let fits = |offers: Vec<Offer>| offers.iter().any(Offer::fits);
    let sequences = target.max_sequences;
    // One context, and something of each sequence.
    let fewest = target.blocks_per_sequence().max(sequences);
    let with_fewest = Target { blocks: fewest, ..target.clone() };
    if fewest < target.blocks && fits(offers_of(&Task::new(task.model, &with_fewest))?) {
        let least = target.cache_block_bytes(task.model) * u64::from(fewest);
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
    let with_tokens = |prefill_tokens: u32| {
        let fewer = Target { prefill_tokens, ..target.clone() };
        Ok::<bool, anyhow::Error>(fits(offers_of(&Task::new(task.model, &fewer))?))
    };
    let mut advice: Vec<String> = Vec::new();
    if let Some(tokens) = fewer_tokens(target.prefill_tokens, with_tokens)? {
        advice.push(format!("lower --prefill-tokens to {tokens}"));
    }
    if sequences > 1 {
        advice.push("lower --max-sequences".into());
    }
    advice.push("lower --context".into());
    advice.push("choose a --format of fewer bytes".into());
    if options.gpu_memory_bytes.is_some() {
        advice.push("raise --gpu-memory".into());
    }
    if options.request != Request::Any || !options.pins.is_empty() {
        advice.push("leave more of the choice of devices to the compiler".into());
    }
    let last = advice.pop().expect("a format can always be chosen");
    Ok(format!("the model does not fit: {lacks}; {} or {last}", advice.join(", ")))
}

/// The most tokens, of those halved again and again, that fit; `None` where not even one does.
fn fewer_tokens(asked: u32, fits: impl Fn(u32) -> Result<bool>) -> Result<Option<u32>> {
    if asked == 1 || !fits(1)? {
        return Ok(None);
    }
    // How often halved they do not fit, and how often they do: what fits does so with fewer tokens, too.
    let (mut too_few, mut enough) = (0, asked.ilog2());
    while too_few + 1 < enough {
        let between = too_few.midpoint(enough);
        if fits(asked >> between)? {
            enough = between;
        } else {
            too_few = between;
        }
    }
    Ok(Some(asked >> enough))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_halved_tokens_that_fit_are_found() {
        for asked in 1..200 {
            for most in 0..asked {
                let found = fewer_tokens(asked, |tokens| Ok(tokens <= most)).unwrap();
                let mut halved = std::iter::successors(Some(asked / 2), |tokens| Some(tokens / 2));
                let wanted = halved.find(|&tokens| tokens <= most).filter(|&tokens| tokens > 0);
                assert_eq!(found, wanted, "{most} of {asked} tokens fit");
            }
        }
    }
}
