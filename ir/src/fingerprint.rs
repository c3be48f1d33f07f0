//! A checksum that notices a changed checkpoint without reading all of a large one.

use std::hash::Hasher as _;
use std::iter;
use std::ops::Range;

use twox_hash::XxHash3_64;

/// Files up to this size are hashed whole: under a tenth of a second from the page cache.
const WHOLE_BYTES: u64 = 256 << 20;
/// Of larger files the beginning is hashed: it holds the names and byte ranges, 100 KiB of them in a large model.
const HEAD_BYTES: u64 = 256 << 10;
/// And this many pages of 4 KiB, evenly spread, first and last page included. A page fault takes a microsecond
/// from the page cache and 100 from a disk, so that a checkpoint of 30 files takes less than 0.1 or 1 second.
const SAMPLES: u64 = 256;
const PAGE_BYTES: u64 = 4096;
/// How much of a file is read at a time: it stays in a core's second cache.
const PIECE_BYTES: usize = 256 << 10;

/// Whether of a file of that size samples are hashed.
pub fn is_sampled(bytes: u64) -> bool {
    bytes > WHOLE_BYTES
}

/// XXH3 of the size and the contents of a file, sampled beyond 256 MiB.
///
/// A sampled fingerprint can miss a change smaller than a gap between samples (20 MiB for a file of 5 GiB);
/// it does not miss another training run, another conversion or a truncated copy.
pub fn fingerprint(contents: &[u8]) -> u64 {
    let bytes = contents.len() as u64;
    let mut hasher = hasher(bytes);
    for part in parts(bytes) {
        hasher.write(&contents[part.start as usize..part.end as usize]);
    }
    hasher.finish()
}

/// The [`fingerprint()`] of a file of so many bytes, which holds one piece of it in memory at a time: `read` fills one
/// from a byte of the file on.
///
/// # Errors
/// Those of `read`.
pub fn fingerprint_of_file<E>(
    bytes: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
) -> Result<u64, E> {
    let mut hasher = hasher(bytes);
    let mut piece = vec![0; PIECE_BYTES];
    for part in parts(bytes) {
        for start in part.clone().step_by(PIECE_BYTES) {
            let piece = &mut piece[..PIECE_BYTES.min((part.end - start) as usize)];
            read(start, piece)?;
            hasher.write(piece);
        }
    }
    Ok(hasher.finish())
}

fn hasher(bytes: u64) -> XxHash3_64 {
    let mut hasher = XxHash3_64::with_seed(0);
    hasher.write_u64(bytes);
    hasher
}

/// What is hashed of a file of so many bytes.
fn parts(bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let (head, samples) = if is_sampled(bytes) { (HEAD_BYTES, SAMPLES) } else { (bytes, 0) };
    let last = bytes.saturating_sub(PAGE_BYTES);
    let sample = move |sample: u64| {
        let start = (u128::from(last) * u128::from(sample) / u128::from(SAMPLES - 1)) as u64;
        start..start + PAGE_BYTES
    };
    iter::once(0..head).chain((0..samples).map(sample))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_read_in_pieces_has_the_fingerprint_of_its_contents() {
        for bytes in [0, 10_000, 3 * PIECE_BYTES + 1, WHOLE_BYTES as usize + 1] {
            let mut contents = vec![0; bytes];
            contents.iter_mut().step_by(1000).zip((0..=250).cycle()).for_each(|(at, i)| *at = i);
            let read = |at: u64, piece: &mut [u8]| {
                piece.copy_from_slice(&contents[at as usize..][..piece.len()]);
                Ok::<(), ()>(())
            };
            let of_file = fingerprint_of_file(bytes as u64, read);
            assert_eq!(of_file, Ok(fingerprint(&contents)), "{bytes}");
        }
    }

    #[test]
    fn one_changed_byte_changes_the_fingerprint() {
        let mut contents = vec![7; 10_000];
        let before = fingerprint(&contents);
        contents[9_999] ^= 1;
        assert_ne!(before, fingerprint(&contents));
    }
}
