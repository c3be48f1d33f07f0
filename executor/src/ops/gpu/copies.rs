//! Copies of values between pageable and pinned memory: large ones by several threads, for one thread copies, and takes
//! new pages, at a fraction of what a link carries.

use bytemuck::Pod;
use ir::letters::SHARED_COPY_BYTES;
use rayon::prelude::*;

/// Bytes from which several threads copy.
const SHARED_BYTES: usize = SHARED_COPY_BYTES as usize;

/// Copies all of `from` to `to`, which is as long.
///
/// # Panics
/// When it is not.
pub(super) fn copy(from: &[u8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len(), "a copy is as long as what is copied");
    if from.len() < SHARED_BYTES {
        return to.copy_from_slice(from);
    }
    let piece = SHARED_BYTES / 4;
    let pieces = to.par_chunks_mut(piece).zip(from.par_chunks(piece));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
}

/// The elements that lie in `bytes`.
///
/// # Panics
/// When there is a part of one.
pub(super) fn collect<T: Pod>(bytes: &[u8]) -> Vec<T> {
    assert!(bytes.len().is_multiple_of(size_of::<T>()), "whole elements");
    let mut elements: Vec<T> = bytemuck::zeroed_vec(bytes.len() / size_of::<T>());
    copy(bytes, bytemuck::cast_slice_mut(&mut elements));
    elements
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_length_are_whole() {
        for count in [0, 3, SHARED_BYTES / 4, SHARED_BYTES + 7] {
            let elements: Vec<u32> =
                (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
            assert_eq!(collect::<u32>(bytemuck::cast_slice(&elements)), elements);
        }
    }
}
