//! Attention against a plain 64-bit reference that stores what the cache would.

use half::{bf16, f16};
use ir::op::{NormKind, Pairing};

use super::super::cache::CacheShape;
use super::super::rope::rope_table;
use super::super::testing::{Random, distance, with_team};
use super::*;

/// One attention over a few sequences, each fed in steps.
#[derive(Clone)]
struct Case {
    element: Element,
    /// Tokens of each step, for each sequence.
    steps: Vec<Vec<usize>>,
    heads: usize,
    kv_heads: usize,
    group: usize,
    first_head: usize,
    head_dim: usize,
    block_tokens: usize,
    window: Option<usize>,
    soft_cap: Option<f32>,
    has_norms: bool,
    rope: Option<(Pairing, usize)>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            element: Element::F32,
            steps: vec![vec![7, 1, 1]],
            heads: 4,
            kv_heads: 2,
            group: 2,
            first_head: 0,
            head_dim: 32,
            block_tokens: 16,
            window: None,
            soft_cap: None,
            has_norms: false,
            rope: Some((Pairing::Halves, 32)),
        }
    }
}

/// Everything random about a case, and what is cached.
struct Model {
    q_scale: Vec<f32>,
    k_scale: Vec<f32>,
    frequencies: Vec<f32>,
    /// Keys and values as stored, `[tokens][kv_heads][head_dim]`, for each sequence.
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

const EPSILON: f32 = 1e-6;
const MAGNITUDE: f32 = 1.1;

impl Case {
    /// What the cache holds of a row.
    fn stored(&self, row: &[f64]) -> Vec<f64> {
        let row = row.iter().map(|&value| value as f32);
        match self.element {
            Element::F32 => row.map(f64::from).collect(),
            Element::F16 => row.map(|value| f64::from(f16::from_f32(value).to_f32())).collect(),
            Element::Bf16 => row.map(|value| f64::from(bf16::from_f32(value).to_f32())).collect(),
            Element::Int8 => {
                let row: Vec<f32> = row.collect();
                let scale = row.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0;
                row.iter()
                    .map(|x| f64::from((x * (1.0 / scale)).round_ties_even() * scale))
                    .collect()
            }
        }
    }

    fn prepared(&self, head: &[f32], scale: &[f32], model: &Model, position: usize) -> Vec<f64> {
        let mut head: Vec<f64> = head.iter().map(|&value| f64::from(value)).collect();
        if self.has_norms {
            let squares: f64 = head.iter().map(|x| x * x).sum();
            let root = (squares / head.len() as f64 + f64::from(EPSILON)).sqrt();
            for (x, scale) in head.iter_mut().zip(scale) {
                *x = *x / root * (f64::from(*scale) + 1.0);
            }
        }
        let Some((pairing, dims)) = self.rope else { return head };
        for pair in 0..dims / 2 {
            let angle = f64::from(position as f32 * model.frequencies[pair]);
            let (sin, cos) = angle.sin_cos();
            let (sin, cos) = (sin * f64::from(MAGNITUDE), cos * f64::from(MAGNITUDE));
            let (i, j) = match pairing {
                Pairing::Halves => (pair, pair + dims / 2),
                Pairing::Neighbours => (2 * pair, 2 * pair + 1),
            };
            (head[i], head[j]) = (head[i] * cos - head[j] * sin, head[j] * cos + head[i] * sin);
        }
        head
    }

