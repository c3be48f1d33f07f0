//! A slice that members of a team write at the same time, each other parts of it.

#![expect(unsafe_code, reason = "members write disjoint parts of one slice")]

use std::marker::PhantomData;
use std::ops::Range;
use std::slice;

/// A slice that is borrowed as a whole and written in parts.
///
/// Copies stand for the same slice.
#[derive(Clone, Copy)]
pub(super) struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    whole: PhantomData<&'a mut [T]>,
}

// SAFETY: what threads do with a shared one is to take elements by `part`, alone as its callers say, for which elements
// are `Send`; and to read elements by `read`, perhaps the same ones at a time, for which they are `Sync`.
unsafe impl<T: Send + Sync> Sync for DisjointMut<'_, T> {}
// SAFETY: as above, since a copy of one that is sent stays behind.
unsafe impl<T: Send + Sync> Send for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    /// To write `whole` in parts.
    pub(super) fn new(whole: &'a mut [T]) -> Self {
        Self { start: whole.as_mut_ptr(), len: whole.len(), whole: PhantomData }
    }

    /// The elements of a range, to write to.
    ///
    /// # Safety
    /// Nobody else accesses them as long as the result lives.
    ///
    /// # Panics
    /// When there are not as many.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the caller has these elements alone")]
    pub(super) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        self.check(&range);
        // SAFETY: the elements lie in the slice, which is borrowed exclusively, and the caller has them alone.
        unsafe { slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The elements of a range, to read.
    ///
    /// # Safety
    /// Nobody writes them as long as the result lives.
    ///
    /// # Panics
    /// When there are not as many.
    #[inline(always)]
    pub(super) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        self.check(&range);
        // SAFETY: the elements lie in the slice, which is borrowed exclusively, and the caller says that nobody writes
        // them.
        unsafe { slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }

    /// The first element, for places that are no range of elements: dereferencing it asks for what `part` or `read`
    /// does.
    #[inline(always)]
    pub(super) fn pointer(&self) -> *mut T {
        self.start
    }

    #[inline(always)]
    fn check(&self, range: &Range<usize>) {
        let fits = range.start <= range.end && range.end <= self.len;
        assert!(fits, "elements {range:?} of {}", self.len);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn threads_write_parts_side_by_side() {
        let mut whole = [0; 8];
        let parts = DisjointMut::new(&mut whole);
        thread::scope(|scope| {
            for first in [0, 4] {
                // SAFETY: the two halves have no element in common.
                scope.spawn(move || unsafe { parts.part(first..first + 4) }.fill(first + 1));
            }
        });
        // SAFETY: both threads have ended.
        assert_eq!(unsafe { parts.read(3..5) }, [1, 5]);
        assert_eq!(whole, [1, 1, 1, 1, 5, 5, 5, 5]);
    }

    #[test]
    #[should_panic(expected = "elements 3..5 of 4")]
    fn no_part_reaches_beyond_the_slice() {
        let mut whole = [0; 4];
        let parts = DisjointMut::new(&mut whole);
        // SAFETY: nobody else uses the elements.
        unsafe { parts.part(3..5) }.fill(1);
    }
}
