//! Exponential and its kin on vectors.
//!
//! Errors are measured against 64-bit references in the tests below. Polynomials are least-squares fits at 400
//! Chebyshev nodes, made in 40 digits and rounded to 32 bits.

use std::f32::consts::LOG2_E;

use super::lanes::Lanes;

/// `coefficients[0] + coefficients[1] · x + …`.
#[inline(always)]
fn polynomial<L: Lanes, const N: usize>(x: L, coefficients: [f32; N]) -> L {
    let mut value = L::splat(coefficients[N - 1]);
    for i in (0..N - 1).rev() {
        value = value.mul_add(x, L::splat(coefficients[i]));
    }
    value
}

/// `e^x` within 1.2 units in the last place; 0 below -104, infinite above 89.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    // What is not a number passes both bounds.
    let x = L::splat(-104.0).max(L::splat(89.0).min(x));
    let power = x.mul(L::splat(LOG2_E)).round();
    // ln 2 in two parts; the first has few enough bits for its product with `power` to be exact.
    let rest = power.mul_add(L::splat(-0.693_359_4), x);
    let rest = power.mul_add(L::splat(2.121_944_4e-4), rest);
    let tail = polynomial(rest, [0.5, 1.666_657_6e-1, 4.166_646_7e-2, 8.363_18e-3, 1.393_365_1e-3]);
    let fraction = tail.mul_add(rest.mul(rest), rest).add(L::splat(1.0));
    fraction.scale_by_power(power)
}

/// `2^x` within 1.2 units in the last place, 0 below -150. For `x` of at most 127.
#[inline(always)]
pub(crate) fn exp2<L: Lanes>(x: L) -> L {
    let x = L::splat(-151.0).max(x);
    let power = x.round();
    let rest = x.sub(power);
    let slope = polynomial(
        rest,
        [6.931_472e-1, 2.402_265e-1, 5.550_357e-2, 9.618_057e-3, 1.339_086_7e-3, 1.546_144_8e-4],
    );
    slope.mul_add(rest, L::splat(1.0)).scale_by_power(power)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    one.div(exp(L::splat(0.0).sub(x)).add(one))
}

/// The hyperbolic tangent within 2 units in the last place.
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(x: L) -> L {
    let (one, size) = (L::splat(1.0), x.abs());
    let square = x.mul(x);
    let series = polynomial(
        square,
        [
            -3.333_333_4e-1,
            1.333_329_7e-1,
            -5.395_777_5e-2,
            2.175_692_7e-2,
            -8.305_101e-3,
            2.249_316_3e-3,
        ],
    );
    let near = series.mul(square).mul_add(x, x);
    let far = one.sub(L::splat(2.0).div(exp(size.add(size)).add(one))).with_sign(x);
    L::select_less(size, L::splat(0.625), near, far)
}

/// The error function within 2 units in the last place.
#[inline(always)]
pub(crate) fn erf<L: Lanes>(x: L) -> L {
    let (one, size) = (L::splat(1.0), x.abs());
    let slope = polynomial(
        x.mul(x),
        [
            1.283_791_5e-1,
            -3.761_249_2e-1,
            1.128_177_9e-1,
            -2.676_478_4e-2,
            4.989_944_4e-3,
            -5.972_102_5e-4,
        ],
    );
    let near = slope.mul_add(x, x);
    // Beyond 4 the result rounds to 1.
    let bounded = L::splat(4.0).min(size);
    let decay = polynomial(
        bounded,
        [
            1.287_224_1e-1,
            6.348_4e-1,
            1.067_690_85e-1,
            -2.423_415e-2,
            3.871_275_8e-3,
            -3.801_905_6e-4,
            1.704_375_6e-5,
        ],
    );
    let exponent = decay.mul_add(bounded, bounded);
    let far = one.sub(exp(L::splat(0.0).sub(exponent))).with_sign(x);
    L::select_less(size, L::splat(0.92), near, far)
}

#[cfg(test)]
mod tests {
    use super::super::isa::Isa;
    use super::super::lanes::{Kernel, LANES, vectorize};
    use super::super::testing::erf_in_64_bits;
    use super::*;