    /// The output row of one token, all of whose keys are stored.
    fn expected(&self, model: &Model, sequence: usize, q: &[f32], token: usize) -> Vec<f64> {
        let (keys, values) = (&model.keys[sequence], &model.values[sequence]);
        let first = self.window.map_or(0, |window| (token + 1).saturating_sub(window));
        let mut out = Vec::new();
        for head in 0..self.heads {
            let q = &q[head * self.head_dim..(head + 1) * self.head_dim];
            let q = self.prepared(q, &model.q_scale, model, token);
            let kv_head = (self.first_head + head) / self.group;
            let row = |token: usize| {
                let start = (token * self.kv_heads + kv_head) * self.head_dim;
                start..start + self.head_dim
            };
            let scores: Vec<f64> = (first..=token)
                .map(|j| {
                    let dot: f64 = q.iter().zip(&keys[row(j)]).map(|(q, k)| q * k).sum();
                    let score = dot * f64::from(self.scale());
                    self.soft_cap
                        .map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let largest = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            let total: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
            out.extend((0..self.head_dim).map(|dim| {
                let weight = |score: &f64| (score - largest).exp() / total;
                let seen = scores.iter().zip(first..);
                seen.map(|(score, j)| weight(score) * values[row(j)][dim]).sum::<f64>()
            }));
        }
        out
    }

    fn scale(&self) -> f32 {
        2.0 / (self.head_dim as f32).sqrt()
    }

    /// Runs all steps and returns the outputs, and the references of them if wanted.
    fn run(
        &self,
        team: &Team,
        isa: Isa,
        has_tiles: bool,
        is_expected: bool,
    ) -> (Vec<f32>, Vec<f64>) {
        let mut random = Random(0x1234_5678_9abc_def1 ^ self.head_dim as u64);
        let dims = self.rope.map_or(0, |(_, dims)| dims);
        let mut model = Model {
            q_scale: random.floats(self.head_dim),
            k_scale: random.floats(self.head_dim),
            frequencies: (0..dims / 2).map(|i| 0.7_f32.powi(i as i32)).collect(),
            keys: vec![Vec::new(); self.steps.len()],
            values: vec![Vec::new(); self.steps.len()],
        };
        let lengths: Vec<usize> = self.steps.iter().map(|steps| steps.iter().sum()).collect();
        let needed: Vec<usize> = lengths.iter().map(|l| l.div_ceil(self.block_tokens)).collect();
        let blocks = needed.iter().sum::<usize>() + 1;
        // Blocks are handed out from the last to the first, in turn, so that none of a sequence are neighbours.
        let mut free: Vec<u32> = (0..blocks as u32).collect();
        let mut tables = vec![Vec::new(); self.steps.len()];
        while tables.iter().zip(&needed).any(|(table, &needed)| table.len() < needed) {
            for (table, &needed) in tables.iter_mut().zip(&needed) {
                if table.len() < needed {
                    table.push(free.pop().unwrap());
                }
            }
        }
        let shape = CacheShape {
            element: self.element,
            blocks,
            kv_heads: self.kv_heads,
            block_tokens: self.block_tokens,
            head_dim: self.head_dim,
        };
        // What was there before is not a number in any format, and must not show.
        let words = shape.region_bytes().div_ceil(4);
        let (mut keys, mut values) = (vec![u32::MAX; words], vec![u32::MAX; words]);
        let rows = [self.heads, self.kv_heads, self.kv_heads].map(|heads| heads * self.head_dim);
        let (mut outputs, mut references) = (Vec::new(), Vec::new());
        let mut past = vec![0; self.steps.len()];
        for step in 0..self.steps.iter().map(Vec::len).max().unwrap() {
            let mut sequences = Vec::new();
            let (mut tokens, mut positions) = (0, Vec::new());
            for (i, steps) in self.steps.iter().enumerate() {
                let Some(&count) = steps.get(step) else { continue };
                let sequence = Sequence {
                    first_token: tokens,
                    tokens: count,
                    past: past[i],
                    blocks: &tables[i],
                };
                sequences.push((i, sequence));
                positions.extend((past[i]..past[i] + count).map(|position| position as u32));
                tokens += count;
                past[i] += count;
            }
            let [q, k, v] = rows.map(|row| random.floats(tokens * row));
            let mut table = vec![0.0; tokens * dims];
            if dims > 0 {
                rope_table(team, &positions, &model.frequencies, MAGNITUDE, &mut table);
            }
            for (i, sequence) in &sequences {
                for (token, &position) in
                    positions.iter().enumerate().skip(sequence.first_token).take(sequence.tokens)
                {
                    let position = position as usize;
                    for kv_head in 0..self.kv_heads {
                        let start = token * rows[1] + kv_head * self.head_dim;
                        let range = start..start + self.head_dim;
                        let key =
                            self.prepared(&k[range.clone()], &model.k_scale, &model, position);
                        let value: Vec<f64> = v[range].iter().map(|&x| f64::from(x)).collect();
                        model.keys[*i].extend(self.stored(&key));
                        model.values[*i].extend(self.stored(&value));
                    }
                }
                let queries = q.chunks_exact(rows[0]).zip(&positions);
                let queries = queries.skip(sequence.first_token).take(sequence.tokens);
                for (q, &position) in queries.filter(|_| is_expected) {
                    references.extend(self.expected(&model, *i, q, position as usize));
                }
            }
            let head_norm = |scale| Norm {
                kind: NormKind::Rms,
                scale: Some(scale),
                bias: None,
                epsilon: EPSILON,
                scale_offset: 1.0,
            };
            let work: Attention<'_> = Attention {
                q: &q,
                k: &k,
                v: &v,
                sequences: &sequences.iter().map(|(_, sequence)| *sequence).collect::<Vec<_>>(),
                heads: self.heads,
                group: self.group,
                first_head: self.first_head,
                scale: self.scale(),
                window: self.window,
                soft_cap: self.soft_cap,
                q_norm: self.has_norms.then(|| head_norm(&model.q_scale[..])),
                k_norm: self.has_norms.then(|| head_norm(&model.k_scale[..])),
                rope: self.rope.map(|(pairing, dims)| RopeView { pairing, dims, table: &table }),
            };
            let mut out = vec![f32::NAN; q.len()];
            let keys = bytemuck::cast_slice_mut(&mut keys);
            let mut cache = Cache::new(shape, keys, bytemuck::cast_slice_mut(&mut values)).unwrap();
            attention_by(team, isa, has_tiles, &work, &mut cache, &mut out);
            outputs.extend(out);
        }
        (outputs, references)
    }
}

/// What remains: rounding to 32 bits; of a key that falls between two halves; of queries and weights to bfloat16.
fn tolerance(element: Element) -> f64 {
    match element {
        Element::F32 => 2e-6,
        Element::F16 => 5e-4,
        Element::Bf16 => 1e-2,
        Element::Int8 => 2e-3,
    }
}

const ELEMENTS: [Element; 4] = [Element::F32, Element::F16, Element::Bf16, Element::Int8];

/// Compares at every level, for every element type, alone and in a team of three.
fn check(case: Case) {
    for element in ELEMENTS {
        let case = Case { element, ..case.clone() };
        let mut expected = None;
        for members in [1, 3] {
            with_team(members, |team| {
                let most = Isa::detect();
                // Tiles are multiplied plainly by levels without them.
                let all = Isa::available().into_iter().map(|isa| (isa, isa == Isa::Amx));
                for (isa, has_tiles) in all.chain([(most, true), (most, false)]) {
                    let (actual, reference) = case.run(team, isa, has_tiles, expected.is_none());
                    let error = distance(&actual, expected.get_or_insert(reference));
                    assert!(
                        error <= tolerance(element),
                        "{isa}, tiles: {has_tiles}, {element:?}, {members} members: off by {error}"
                    );
                }
            });
        }
    }
}

#[test]
fn a_prompt_and_what_follows_match_the_reference() {
    check(Case::default());
    check(Case { steps: vec![vec![1, 1, 40, 1, 3]], ..Case::default() });
}

#[test]
fn sequences_of_unlike_lengths_do_not_mix() {
    let steps = vec![vec![3, 1, 1], vec![33, 5, 1], vec![16, 1, 17], vec![1, 1, 1], vec![150, 1]];
    check(Case { steps: steps.clone(), ..Case::default() });
    check(Case { steps, block_tokens: 32, ..Case::default() });
}

#[test]
fn long_contexts_are_joined_from_pieces() {
    check(Case { steps: vec![vec![1100, 1, 2, 300, 1], vec![5, 1, 1, 1, 1]], ..Case::default() });
}

#[test]
fn heads_of_any_width_and_groups_of_any_size_are_right() {
    for (head_dim, dims) in
        [(8, 8), (16, 4), (20, 20), (64, 64), (80, 20), (96, 96), (128, 128), (256, 64)]
    {
        let rope = Some((Pairing::Halves, dims));
        check(Case { head_dim, rope, steps: vec![vec![19, 1]], ..Case::default() });
    }
    for (heads, group) in [(1, 1), (3, 3), (5, 5), (7, 7), (8, 8), (14, 7)] {
        let kv_heads = heads / group;
        check(Case { heads, group, kv_heads, steps: vec![vec![37, 1, 2]], ..Case::default() });
    }
}

#[test]
fn a_split_may_cut_a_group() {
    check(Case { heads: 5, kv_heads: 3, group: 3, first_head: 2, ..Case::default() });
    check(Case { heads: 2, kv_heads: 1, group: 4, first_head: 1, ..Case::default() });
}

#[test]
fn windows_caps_norms_and_pairings_match_the_reference() {
    let steps = vec![vec![70, 1, 25, 1], vec![400, 1, 1, 1]];
    let base = Case { steps, ..Case::default() };
    check(Case { window: Some(24), ..base.clone() });
    check(Case { window: Some(1), ..base.clone() });
    check(Case { soft_cap: Some(3.0), has_norms: true, ..base.clone() });
    check(Case { rope: Some((Pairing::Neighbours, 12)), window: Some(130), ..base.clone() });
    check(Case { rope: None, ..base });
}

#[test]
fn every_run_gives_the_same_bits() {
    let case = Case { steps: vec![vec![900, 1, 1], vec![40, 1, 1]], ..Case::default() };
    with_team(3, |team| {
        for element in ELEMENTS {
            let case = Case { element, ..case.clone() };
            let [first, second] = [(); 2].map(|()| case.run(team, Isa::detect(), true, false).0);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&first), bits(&second), "{element:?}");
        }
    });
}

