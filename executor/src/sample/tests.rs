//! Sampling against its definition, and its distributions against what they should be.

use proptest::prelude::*;

use super::*;

/// The probability of each id by the definition: everything sorted, step by step.
fn defined(options: &SamplingOptions, logits: &[f32]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let mut kept = order.clone();
    if options.top_k > 0 {
        let last = logits[order[options.top_k.min(order.len()) - 1]];
        kept.retain(|&id| logits[id] >= last);
    }
    let weight =
        |id: usize| f64::from(((logits[id] - logits[order[0]]) / options.temperature).exp());
    if options.top_p < 1.0 {
        let total: f64 = kept.iter().map(|&id| weight(id)).sum();
        let mut sum = 0.0;
        kept = kept
            .into_iter()
            .take_while(|&id| {
                let stays = sum < f64::from(options.top_p) * total;
                sum += weight(id);
                stays
            })
            .collect();
    }
    kept.retain(|&id| weight(id) >= f64::from(options.min_p));
    let total: f64 = kept.iter().map(|&id| weight(id)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    for id in kept {
        probabilities[id] = weight(id) / total;
    }
    probabilities
}

fn options(temperature: f32, top_k: usize, top_p: f32, min_p: f32) -> SamplingOptions {
    SamplingOptions { temperature, top_k, top_p, min_p, ..SamplingOptions::default() }
}

/// Draws often and compares how often each id came with how often it should.
#[track_caller]
fn check(options: &SamplingOptions, logits: &[f32]) {
    const DRAWS: usize = 40_000;
    let mut sampler = Sampler::new(options);
    let mut counts = vec![0_usize; logits.len()];
    for _ in 0..DRAWS {
        counts[sampler.sample(logits).unwrap() as usize] += 1;
    }
    for (id, (probability, count)) in defined(options, logits).into_iter().zip(counts).enumerate() {
        let expected = probability * DRAWS as f64;
        // Five standard deviations of a binomial count.
        let allowed = 5.0 * (expected * (1.0 - probability)).sqrt();
        let error = (count as f64 - expected).abs();
        assert!(error <= allowed, "{options:?}: id {id} came {count} times, not {expected:.0}");
    }
}

#[test]
fn draws_have_the_defined_distribution() {
    let logits = [1.0, 3.0, 2.5, -1.0, 3.0, 0.0, f32::NEG_INFINITY, 2.0];
    for options in [
        options(1.0, 0, 1.0, 0.0),
        options(0.5, 0, 1.0, 0.0),
        options(3.0, 0, 1.0, 0.0),
        options(1.0, 3, 1.0, 0.0),
        options(1.0, 1, 1.0, 0.0),
        options(1.0, 0, 0.7, 0.0),
        options(1.0, 0, 0.05, 0.0),
        options(1.0, 0, 1.0, 0.3),
        options(1.3, 5, 0.9, 0.2),
        options(0.001, 0, 0.9, 0.0),
    ] {
        check(&options, &logits);
    }
}

#[test]
fn greedy_takes_the_lowest_of_equal_ids() {
    let mut sampler = Sampler::new(&SamplingOptions::default());
    let mut logits = vec![0.5; 100];
    assert_eq!(sampler.sample(&logits).unwrap(), 0);
    logits[97] = 2.0;
    logits[40] = 2.0;
    assert_eq!(sampler.sample(&logits).unwrap(), 40);
    assert_eq!(highest(&[-3.0, -2.0, -2.0]).unwrap().id, 1);
}

#[test]
fn a_seed_gives_the_same_tokens_and_another_one_others() {
    let logits: Vec<f32> = (0..1000).map(|id| ((id * 37) % 101) as f32 / 40.0).collect();
    let draw = |seed: u64, options: SamplingOptions| {
        let mut sampler = Sampler::new(&SamplingOptions { seed, ..options });
        (0..20).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
    };
    for options in
        [options(1.0, 0, 1.0, 0.0), options(1.0, 50, 1.0, 0.0), options(1.0, 0, 0.9, 0.0)]
    {
        assert_eq!(draw(1, options.clone()), draw(1, options.clone()));
        assert_ne!(draw(1, options.clone()), draw(2, options));
    }
}

#[test]
fn the_repetition_penalty_counts_an_id_once() {
    let options = SamplingOptions { repetition_penalty: 2.0, ..SamplingOptions::default() };
    let mut sampler = Sampler::new(&options);
    sampler.observe(&[0, 0, 2, 900]);
    // Penalised: 4 / 2, 1.5, -1 * 2, 1.9.
    assert_eq!(sampler.sample(&[4.0, 1.5, -1.0, 1.9]).unwrap(), 0);
    assert_eq!(sampler.sample(&[4.0, 2.5, -1.0, 1.9]).unwrap(), 1);
    // What was chosen is penalised from then on.
    assert_eq!(sampler.sample(&[3.0, 2.5, -1.0, 1.9]).unwrap(), 3);
    // Negative logits move away from zero.
    assert_eq!(sampler.sample(&[-9.0, -9.0, -1.0, -9.0, -1.5]).unwrap(), 4);
}

#[test]
fn logits_that_are_no_numbers_are_an_error() {
    let check = |logits: &[f32], expected: &str| {
        for options in [options(0.0, 0, 1.0, 0.0), options(1.0, 2, 0.9, 0.0)] {
            let error = Sampler::new(&options).sample(logits).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    };
    check(&[0.0, f32::NAN, 1.0], "the logit of token 1 is NaN");
    check(&[0.0, 1.0, f32::INFINITY], "the logit of token 2 is inf");
    check(&[f32::NEG_INFINITY; 3], "no token has a finite logit among 3");
    check(&[], "no token has a finite logit among 0");
    let mut long = vec![0.0; 40];
    long[20] = f32::NAN;
    check(&long, "the logit of token 20 is NaN");
}

#[test]
fn values_out_of_range_are_named() {
    let check = |options: SamplingOptions, expected: &str| {
        assert_eq!(options.check().unwrap_err().to_string(), expected);
    };
    check(options(-1.0, 0, 1.0, 0.0), "temperature is -1, but must be 0 or more");
    check(options(f32::NAN, 0, 1.0, 0.0), "temperature is NaN, but must be 0 or more");
    check(options(1.0, 0, 0.0, 0.0), "top-p is 0, but must be above 0 and at most 1");
    check(options(1.0, 0, 1.0, 1.5), "min-p is 1.5, but must be between 0 and 1");
    let penalty = |repetition_penalty: f32| SamplingOptions {
        repetition_penalty,
        ..SamplingOptions::default()
    };
    check(penalty(0.0), "repetition penalty is 0.0, but must be between 0.001 and 1000");
    check(penalty(1e5), "repetition penalty is 100000.0, but must be between 0.001 and 1000");
    // So small a number would make logits infinite.
    assert!(penalty(1e-39).check().is_err());
    assert!(penalty(f32::NAN).check().is_err());
}

#[test]
fn values_that_a_greedy_choice_does_not_use_may_be_anything() {
    options(0.0, 0, 0.0, 7.0).check().unwrap();
}

#[test]
fn a_tiny_temperature_is_greedy() {
    let mut sampler = Sampler::new(&options(f32::MIN_POSITIVE, 0, 0.9, 0.1));
    assert_eq!(sampler.sample(&[80.0, 90.0, -100.0, 89.9]).unwrap(), 1);
}

proptest! {
    /// The candidates that are left are those of the definition, at a size where selection
    /// works in parts.
    #[test]
    fn selection_keeps_what_sorting_keeps(
        logits in prop::collection::vec(-12_i16..12, 1..3000),
        fine in any::<bool>(),
        top_k in prop::sample::select(vec![0_usize, 1, 7, 50, 500, 5000]),
        top_p in prop::sample::select(vec![0.1_f32, 0.5, 0.95, 0.999, 1.0]),
        min_p in prop::sample::select(vec![0.0_f32, 0.05, 0.5]),
    ) {
        // Ties where coarse; distinct logits, so that ties cannot hide an error, where fine.
        let logits: Vec<f32> = logits
            .iter()
            .enumerate()
            .map(|(i, &logit)| f32::from(logit) + if fine { i as f32 / 3000.0 } else { 0.0 })
            .collect();
        let options = options(1.0, top_k, top_p, min_p);
        let mut sampler = Sampler::new(&options);
        let id = sampler.sample(&logits).unwrap();
        let defined = defined(&options, &logits);
        prop_assert!(defined[id as usize] > 0.0);
        let mut kept: Vec<u32> = sampler.candidates.iter().map(|candidate| candidate.id).collect();
        kept.sort_unstable();
        let expected: Vec<u32> =
            (0..).zip(&defined).filter_map(|(id, &share)| (share > 0.0).then_some(id)).collect();
        if top_p == 1.0 {
            prop_assert_eq!(kept, expected);
            return Ok(());
        }
        // Sums in another order may put the last candidate on the other side of top-p.
        prop_assert!(kept.len().abs_diff(expected.len()) <= 1);
        let both = kept.iter().filter(|id| expected.contains(id)).count();
        prop_assert!(both + 1 >= kept.len().max(expected.len()), "{} of {}", both, expected.len());
    }
}

/// Tokens of a list, as the kernel makes it.
const LISTED: usize = ir::workspace::shortlist::LISTED_TOKENS as usize;

/// The list of a row, by the plain form: everything sorted.
fn listed(logits: &[f32], inverse_temperature: f32) -> (Vec<f32>, Vec<f32>, f32) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let most = logits[order[0]];
    let weight = logits.iter().map(|logit| ((logit - most) * inverse_temperature).exp()).sum();
    order.truncate(LISTED);
    (
        order.iter().map(|&id| logits[id]).collect(),
        order.iter().map(|&id| id as f32).collect(),
        weight,
    )
}

/// The choice from the list, where the sampler asks for one; it must be that from all logits.
fn choose_both_ways(options: &SamplingOptions, seen: &[u32], logits: &[f32]) -> Option<u32> {
    let mut from_all = Sampler::new(options);
    from_all.observe(seen);
    let mut from_list = from_all.clone();
    let (values, ids, weight) = listed(logits, from_list.inverse_temperature()?);
    let list = Shortlist { logits: &values, ids: &ids, weight };
    let chosen = from_list.sample_shortlist(&list).unwrap();
    if let Some(chosen) = chosen {
        assert_eq!(chosen, from_all.sample(logits).unwrap(), "{options:?}, {seen:?} seen");
    } else {
        assert_eq!(
            from_list.inverse_temperature(),
            None,
            "a list that was too short is not asked for again"
        );
    }
    chosen
}

proptest! {
    #[test]
    fn a_list_gives_the_choice_of_all_logits_or_none(
        steps in proptest::collection::vec(0_u32..60, 300..500),
        temperature in prop_oneof![Just(0.0_f32), 0.1_f32..2.0],
        top_k in prop_oneof![Just(0_usize), 1_usize..200],
        top_p in prop_oneof![Just(1.0_f32), 0.1_f32..1.0],
        min_p in prop_oneof![Just(0.0_f32), 0.0_f32..0.5],
        repetition_penalty in prop_oneof![Just(1.0_f32), 0.8_f32..1.5],
        seen in proptest::collection::vec(0_u32..300, 0..40),
        seed in 0_u64..1000,
    ) {
        // Few different logits, so that many are equal.
        let logits: Vec<f32> = steps.iter().map(|&step| step as f32 * 0.25 - 8.0).collect();
        let options = SamplingOptions { temperature, top_k, top_p, min_p, repetition_penalty, seed };
        choose_both_ways(&options, &seen, &logits);
    }
}

#[test]
fn a_list_is_enough_where_few_tokens_are_likely() {
    let logits: Vec<f32> = (0..50_000).map(|id| -((id * 7919 % 50_000) as f32) * 0.05).collect();
    let seen: Vec<u32> = (0..200).collect();
    for (options, seen) in [
        (options(0.0, 0, 1.0, 0.0), [].as_slice()),
        (SamplingOptions { repetition_penalty: 1.1, ..options(0.0, 0, 1.0, 0.0) }, &seen),
        (SamplingOptions { repetition_penalty: 1.1, ..options(0.7, 20, 0.8, 0.0) }, &seen),
        (options(0.7, 50, 1.0, 0.0), &[]),
        (options(0.6, 0, 0.9, 0.0), &[]),
        (options(1.0, 0, 0.95, 0.1), &[]),
        (options(1.0, 0, 1.0, 0.05), &[]),
    ] {
        assert!(choose_both_ways(&options, seen, &logits).is_some(), "{options:?}");
    }
    // What keeps every token needs all logits, and so does what raises some.
    assert!(Sampler::new(&options(1.0, 0, 1.0, 0.0)).inverse_temperature().is_none());
    let raising = SamplingOptions { repetition_penalty: 0.9, ..options(0.0, 0, 1.0, 0.0) };
    assert!(Sampler::new(&raising).inverse_temperature().is_none());
}

#[test]
fn a_list_that_starts_with_no_number_is_refused() {
    use crate::kernels::gpu::shortlist::{IMPOSSIBLE, UNUSABLE};
    let ids: Vec<f32> = (0..LISTED).map(|id| id as f32).collect();
    for (first, expected) in [(UNUSABLE, "not a number"), (IMPOSSIBLE, "no token")] {
        let logits: Vec<f32> = [first].into_iter().chain(vec![IMPOSSIBLE; LISTED - 1]).collect();
        let list = Shortlist { logits: &logits, ids: &ids, weight: 1.0 };
        let error = Sampler::new(&SamplingOptions::default()).sample_shortlist(&list).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}
