use half::bf16;

use super::*;
use crate::kernels::gpu::testing::gpu;

/// The library on the first GPU.
fn vendor() -> Option<(Gpu, Vendor)> {
    let gpu = gpu()?;
    let Some(library) = Library::load(&gpu, 0).unwrap() else {
        eprintln!("skipped: no cuBLASLt");
        return None;
    };
    let vendor = Vendor::new(&gpu, library, gpu.allocate(WORKSPACE_BYTES).unwrap());
    Some((gpu, vendor))
}

/// `out = x · wᵀ` of 32 rows of 64 columns each, all f32.
fn small<'a>(x: &'a Span, w: &'a Span, out: &'a Span) -> Product<'a> {
    Product {
        x,
        w,
        element: DType::F32,
        term: None,
        out,
        made: DType::F32,
        stride: 32,
        tokens: 32,
        inputs: 64,
        outputs: 32,
    }
}

#[test]
fn captured_products_are_made_anew_between_the_launches_around_them() {
    let Some((gpu, vendor)) = vendor() else { return };
    let w = gpu.upload(&vec![1.0_f32; 32 * 64]);
    let [given, x] = [(); 2].map(|()| gpu.upload(&vec![0.0_f32; 32 * 64]));
    let [product, out] = [(); 2].map(|()| gpu.poisoned(32 * 32 * 4));
    let queue = || {
        gpu.add(&given, &given, &x, 32 * 64);
        vendor.multiply(&small(&x, &w, &product))?;
        gpu.add(&product, &product, &out, 32 * 32);
        anyhow::Ok(())
    };
    gpu.client.graph_prepare().unwrap();
    queue().unwrap();
    let graph = gpu.capture(queue).unwrap().unwrap();
    vendor.check().unwrap();
    for run in 1..=20_u16 {
        let each = f32::from(run);
        gpu.write(&given, bytemuck::cast_slice(&vec![each; 32 * 64])).unwrap();
        // SAFETY: the spans live until the end.
        unsafe { graph.replay() }.unwrap();
        assert_eq!(gpu.download::<f32>(&out, 32 * 32), vec![4.0 * 64.0 * each; 32 * 32]);
    }
}

#[test]
fn what_the_library_refuses_is_told_once() {
    let Some((gpu, vendor)) = vendor() else { return };
    let [x, w] = [(); 2].map(|()| gpu.upload(&vec![1.0_f32; 32 * 64]));
    let out = gpu.poisoned(32 * 32 * 4);
    let good = small(&x, &w, &out);
    vendor.multiply(&Product { tokens: 0, ..small(&x, &w, &out) }).unwrap();
    vendor.multiply(&good).unwrap();
    gpu.flush().unwrap();
    assert!(vendor.check().is_err());
    assert!(vendor.check().is_ok());
    vendor.multiply(&good).unwrap();
    assert_eq!(gpu.download::<f32>(&out, 32 * 32), vec![64.0; 32 * 32]);
    vendor.check().unwrap();
    // What is shorter than its shape is refused at once.
    assert!(vendor.multiply(&Product { tokens: 33, ..good }).is_err());
}

#[test]
fn products_fall_between_the_launches_around_them() {
    let Some((gpu, vendor)) = vendor() else { return };
    let (tokens, inputs, outputs) = (48, 256, 128);
    let wave = |count: usize, phase: f32| -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
    };
    let narrow = |wide: &[f32]| wide.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>();
    let (x, w) = (narrow(&wave(tokens * inputs, 0.0)), narrow(&wave(outputs * inputs, 1.0)));
    let term = wave(tokens * outputs, 2.0);
    let (x_span, w_span, term_span) = (gpu.upload(&x), gpu.upload(&w), gpu.upload(&term));
    // One in the type that it is made of, in 16 bits.
    let narrow_out = gpu.poisoned(tokens * outputs * 2);
    let product = Product {
        x: &x_span,
        w: &w_span,
        element: DType::Bf16,
        term: None,
        out: &narrow_out,
        made: DType::Bf16,
        stride: outputs,
        tokens,
        inputs,
        outputs,
    };
    vendor.multiply(&product).unwrap();
    let narrow_made = gpu.download::<bf16>(&narrow_out, tokens * outputs);
    let doubled = gpu.poisoned(tokens * outputs * 4);
    let out = gpu.poisoned(tokens * outputs * 4);
    for _ in 0..20 {
        let count = tokens * outputs;
        gpu.add(&term_span, &term_span, &doubled, count);
        // In two pieces, side by side.
        let piece = |first: usize, outputs: usize| {
            let w = w_span.part(first * inputs * 2, outputs * inputs * 2);
            let [term, out] =
                [&doubled, &out].map(|span| span.part(first * 4, span.bytes() - first * 4));
            (w, term, out, outputs)
        };
        for (w, term, out, outputs) in [piece(0, 64), piece(64, 64)] {
            let product = Product {
                x: &x_span,
                w: &w,
                element: DType::Bf16,
                term: Some(&term),
                out: &out,
                made: DType::F32,
                stride: 128,
                tokens,
                inputs,
                outputs,
            };
            vendor.multiply(&product).unwrap();
        }
        gpu.add(&out, &term_span, &out, count);
        let made = gpu.download::<f32>(&out, count);
        vendor.check().unwrap();
        for (i, made) in made.iter().enumerate() {
            let row = |m: &[bf16], row: usize| m[row * inputs..(row + 1) * inputs].to_vec();
            let (x, w) = (row(&x, i / outputs), row(&w, i % outputs));
            let sum: f64 =
                x.iter().zip(&w).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
            let rounded = (f64::from(narrow_made[i].to_f32()) - sum).abs();
            assert!(rounded < 4e-3 * sum.abs().max(1e-3), "{i}: {} of {sum}", narrow_made[i]);
            let expected = sum + 3.0 * f64::from(term[i]);
            assert!((f64::from(*made) - expected).abs() < 1e-3, "{i}: {made} is not {expected}");
        }
    }
}
