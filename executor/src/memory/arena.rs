//! Buffers that are taken and given back again and again, in one stretch of memory.

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context as _;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;

use super::{PAGE_BYTES, Region, STRETCH_BYTES, whole_pages};
use crate::locked;

/// Memory for buffers: what was given back is taken again.
#[derive(Clone, Default)]
pub struct Arena {
    stretches: Arc<Mutex<Vec<Stretch>>>,
}

/// Memory taken from an arena, given back when dropped; its content is whatever was there.
pub struct Buffer {
    stretch: Arc<Region>,
    /// Where it starts in the stretch; it has all bytes up to the next page.
    start: usize,
    bytes: usize,
    arena: Arena,
}

/// Buffers side by side, and what is free between and behind them.
struct Stretch {
    region: Arc<Region>,
    /// Size of each gap by its start; none next to another.
    gaps: BTreeMap<usize, usize>,
    /// The end of the furthest buffer there has been.
    reached: usize,
}

impl Arena {
    /// A buffer of `bytes`, page-aligned, with unspecified content: in the smallest gap that is large enough.
    ///
    /// # Errors
    /// When no gap is, and the system has no more address space to give.
    pub fn take(&self, bytes: usize) -> anyhow::Result<Buffer> {
        let size = whole_pages(bytes).with_context(|| format!("a buffer of {bytes} bytes"))?;
        let mut stretches = self.stretches();
        let gaps = stretches.iter_mut().filter_map(|stretch| Some((stretch.gap(size)?, stretch)));
        let (stretch, start) = match gaps.min_by_key(|((_, gap), _)| *gap) {
            Some(((start, _), stretch)) => (stretch, start),
            None => {
                // Stretches without a buffer are too small for this run, and perhaps for those that follow.
                stretches.retain(|stretch| !stretch.is_free());
                stretches.push(Stretch::new(size.max(STRETCH_BYTES))?);
                (stretches.last_mut().expect("it has just been added"), 0)
            }
        };
        stretch.fill(start, size);
        Ok(Buffer { stretch: Arc::clone(&stretch.region), start, bytes, arena: self.clone() })
    }

    /// Bytes up to the furthest ends of buffers so far, which is what may have pages.
    pub fn reached_bytes(&self) -> usize {
        self.stretches().iter().map(|stretch| stretch.reached).sum()
    }

    fn stretches(&self) -> MutexGuard<'_, Vec<Stretch>> {
        locked(&self.stretches)
    }
}

impl Stretch {
    fn new(bytes: usize) -> anyhow::Result<Self> {
        let region = Arc::new(Region::new(bytes)?);
        Ok(Self { region, gaps: BTreeMap::from([(0, bytes)]), reached: 0 })
    }

    fn is_free(&self) -> bool {
        self.gaps.get(&0) == Some(&self.region.bytes())
    }

    /// Start and size of the smallest gap of at least `size` bytes; the first of several.
    fn gap(&self, size: usize) -> Option<(usize, usize)> {
        let gaps = self.gaps.iter().map(|(&start, &gap)| (start, gap));
        gaps.filter(|&(_, gap)| gap >= size).min_by_key(|&(_, gap)| gap)
    }

    /// Takes `size` bytes from the start of a gap.
    fn fill(&mut self, start: usize, size: usize) {
        let gap = self.gaps.remove(&start).expect("it was found with this start");
        if gap > size {
            self.gaps.insert(start + size, gap - size);
        }
        self.reached = self.reached.max(start + size);
    }

    /// Makes `size` bytes free, in one gap with what is free next to them.
    fn give_back(&mut self, mut start: usize, mut size: usize) {
        size += self.gaps.remove(&(start + size)).unwrap_or(0);
        if let Some((&before, &gap)) = self.gaps.range(..start).next_back()
            && before + gap == start
        {
            (start, size) = (before, gap + size);
        }
        self.gaps.insert(start, size);
    }
}

