//! Operations on one element at a time that no matrix takes along.

use cubecl::prelude::*;
use ir::tensor::DType;

use super::device::{Gpu, Span, element};
use super::words::read_size;

impl Gpu {
    /// `out = a + b` over `count` floats; `out` may be either of them.
    pub fn add(&self, a: &Span, b: &Span, out: &Span, count: usize) {
        self.add_terms((a, DType::F32), (b, DType::F32), out, count);
    }

    /// `out = a + b` in f32 over `count` elements of any float type; `out` may be either of them that is f32.
    pub fn add_terms(
        &self,
        (a, of_a): (&Span, DType),
        (b, of_b): (&Span, DType),
        out: &Span,
        count: usize,
    ) {
        let size = read_size(count);
        let vectors = count / size;
        let (cubes, dim) = self.grid(vectors);
        let argument =
            |span: &Span, dtype: DType| span.argument(vectors, size * dtype.bytes() as usize);
        add::launch(
            &self.client,
            cubes,
            dim,
            size,
            argument(a, of_a),
            argument(b, of_b),
            argument(out, DType::F32),
            vectors as u32,
            element(of_a),
            element(of_b),
        );
    }

    /// `out = cap · tanh(x / cap)` over `count` floats.
    pub fn soft_cap(&self, cap: f32, x: &Span, out: &Span, count: usize) {
        let (cubes, dim) = self.grid(count);
        let [x, out] = [x, out].map(|span| span.argument(count, size_of::<f32>()));
        soft_cap::launch(&self.client, cubes, dim, x, out, cap, count as u32);
    }

    /// `out[i] = sigmoid(gate[i]) · x[i]` for rows of `features` floats, `gate` with one float a row.
    pub fn sigmoid_gate(&self, gate: &Span, x: &Span, out: &Span, rows: usize, features: usize) {
        let count = rows * features;
        let (cubes, dim) = self.grid(count);
        let gate = gate.argument(rows, size_of::<f32>());
        let [x, out] = [x, out].map(|span| span.argument(count, size_of::<f32>()));
        let (features, count) = (features as u32, count as u32);
        sigmoid_gate::launch(&self.client, cubes, dim, gate, x, out, features, count);
    }

    /// Columns `first..first + kept` of rows of `features` floats.
    pub fn columns(&self, x: &Span, out: &Span, shape: [usize; 2], first: usize, kept: usize) {
        let [rows, features] = shape;
        let (cubes, dim) = self.grid(rows * kept);
        let x = x.argument(rows * features, size_of::<f32>());
        let out = out.argument(rows * kept, size_of::<f32>());
        let (features, all) = (features as u32, (rows * kept) as u32);
        columns::launch(&self.client, cubes, dim, x, out, features, first as u32, kept as u32, all);
    }

    /// Writes `x: [rows, kept]` to columns `first..first + kept` of rows of `features` floats.
    pub fn place_columns(
        &self,
        x: &Span,
        out: &Span,
        shape: [usize; 2],
        first: usize,
        features: usize,
    ) {
        let [rows, kept] = shape;
        let (cubes, dim) = self.grid(rows * kept);
        let x = x.argument(rows * kept, size_of::<f32>());
        let out = out.argument(rows * features, size_of::<f32>());
        let (features, all) = (features as u32, (rows * kept) as u32);
        place_columns::launch(
            &self.client,
            cubes,
            dim,
            x,
            out,
            features,
            first as u32,
            kept as u32,
            all,
        );
    }
}

#[cube(launch)]
fn add<A: Float, B: Float, N: Size>(
    a: &[Vector<A, N>],
    b: &[Vector<B, N>],
    out: &mut [Vector<f32, N>],
    vectors: u32,
    #[define(A)] _of_a: ElemType,
    #[define(B)] _of_b: ElemType,
) {
    if (ABSOLUTE_POS as u32) < vectors {
        let (a, b) = (a[ABSOLUTE_POS], b[ABSOLUTE_POS]);
        out[ABSOLUTE_POS] = Vector::<f32, N>::cast_from(a) + Vector::<f32, N>::cast_from(b);
    }
}

