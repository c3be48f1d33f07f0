//! Memory filled with a pattern, again and again: what is measured with needs contents, not a copy of them from the
//! host.

use cubecl::prelude::*;

use super::device::{Gpu, Span};

impl Gpu {
    /// `out[i] = pattern[i mod period]` over `words` words of 32 bits.
    pub fn repeat(&self, pattern: &Span, period: usize, out: &Span, words: usize) {
        let (cubes, dim) = self.grid(words);
        let [from, to] = [(pattern, period), (out, words)]
            .map(|(span, count)| span.argument(count, size_of::<u32>()));
        repeat::launch(&self.client, cubes, dim, from, to, period as u32, words as u32);
    }
}

#[cube(launch)]
fn repeat(pattern: &[u32], out: &mut [u32], period: u32, words: u32) {
    let at = ABSOLUTE_POS as u32;
    if at < words {
        out[at as usize] = pattern[(at % period) as usize];
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::gpu;

    #[test]
    fn patterns_begin_anew_and_nothing_lies_behind_the_last() {
        let Some(gpu) = gpu() else { return };
        let words = 1000;
        for period in [1, 7, 256, 999, words] {
            let pattern: Vec<u32> = (0..period as u32).map(|i| i * 3 + 1).collect();
            let out = gpu.poisoned((words + 1) * 4);
            gpu.repeat(&gpu.upload(&pattern), period, &out, words);
            let behind = gpu.download::<u32>(&gpu.poisoned(4), 1);
            let expected: Vec<u32> =
                pattern.iter().cycle().take(words).copied().chain(behind).collect();
            assert_eq!(gpu.download::<u32>(&out, words + 1), expected, "a period of {period}");
        }
    }
}