fn sequence(first_token: usize, tokens: usize, past: usize, blocks: &[u32]) -> Sequence<'_> {
    Sequence { first_token, tokens, past, blocks }
}

/// Whether an attention of these sequences over blocks of 16 tokens is accepted.
fn are_disjoint(sequences: &[Sequence<'_>]) -> bool {
    let attention: Attention<'_> = Attention {
        q: &[],
        k: &[],
        v: &[],
        sequences,
        heads: 1,
        group: 1,
        first_head: 0,
        scale: 1.0,
        window: None,
        soft_cap: None,
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    attention.is_disjoint(16)
}

#[test]
fn only_blocks_that_are_full_may_be_shared() {
    let first = sequence(0, 2, 17, &[5, 1]);
    assert!(are_disjoint(&[first, sequence(2, 1, 16, &[5, 2])]));
    assert!(!are_disjoint(&[first, sequence(2, 1, 16, &[5, 1])]));
    assert!(!are_disjoint(&[first, sequence(1, 1, 16, &[5, 2])]));
    assert!(!are_disjoint(&[sequence(0, 20, 0, &[3, 3])]));
}

#[test]
fn what_is_no_number_spoils_the_tokens_that_see_it() {
    const HEAD_DIM: usize = 32;
    const TOKENS: usize = 5;
    with_team(1, |team| {
        let runs = ELEMENTS.into_iter().flat_map(|element| {
            Isa::available()
                .into_iter()
                .flat_map(move |isa| (0..3).map(move |of| (element, isa, of)))
        });
        for (element, isa, spoilt) in runs {
            let mut random = Random(5);
            let mut rows = [(); 3].map(|()| random.floats(TOKENS * HEAD_DIM));
            // One element of the third token's query, key or value.
            rows[spoilt][2 * HEAD_DIM + 7] = f32::NAN;
            let [q, k, v] = &rows;
            let shape = CacheShape {
                element,
                blocks: 1,
                kv_heads: 1,
                block_tokens: 16,
                head_dim: HEAD_DIM,
            };
            let words = shape.region_bytes().div_ceil(4);
            let [mut keys, mut values] = [(); 2].map(|()| vec![0_u32; words]);
            let [keys, values] =
                [&mut keys, &mut values].map(|region| bytemuck::cast_slice_mut(region));
            let mut cache = Cache::new(shape, keys, values).unwrap();
            let sequences = [Sequence { first_token: 0, tokens: TOKENS, past: 0, blocks: &[0] }];
            let work: Attention<'_> = Attention {
                q,
                k,
                v,
                sequences: &sequences,
                heads: 1,
                group: 1,
                first_head: 0,
                scale: 0.2,
                window: None,
                soft_cap: None,
                q_norm: None,
                k_norm: None,
                rope: None,
            };
            let mut out = vec![0.0; q.len()];
            attention(team, isa, &work, &mut cache, &mut out);
            for (token, row) in out.chunks_exact(HEAD_DIM).enumerate() {
                let sees = if spoilt == 0 { token == 2 } else { token >= 2 };
                let is_spoilt = row.iter().any(|value| value.is_nan());
                // Values that a token does not see count zero times, which is no number either.
                let is_right = if spoilt == 2 { is_spoilt || !sees } else { is_spoilt == sees };
                assert!(is_right, "token {token}, {spoilt} of {element:?} with {isa}");
            }
        }
    });
}
