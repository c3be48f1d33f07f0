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

#[test]
fn the_most_likely_tokens_come_in_falling_order_with_the_weight_of_all() {
    // One list, a few, two levels of merging, three; with ties, rising, falling.
    for (vocabulary, rows) in [(1025, 2), (5000, 3), (32_003, 1), (300_001, 1)] {
        let random = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / 1.0e6 - 8.0;
        let shapes: [(&str, &dyn Fn(usize) -> f32); 4] = [
            ("random", &random),
            ("tied", &|i| ((i * 7919) % 13) as f32),
            ("rising", &|i| i as f32 * 1e-3),
            ("falling", &|i| -(i as f32) * 1e-3),
        ];
        for (name, shape) in shapes {
            let logits: Vec<f32> = (0..rows * vocabulary).map(shape).collect();
            let inverse_temperatures: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
            let Some(lists) = listed(&logits, rows, &inverse_temperatures) else { return };
            for (row, (values, ids, weight)) in lists.into_iter().enumerate() {
                let of_row = &logits[row * vocabulary..(row + 1) * vocabulary];
                let expected = expected(of_row, inverse_temperatures[row]);
                assert_eq!(ids, expected.1, "{name}, {vocabulary} tokens");
                assert_eq!(values, expected.0, "{name}, {vocabulary} tokens");
                let error = (f64::from(weight) / expected.2 - 1.0).abs();
                assert!(error < 1e-4, "{name}: all weigh {weight}, not {}", expected.2);
            }
        }
    }
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
