//! A checksum that notices a changed checkpoint without reading all of a large one.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

/// Files up to this size are hashed whole: under a tenth of a second from the page cache.
const WHOLE_BYTES: usize = 256 << 20;
/// Larger files are sampled: this many pages of 4 KiB, evenly spread, first and last page included.
const SAMPLES: usize = 16_384;
const PAGE_BYTES: usize = 4096;

/// XXH3 of the size and the contents of a file, sampled beyond 256 MiB.
///
/// A sampled fingerprint can miss a change smaller than a gap between samples (1 MiB for a file of 16 GiB);
/// it does not miss another training run, another conversion or a truncated copy.
pub fn fingerprint(contents: &[u8]) -> u64 {
    let mut hasher = XxHash3_64::with_seed(0);
    hasher.write_u64(contents.len() as u64);
    if contents.len() <= WHOLE_BYTES {
        hasher.write(contents);
        return hasher.finish();
    }
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
