use ir::op::{Norm, NormKind};
use ir::tensor::DType;

use super::*;
use crate::kernels::gpu::attention::testing::*;
use crate::kernels::gpu::testing::gpu;

/// A rotation on the host: `[table_rows, dims]`.
struct Table {
    pairing: Pairing,
    dims: usize,
    table: Vec<f32>,
    rows: Vec<i32>,
}

/// A norm on the host.
struct HostNorm {
    norm: Norm,
    scale: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

impl Table {
    fn new(pairing: Pairing, dims: usize, run: &Run) -> Self {
        let rows: Vec<i32> = (0..run.rows()).map(|row| (row * 5 % 11) as i32).collect();
        Self { pairing, dims, table: noise(11 * dims, 3), rows }
    }

    fn turn(&self, row: usize, head: &mut [f64]) {
        let pairs = self.dims / 2;
        let table = &self.table[self.rows[row] as usize * self.dims..][..self.dims];
        for pair in 0..pairs {
            let (first, second) = match self.pairing {
                Pairing::Halves => (pair, pair + pairs),
                Pairing::Neighbours => (2 * pair, 2 * pair + 1),
            };
            let (cos, sin) = (f64::from(table[pair]), f64::from(table[pairs + pair]));
            let (a, b) = (head[first], head[second]);
            head[first] = a * cos - b * sin;
            head[second] = b * cos + a * sin;
        }
    }
}

impl HostNorm {
    fn new(kind: NormKind, head_dim: usize, scaled: bool, biased: bool) -> Self {
        let norm = Norm { kind, scale: None, bias: None, epsilon: 1e-3, scale_offset: 0.5 };
        let scale = scaled.then(|| noise(head_dim, 11));
        Self { norm, scale, bias: biased.then(|| noise(head_dim, 12)) }
    }

    fn apply(&self, head: &mut [f64]) {
        let count = head.len() as f64;
        if self.norm.kind == NormKind::Layer {
            let mean = head.iter().sum::<f64>() / count;
            head.iter_mut().for_each(|x| *x -= mean);
        }
        let squares = head.iter().map(|x| x * x).sum::<f64>() / count;
        let factor = 1.0 / (squares + f64::from(self.norm.epsilon)).sqrt();
        for (i, x) in head.iter_mut().enumerate() {
            let offset = f64::from(self.norm.scale_offset);
            let scale = self.scale.as_ref().map_or(1.0, |scale| f64::from(scale[i]) + offset);
            *x = *x * factor * scale + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[i]));
        }
    }

    fn upload(&self, gpu: &Gpu) -> [Option<Span>; 2] {
        [&self.scale, &self.bias].map(|weights| weights.as_ref().map(|w| gpu.upload(w)))
    }
}

