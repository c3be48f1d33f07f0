//! A checksum that notices a changed checkpoint without reading all of a large one.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

/// Files up to this size are hashed whole: under a tenth of a second from the page cache.
const WHOLE_BYTES: usize = 256 << 20;
/// Of larger files the beginning is hashed: it holds the names and byte ranges, 100 KiB of them in a large model.
const HEAD_BYTES: usize = 256 << 10;
/// And this many pages of 4 KiB, evenly spread, first and last page included. A page fault takes a microsecond
/// from the page cache and 100 from a disk, so that a checkpoint of 30 files takes less than 0.1 or 1 second.
const SAMPLES: usize = 256;
const PAGE_BYTES: usize = 4096;

/// Whether a file of that size is sampled: a caller that maps it should then turn read-ahead off.
pub fn is_sampled(bytes: u64) -> bool {
    bytes > WHOLE_BYTES as u64
}

/// XXH3 of the size and the contents of a file, sampled beyond 256 MiB.
///
/// A sampled fingerprint can miss a change smaller than a gap between samples (20 MiB for a file of 5 GiB);
/// it does not miss another training run, another conversion or a truncated copy.
pub fn fingerprint(contents: &[u8]) -> u64 {
    let mut hasher = XxHash3_64::with_seed(0);
    hasher.write_u64(contents.len() as u64);
    if !is_sampled(contents.len() as u64) {
        hasher.write(contents);
        return hasher.finish();
    }
    hasher.write(&contents[..HEAD_BYTES]);
    let last = contents.len() - PAGE_BYTES;
    for sample in 0..SAMPLES {
        let start = (last as u128 * sample as u128 / (SAMPLES - 1) as u128) as usize;
        hasher.write(&contents[start..start + PAGE_BYTES]);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_changed_byte_changes_the_fingerprint() {
        let mut contents = vec![7; 10_000];
        let before = fingerprint(&contents);
        contents[9_999] ^= 1;
        assert_ne!(before, fingerprint(&contents));
    }
}