    #[derive(Clone, Copy)]
    enum Function {
        Exp,
        Exp2,
        Sigmoid,
        Tanh,
        Erf,
    }

    struct Apply<'a>(Function, &'a [f32], &'a mut [f32]);

    impl Kernel for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn run<L: Lanes>(self) {
            let Apply(function, x, y) = self;
            for (x, y) in x.chunks(LANES).zip(y.chunks_mut(LANES)) {
                let x = L::read(x);
                let value = match function {
                    Function::Exp => exp(x),
                    Function::Exp2 => exp2(x),
                    Function::Sigmoid => sigmoid(x),
                    Function::Tanh => tanh(x),
                    Function::Erf => erf(x),
                };
                value.write(y);
            }
        }
    }

    /// The largest error over `from..to`, in units in the last place of the reference.
    fn largest_error(isa: Isa, function: Function, from: f32, to: f32) -> f64 {
        let reference = |x: f64| match function {
            Function::Exp => x.exp(),
            Function::Exp2 => x.exp2(),
            Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Function::Tanh => x.tanh(),
            Function::Erf => erf_in_64_bits(x),
        };
        let count = 100_003;
        let x: Vec<f32> =
            (0..count).map(|i| from + (to - from) * i as f32 / (count - 1) as f32).collect();
        let mut y = vec![0.0; x.len()];
        vectorize(isa, Apply(function, &x, &mut y));
        let errors = x.iter().zip(&y).map(|(&x, &y)| {
            let exact = reference(f64::from(x));
            let unit = f64::from((exact as f32).abs().next_up()) - f64::from((exact as f32).abs());
            (f64::from(y) - exact).abs() / unit.max(f64::from(f32::MIN_POSITIVE) / 1e6)
        });
        // `max` would drop what is not a number.
        let worse =
            |worst: f64, error| if worst.is_nan() || error <= worst { worst } else { error };
        errors.fold(0.0, worse)
    }

    fn check(function: Function, from: f32, to: f32, units: f64) {
        for isa in Isa::available() {
            let error = largest_error(isa, function, from, to);
            assert!(error <= units, "{isa}: {error} units over {from}..{to}");
        }
    }

    #[test]
    fn the_exponential_is_good_to_about_one_unit() {
        check(Function::Exp, -87.0, 88.7, 1.2);
        check(Function::Exp, -1.0, 1.0, 1.2);
        check(Function::Exp2, -126.0, 0.0, 1.2);
        check(Function::Exp2, -2.0, 2.0, 1.2);
    }

    #[test]
    fn tangent_error_function_and_sigmoid_are_good_to_a_few_units() {
        check(Function::Tanh, -10.0, 10.0, 2.0);
        check(Function::Tanh, -0.7, 0.7, 2.0);
        check(Function::Erf, -5.0, 5.0, 2.0);
        check(Function::Erf, -1.0, 1.0, 2.0);
        check(Function::Sigmoid, -80.0, 80.0, 3.0);
    }

    #[test]
    fn ends_and_no_numbers_stay_what_they_are() {
        let x = [f32::NEG_INFINITY, -1e30, 1e30, f32::INFINITY, f32::NAN, 0.0];
        for isa in Isa::available() {
            let value = |function| {
                let mut y = [7.0; 6];
                vectorize(isa, Apply(function, &x, &mut y));
                y
            };
            let is_nan = |y: [f32; 6]| y[4].is_nan();
            let [y, z] = [value(Function::Exp), value(Function::Tanh)];
            assert_eq!(
                (y[0], y[1], y[2], y[3], y[5]),
                (0.0, 0.0, f32::INFINITY, f32::INFINITY, 1.0)
            );
            assert_eq!((z[0], z[1], z[2], z[3], z[5]), (-1.0, -1.0, 1.0, 1.0, 0.0));
            let erf = value(Function::Erf);
            assert_eq!((erf[0], erf[3], erf[5]), (-1.0, 1.0, 0.0));
            assert!(is_nan(y) && is_nan(z) && is_nan(erf) && is_nan(value(Function::Sigmoid)));
            assert_eq!(value(Function::Exp2)[0], 0.0);
        }
    }
}
