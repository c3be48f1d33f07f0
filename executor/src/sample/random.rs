//! Random numbers that are the same everywhere: xoshiro256++ (Blackman and Vigna, 2019), its
//! state filled by SplitMix64.

/// A generator of random numbers.
#[derive(Clone, Debug)]
pub(super) struct Random {
    state: [u64; 4],
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        let mut mixed = seed;
        Self { state: std::array::from_fn(|_| split_mix(&mut mixed)) }
    }

    /// A number from 0 up to but not including 1, a multiple of 2⁻⁵³.
    pub(super) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * f64::EPSILON / 2.0
    }

    fn next(&mut self) -> u64 {
        let state = &mut self.state;
        let next = state[0].wrapping_add(state[3]).rotate_left(23).wrapping_add(state[0]);
        let shifted = state[1] << 17;
        state[2] ^= state[0];
        state[3] ^= state[1];
        state[1] ^= state[2];
        state[0] ^= state[3];
        state[2] ^= shifted;
        state[3] = state[3].rotate_left(45);
        next
    }
}

fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generators_give_their_published_numbers() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let numbers: Vec<u64> = (0..4).map(|_| random.next()).collect();
        assert_eq!(numbers, [41943041, 58720359, 3588806011781223, 3591011842654386]);
        let mut seed = 1234567;
        assert_eq!(split_mix(&mut seed), 6457827717110365317);
        assert_eq!(split_mix(&mut seed), 3203168211198807973);
    }

    #[test]
    fn units_fill_the_interval_evenly() {
        let mut random = Random::new(7);
        let mut counts = [0; 10];
        for _ in 0..100_000 {
            counts[(random.unit() * 10.0) as usize] += 1;
        }
        // Five standard deviations of a binomial count: √(100000 · 0.1 · 0.9) ≈ 95.
        assert!(counts.iter().all(|count| (9_525..=10_475).contains(count)), "{counts:?}");
    }
}