fn check(
    attention: &Attention,
    run: &Run,
    element: DType,
    norms: [Option<&HostNorm>; 2],
    table: Option<&Table>,
) {
    let Some(gpu) = gpu() else { return };
    let [q_norm, k_norm] = norms.map(|norm| norm.map(|norm| norm.norm.clone()));
    let attention = &Attention { q_norm, k_norm, ..attention.clone() };
    let (heads, kv_heads, head_dim) =
        (attention.heads as usize, attention.kv_heads as usize, attention.head_dim as usize);
    let rows = run.rows();
    let queries = noise(rows * heads * head_dim, 21);
    let [keys, values] = [22, 23].map(|seed| noise(rows * kv_heads * head_dim, seed));
    let cached = Cached::empty(&gpu, run, attention, element);
    let on_device = run.upload(&gpu);
    let out = gpu.poisoned(queries.len() * 4);
    let weights = norms.map(|norm| norm.map_or([None, None], |norm| norm.upload(&gpu)));
    let [query_norm, key_norm] = weights
        .each_ref()
        .map(|[scale, bias]| NormWeights { scale: scale.as_ref(), bias: bias.as_ref() });
    let spans = table.map(|table| (gpu.upload(&table.table), gpu.upload(&table.rows)));
    let rotation = table.zip(spans.as_ref()).map(|(table, (cos_sin, rows))| Rotation {
        pairing: table.pairing,
        dims: table.dims as u32,
        table: cos_sin,
        table_rows: 11,
        rows,
    });
    let call = Append {
        attention,
        cache: cached.cache(),
        tokens: on_device.tokens(),
        queries: &gpu.upload(&queries),
        keys: &gpu.upload(&keys),
        values: &gpu.upload(&values),
        query_norm,
        key_norm,
        rotation,
    };
    gpu.append(&call, &out);

    let made: Vec<f32> = gpu.download(&out, queries.len());
    let count = cached.keys.len();
    let [made_keys, made_values] =
        [call.cache.keys, call.cache.values].map(|span| loaded(&gpu, span, count, element));
    let tolerance = if element == DType::F32 { 1e-5 } else { 5e-3 };
    let mut written = vec![false; count / head_dim];
    for (row, (sequence, position)) in run.tokens().into_iter().enumerate() {
        let prepared = |x: &[f32], heads: usize, head: usize, norm: Option<&HostNorm>| {
            let from = &x[(row * heads + head) * head_dim..][..head_dim];
            let mut x: Vec<f64> = from.iter().map(|x| f64::from(*x)).collect();
            norm.inspect(|norm| norm.apply(&mut x));
            table.inspect(|table| table.turn(row, &mut x));
            x
        };
        for head in 0..heads {
            let expected = prepared(&queries, heads, head, norms[0]);
            let at = (row * heads + head) * head_dim;
            assert_close(&made[at..at + head_dim], &expected, 1e-5, "query");
        }
        for head in 0..kv_heads {
            let cache_row = run.cache_row(kv_heads, sequence, head, position);
            written[cache_row] = true;
            let at = cache_row * head_dim;
            let expected = prepared(&keys, kv_heads, head, norms[1]);
            assert_close(&made_keys[at..at + head_dim], &expected, tolerance, "key");
            let from = &values[(row * kv_heads + head) * head_dim..][..head_dim];
            let expected: Vec<f64> = from.iter().map(|x| f64::from(*x)).collect();
            assert_close(&made_values[at..at + head_dim], &expected, tolerance, "value");
        }
    }
    for (row, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
        let at = row * head_dim;
        assert!(made_keys[at].is_nan() && made_values[at].is_nan(), "cache row {row} was touched");
    }
}

fn run() -> Run {
    Run::new(&[(0, 5), (15, 1), (30, 20), (16, 1)]).padded(3)
}

#[test]
fn keys_and_values_go_to_the_blocks_of_their_sequence() {
    for element in [DType::F32, DType::F16] {
        for head_dim in [4, 32, 80, 128] {
            check(&plain(5, 5, head_dim), &run(), element, [None; 2], None);
        }
    }
}

#[test]
fn queries_and_keys_are_rotated() {
    for pairing in [Pairing::Halves, Pairing::Neighbours] {
        for (head_dim, dims) in [(64, 64), (80, 32), (96, 24), (256, 256)] {
            let table = Table::new(pairing, dims, &run());
            check(&plain(4, 2, head_dim), &run(), DType::F16, [None; 2], Some(&table));
        }
    }
}

#[test]
fn queries_and_keys_are_normalised_before() {
    let table = Table::new(Pairing::Halves, 48, &run());
    let rms = HostNorm::new(NormKind::Rms, 96, true, false);
    let layer = HostNorm::new(NormKind::Layer, 96, true, true);
    let bare = HostNorm::new(NormKind::Layer, 96, false, false);
    for norms in [[Some(&rms), Some(&layer)], [Some(&bare), None], [None, Some(&rms)]] {
        check(&plain(6, 3, 96), &run(), DType::F32, norms, Some(&table));
        check(&plain(6, 3, 96), &run(), DType::F16, norms, None);
    }
}