impl Buffer {
    /// Size in bytes, as asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All whole elements of type `T`.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        // SAFETY: these bytes of the stretch are this buffer's alone, aligned to a page, initialised by the system or
        // by writes since, and any bytes are a `Pod`.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.bytes / size_of::<T>()) }
    }

    /// All whole elements of type `T`, to write to.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.as_ptr().cast(), self.bytes / size_of::<T>()) }
    }

    /// The first byte; the rest follows.
    pub fn as_ptr(&self) -> *mut u8 {
        self.stretch.as_ptr().wrapping_add(self.start)
    }

    /// The buffer as the storage of a Burn tensor, without a copy; it comes back when the tensor is dropped.
    pub fn into_burn(self) -> Bytes {
        let bytes = self.bytes;
        // SAFETY: all bytes are initialised: the system gives zeros and buffers only ever hold plain numbers.
        unsafe { Bytes::from_controller(Box::new(self), bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let size = whole_pages(self.bytes).expect("it was taken with this size");
        let mut stretches = self.arena.stretches();
        let mut ours = stretches.iter_mut();
        let ours = ours.find(|stretch| Arc::ptr_eq(&stretch.region, &self.stretch));
        ours.expect("a stretch lives as long as its buffers").give_back(self.start, size);
    }
}

impl AllocationController for Buffer {
    fn alloc_align(&self) -> usize {
        PAGE_BYTES
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = self.as_mut_slice::<u8>();
        // SAFETY: the caller writes initialised data only, so viewing it as perhaps uninitialised is sound.
        Ok(unsafe { &mut *(ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = self.as_slice::<u8>();
        // SAFETY: initialised bytes may be viewed as perhaps uninitialised ones.
        Ok(unsafe { &*(ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) })
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use burn_flex::FlexTensor;

    use super::*;

    #[test]
    fn buffers_come_back() {
        let arena = Arena::default();
        let mut buffer = arena.take(10_000).unwrap();
        buffer.as_mut_slice::<u32>().fill(7);
        let start = buffer.as_ptr();
        assert_eq!((buffer.as_slice::<u8>().len(), arena.reached_bytes()), (10_000, 12_288));
        drop(buffer);
        let again = arena.take(9_900).unwrap();
        assert_eq!((again.as_ptr(), arena.reached_bytes()), (start, 12_288));
        assert_ne!(arena.take(9_900).unwrap().as_ptr(), start);
    }

    #[test]
    fn the_smallest_gap_that_is_large_enough_is_filled() {
        let arena = Arena::default();
        let take = |pages: usize| arena.take(pages * PAGE_BYTES).unwrap();
        let mut buffers: Vec<Option<Buffer>> =
            [3, 1, 2, 1, 1].map(|pages| Some(take(pages))).into();
        let start = buffers[0].as_ref().unwrap().as_ptr();
        let page = |buffer: &Buffer| (buffer.as_ptr().addr() - start.addr()) / PAGE_BYTES;
        buffers[0] = None;
        buffers[2] = None;
        let (second, first, behind) = (take(2), take(1), take(3));
        assert_eq!([&second, &first, &behind].map(page), [4, 0, 8]);
        // What is free side by side is one gap.
        drop((first, second));
        buffers[1] = None;
        assert_eq!(page(&take(6)), 0);
        assert_eq!(arena.reached_bytes(), 11 * PAGE_BYTES);
    }

    #[test]
    fn runs_of_many_lengths_take_no_more_than_the_longest() {
        let arena = Arena::default();
        // What lives beside each other in a layer: the activation, and products of it, one of them wide.
        let run = |tokens: usize| {
            let mut x = arena.take(tokens * 4096).unwrap();
            for _ in 0..4 {
                let parts = [1024, 1024, 4096].map(|width| arena.take(tokens * width).unwrap());
                let wide = arena.take(tokens * 11_000).unwrap();
                drop(parts);
                let next = arena.take(tokens * 4096).unwrap();
                drop(wide);
                x = next;
            }
            drop(x);
        };
        run(512);
        let longest = arena.reached_bytes();
        (1..512).rev().step_by(7).chain((2..512).step_by(11)).for_each(run);
        assert_eq!(arena.reached_bytes(), longest);
        run(513);
        assert!(arena.reached_bytes() <= longest + 64 * PAGE_BYTES);
    }

    #[test]
    fn what_fits_no_stretch_gets_one_and_free_ones_go() {
        let arena = Arena::default();
        let small = arena.take(1).unwrap();
        let large = arena.take(STRETCH_BYTES).unwrap();
        assert_eq!(arena.stretches().len(), 2);
        drop((small, large));
        let larger = arena.take(STRETCH_BYTES + 1).unwrap();
        assert_eq!(arena.stretches().len(), 1);
        assert_eq!(larger.as_slice::<u8>().len(), STRETCH_BYTES + 1);
        assert!(arena.take(usize::MAX).is_err());
    }

    #[test]
    fn a_tensor_holds_a_buffer_without_a_copy() {
        let arena = Arena::default();
        let mut buffer = arena.take(24).unwrap();
        buffer.as_mut_slice::<f32>().copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let start = buffer.as_ptr();
        let layout = burn_flex::Layout::contiguous([2, 3].into());
        let tensor = FlexTensor::new(buffer.into_burn(), layout, DType::F32);
        assert_eq!(tensor.as_slice::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(tensor.as_slice::<f32>().unwrap().as_ptr().addr(), start.addr());
        drop(tensor);
        assert_eq!(arena.take(24).unwrap().as_ptr(), start);
    }
}
