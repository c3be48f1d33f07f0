use ir::workspace::shortlist::{LIST_WORDS, LISTED_TOKENS, bytes};

use super::super::testing::gpu;
use super::{IMPOSSIBLE, UNUSABLE};

const LISTED: usize = LISTED_TOKENS as usize;

/// Logits, ids, and what all tokens weigh.
type List = (Vec<f32>, Vec<u32>, f32);

fn listed(logits: &[f32], rows: usize, inverse_temperatures: &[f32]) -> Option<Vec<List>> {
    let gpu = gpu()?;
    let vocabulary = logits.len() / rows;
    let scratch = gpu.poisoned(bytes(rows as u32, vocabulary as u32) as usize);
    let (on_gpu, inverse_temperatures) = (gpu.upload(logits), gpu.upload(inverse_temperatures));
    let lists = gpu.shortlist(&on_gpu, [rows, vocabulary], &inverse_temperatures, &scratch);
    let words = gpu.download::<f32>(&lists, rows * LIST_WORDS as usize);
    let list = |words: &[f32]| {
        let ids = words[LISTED..2 * LISTED].iter().map(|&id| id as u32).collect();
        (words[..LISTED].to_vec(), ids, words[2 * LISTED])
    };
    Some(words.chunks(LIST_WORDS as usize).map(list).collect())
}

/// The plain form: sort all.
fn expected(row: &[f32], inverse_temperature: f32) -> (Vec<f32>, Vec<u32>, f64) {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    order.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]).then(a.cmp(&b)));
    order.truncate(LISTED);
    let most = f64::from(row[order[0] as usize]);
    let weigh = |&logit: &f32| ((f64::from(logit) - most) * f64::from(inverse_temperature)).exp();
    (order.iter().map(|&id| row[id as usize]).collect(), order, row.iter().map(weigh).sum())
}

/// Compares the lists of rows, of which each has a temperature of its own.
fn check(name: &str, logits: &[f32], rows: usize) {
    let vocabulary = logits.len() / rows;
    let inverse_temperatures: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
    let Some(lists) = listed(logits, rows, &inverse_temperatures) else { return };
    for (row, (values, ids, weight)) in lists.into_iter().enumerate() {
        // The device has no infinities.
        let of_row = &logits[row * vocabulary..(row + 1) * vocabulary];
        let of_row: Vec<f32> = of_row.iter().map(|logit| logit.max(IMPOSSIBLE)).collect();
        let expected = expected(&of_row, inverse_temperatures[row]);
        assert_eq!(ids, expected.1, "{name}, {vocabulary} tokens");
        assert_eq!(values, expected.0, "{name}, {vocabulary} tokens");
        let error = (f64::from(weight) / expected.2 - 1.0).abs();
        assert!(error < 1e-4, "{name}: all weigh {weight}, not {}", expected.2);
    }
}

fn random(i: usize) -> f32 {
    ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 1.0e6 - 8.0
}

#[test]
fn the_most_likely_tokens_come_in_falling_order_with_the_weight_of_all() {
    // One list, two, a few, two levels of merging; with ties, rising, falling.
    let vocabularies =
        [(1025, 2), (4096, 3), (4097, 2), (5000, 3), (32_003, 1), (128_256, 1), (300_001, 1)];
    for (vocabulary, rows) in vocabularies {
        let shapes: [(&str, &dyn Fn(usize) -> f32); 9] = [
            ("random", &random),
            ("tied", &|i| ((i * 7919) % 13) as f32),
            ("of three values", &|i| (i % 3) as f32),
            ("equal", &|_| 1.0),
            ("rising", &|i| i as f32 * 1e-3),
            ("falling", &|i| -(i as f32) * 1e-3),
            // Units take every 256th token: of twenty all are likely.
            ("of few units", &|i| random(i) + if i % 256 < 20 { 20.0 } else { 0.0 }),
            // All that one unit holds comes before what the next holds: most of what half of them hold is left to sort.
            ("unit by unit", &|i| -((i % 256) as f32) - (i / 256 % 16) as f32 / 64.0),
            // The other way round.
            ("unit by unit, rising", &|i| (i % 256) as f32 + (i / 256 % 16) as f32 / 64.0),
        ];
        for (name, shape) in shapes {
            let logits: Vec<f32> = (0..rows * vocabulary).map(shape).collect();
            check(name, &logits, rows);
        }
    }
}

#[test]
fn tokens_without_a_chance_fill_a_list_in_the_order_of_their_ids() {
    // Finite are fewer than a list has, of many units, of one, and none but the last.
    for vocabulary in [3000, 5000, 300_001] {
        let shapes: [(&str, &dyn Fn(usize) -> bool); 3] = [
            ("of many units", &|i| i % (vocabulary / 100) == 7),
            ("of one unit", &|i| i % 256 == 7 && i < 30_000),
            ("the last", &|i| i == vocabulary - 1),
        ];
        for (name, is_finite) in shapes {
            let logit = |i| if is_finite(i) { random(i) } else { f32::NEG_INFINITY };
            let logits: Vec<f32> = (0..vocabulary).map(logit).collect();
            check(name, &logits, 1);
        }
    }
}

#[test]
fn lists_are_the_same_each_time() {
    let logits: Vec<f32> = (0..3 * 32_003).map(random).collect();
    let lists = || listed(&logits, 3, &[0.5, 1.0, 2.0]);
    assert_eq!(lists(), lists());
}

#[test]
fn logits_that_are_no_numbers_come_first_and_impossible_ones_last() {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut logits = vec![f32::NEG_INFINITY; 3000];
        logits[2999] = bad;
        logits[5] = 1.0;
        let Some(lists) = listed(&logits, 1, &[1.0]) else { return };
        let (values, ids, _) = &lists[0];
        assert_eq!((values[0], ids[0]), (UNUSABLE, 2999));
        assert_eq!((values[1], ids[1]), (1.0, 5));
        assert_eq!((values[2], ids[2]), (IMPOSSIBLE, 0));
    }
}
