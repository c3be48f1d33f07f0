//! Which blocks of the caches are free. One block id stands for one block of every cache.

use anyhow::{Result, ensure};

/// Free blocks; the lowest ids are given out first, so equal requests get equal blocks.
pub(crate) struct Blocks {
    /// By falling id; the next one to give out is last.
    free: Vec<u32>,
    total: u32,
    block_tokens: usize,
}

impl Blocks {
    pub(crate) fn new(total: u32, block_tokens: u32) -> Self {
        Self { free: (0..total).rev().collect(), total, block_tokens: block_tokens as usize }
    }

    /// Lengthens the block table of a sequence until it holds `tokens` tokens.
    ///
    /// # Errors
    /// When too few blocks are free; then nothing is taken.
    pub(crate) fn reserve(&mut self, table: &mut Vec<u32>, tokens: usize) -> Result<()> {
        let missing = tokens.div_ceil(self.block_tokens).saturating_sub(table.len());
        ensure!(
            missing <= self.free.len(),
            "the cache is full: {missing} blocks of {} tokens are needed, {} of {} are free; compile the plan with a \
             larger --kv-cache or --max-sequences",
            self.block_tokens,
            self.free.len(),
            self.total
        );
        table.extend(self.free.drain(self.free.len() - missing..).rev());
        Ok(())
    }

    /// Takes back those blocks of a sequence that lie beyond its first `tokens` tokens.
    pub(crate) fn release_beyond(&mut self, table: &mut Vec<u32>, tokens: usize) {
        let kept = tokens.div_ceil(self.block_tokens).min(table.len());
        self.release(table.split_off(kept));
    }

    /// Takes the blocks of a sequence back.
    pub(crate) fn release(&mut self, table: Vec<u32>) {
        self.free.extend(table);
        self.free.sort_unstable_by_key(|&block| std::cmp::Reverse(block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_cache_is_an_error_and_freed_blocks_are_given_out_again() {
        let mut blocks = Blocks::new(4, 16);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        blocks.reserve(&mut a, 17).unwrap();
        assert_eq!(a, [0, 1]);
        let error = blocks.reserve(&mut b, 33).unwrap_err().to_string();
        assert!(error.contains("3 blocks of 16 tokens are needed, 2 of 4 are free"), "{error}");
        blocks.release(a);
        blocks.reserve(&mut b, 33).unwrap();
        assert_eq!(b, [0, 1, 2]);
        blocks.reserve(&mut b, 48).unwrap();
        assert_eq!(b.len(), 3);
    }

    #[test]
    fn a_sequence_keeps_the_blocks_of_its_first_tokens_alone() {
        let mut blocks = Blocks::new(4, 16);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        blocks.reserve(&mut a, 64).unwrap();
        blocks.release_beyond(&mut a, 80);
        assert_eq!(a, [0, 1, 2, 3]);
        blocks.release_beyond(&mut a, 17);
        assert_eq!(a, [0, 1]);
        blocks.reserve(&mut b, 20).unwrap();
        assert_eq!(b, [2, 3]);
        blocks.release_beyond(&mut a, 0);
        assert!(a.is_empty());
        blocks.reserve(&mut b, 64).unwrap();
        assert_eq!(b, [2, 3, 0, 1]);
    }
}