#[cube(launch)]
fn soft_cap(x: &[f32], out: &mut [f32], cap: f32, count: u32) {
    if (ABSOLUTE_POS as u32) < count {
        out[ABSOLUTE_POS] = cap * f32::tanh(x[ABSOLUTE_POS] / cap);
    }
}

#[cube(launch)]
fn sigmoid_gate(gate: &[f32], x: &[f32], out: &mut [f32], features: u32, count: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < count {
        let opened = 1.0 / (1.0 + f32::exp(-gate[(at / features) as usize]));
        out[at as usize] = opened * x[at as usize];
    }
}

#[cube(launch)]
fn columns(x: &[f32], out: &mut [f32], features: u32, first: u32, kept: u32, all: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < all {
        out[at as usize] = x[(at / kept * features + first + at % kept) as usize];
    }
}

#[cube(launch)]
fn place_columns(x: &[f32], out: &mut [f32], features: u32, first: u32, kept: u32, all: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < all {
        out[(at / kept * features + first + at % kept) as usize] = x[at as usize];
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use ir::tensor::DType;

    use super::super::testing::gpu;

    fn wave(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 0.71).sin() * 3.0).collect()
    }

    fn close(actual: &[f32], expected: impl Iterator<Item = f32>) {
        for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
            assert!((a - e).abs() <= 1e-5 * e.abs().max(1.0), "element {i}: {a} is not {e}");
        }
    }

    #[test]
    fn elements_are_computed_alone() {
        let Some(gpu) = gpu() else { return };
        let (rows, features) = (5, 67);
        let count = rows * features;
        let (a, b) = (wave(count), wave(count + 9)[9..].to_vec());
        let (on_a, on_b) = (gpu.upload(&a), gpu.upload(&b));
        let out = gpu.poisoned(count * 4);
        gpu.add(&on_a, &on_b, &out, count);
        close(&gpu.download(&out, count), a.iter().zip(&b).map(|(a, b)| a + b));
        // Whole numbers, which 16 bits hold.
        let small: Vec<f32> = (0..count).map(|i| (i % 100) as f32).collect();
        let f16: Vec<f16> = small.iter().map(|&x| f16::from_f32(x)).collect();
        let bf16: Vec<bf16> = small.iter().map(|&x| bf16::from_f32(x)).collect();
        let narrow = [(gpu.upload(&f16), DType::F16), (gpu.upload(&bf16), DType::Bf16)];
        for (narrow, dtype) in narrow.into_iter().filter(|(_, dtype)| gpu.knows(*dtype)) {
            gpu.add_terms((&on_a, DType::F32), (&narrow, dtype), &out, count);
            close(&gpu.download(&out, count), a.iter().zip(&small).map(|(a, b)| a + b));
            gpu.add_terms((&narrow, dtype), (&narrow, dtype), &out, count);
            close(&gpu.download(&out, count), small.iter().map(|x| x + x));
        }
        gpu.soft_cap(2.0, &on_a, &out, count);
        close(&gpu.download(&out, count), a.iter().map(|a| (a / 2.0).tanh() * 2.0));
        gpu.sigmoid_gate(&on_b, &on_a, &out, rows, features);
        let gate = |i: usize| 1.0 / (1.0 + (-b[i / features]).exp());
        close(&gpu.download(&out, count), a.iter().enumerate().map(|(i, a)| gate(i) * a));
        gpu.columns(&on_a, &out, [rows, features], 3, 11);
        close(
            &gpu.download(&out, rows * 11),
            (0..rows * 11).map(|i| a[i / 11 * features + 3 + i % 11]),
        );
        gpu.place_columns(&on_a, &out, [rows, 7], 2, features);
        let placed = gpu.download::<f32>(&out, count);
        for i in 0..rows * 7 {
            assert_eq!(placed[i / 7 * features + 2 + i % 7], a[i]);
        }
    }
}
