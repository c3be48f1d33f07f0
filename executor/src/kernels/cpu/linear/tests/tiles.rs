//! Two matrices, and gates of both, with as many rows as tiles take in several strips: in blocks, and along panels.

use super::*;
use crate::kernels::cpu::tile::{MOST_ROWS, MOST_ROWS_ALONG_PANELS};

/// Checks the products of `tokens` rows with two matrices of `rows` rows each, and the gate of both.
fn both_multiply_right(team: &Team, kernel: Kernel, [tokens, rows, columns]: [usize; 3]) {
    let at = format!("{} {} {tokens}x{rows}x{columns}", kernel.isa, kernel.format);
    let x = numbers(1, tokens * columns);
    let w = [2, 3].map(|seed| numbers(seed, rows * columns));
    let matrices = w.each_ref().map(|w| packed(team, kernel.format, rows, columns, w));
    let mut layer: Linear<'_> = Linear {
        x: &x,
        tokens,
        norm: None,
        weights: &matrices.each_ref(),
        biases: &[],
        then: Then::Nothing,
        residual: None,
    };
    let mut outs = [(); 2].map(|()| vec![f32::NAN; tokens * rows]);
    let mut slices = outs.each_mut().map(Vec::as_mut_slice);
    linear_by(team, kernel, &layer, &mut slices).unwrap();
    let x_heard = heard(kernel, columns, &x);
    for (out, w) in outs.iter().zip(&w) {
        let wanted = products(&x_heard, &held(kernel, columns, w), columns);
        for (i, (&found, (wanted, magnitude))) in out.iter().zip(wanted).enumerate() {
            let error = (f64::from(found) - wanted).abs();
            assert!(error <= 1e-6 * magnitude, "{at} at {i}: {found} for {wanted}");
        }
    }
    layer.then = Then::Gate(Activation::Relu);
    let mut gated = vec![f32::NAN; tokens * rows];
    linear_by(team, kernel, &layer, &mut [&mut gated]).unwrap();
    for (i, &found) in gated.iter().enumerate() {
        assert_eq!(found, outs[0][i].max(0.0) * outs[1][i], "gate of {at} at {i}");
    }
}

/// Any processor can multiply blocks plainly: several groups of strips and of panels, and several parts of the columns.
#[test]
fn blocks_of_tiles_multiply_right() {
    let sizes = [[1, 49, 700], [17, 49, 200], [70, 530, 600], [530, 40, 300], [64, 16, 256]];
    let formats = [Format::Bf16, Format::Bf12, Format::Q8, Format::Q4];
    let below = Isa::detect().min(Isa::Avx512Bf16Vnni);
    with_team(2, |team| {
        for isa in Isa::available().into_iter().filter(|&isa| isa >= below) {
            for (format, size) in formats.into_iter().flat_map(|f| sizes.map(|size| (f, size))) {
                let has_blocks = matches!(format, Format::Q8 | Format::Q4);
                let kernel = Kernel {
                    isa,
                    format,
                    encoding: if has_blocks { Encoding::ByteTiles } else { Encoding::Tiles },
                    rows: MOST_ROWS,
                    unpacks: format != Format::Bf16,
                    in_blocks: true,
                };
                both_multiply_right(team, kernel, size);
            }
        }
    });
}

/// Up to so many rows tiles go along panels, strip after strip, and beyond them in blocks; vectors take as many in
/// strips of their own.
#[test]
fn gates_of_many_rows_multiply_right_by_the_kernels_of_every_level() {
    let most = MOST_ROWS_ALONG_PANELS;
    // The last panel has one vector or two.
    let sizes = [[33, 49, 200], [70, 104, 600], [most, 49, 100], [most + 1, 40, 100]];
    with_team(2, |team| {
        for isa in Isa::available() {
            for (format, size) in Format::ALL.into_iter().flat_map(|f| sizes.map(|s| (f, s))) {
                both_multiply_right(team, Kernel::choose(isa, format, size[0]), size);
            }
        }
    });
}

#[test]
fn tiles_go_along_panels_up_to_so_many_rows_and_then_in_blocks() {
    for format in [Format::Bf16, Format::Bf12] {
        let [along, in_blocks] =
            [0, 1].map(|more| Kernel::choose(Isa::Amx, format, MOST_ROWS_ALONG_PANELS + more));
        let is_in_blocks = [along, in_blocks].map(|kernel| kernel.in_blocks);
        assert_eq!(is_in_blocks, [false, true], "{format}");
        assert_eq!([along.encoding, in_blocks.encoding], [Encoding::Tiles; 2], "{format}");
        // What goes along panels is unpacked on the way.
        let unpacks = [along, in_blocks].map(|kernel| kernel.unpacks);
        assert_eq!(unpacks, [false, format == Format::Bf12]);
    }
}
