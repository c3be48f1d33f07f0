//! Memory of one device: regions that their users touch first, and an arena of buffers used again and again.
//!
//! - A region has no pages until it is written to; the thread that writes first decides the node, unless it is bound to
//!   one.
//! - Regions of 2 MiB or more are aligned for huge pages and ask for them.
//! - An arena's buffers lie in one stretch, each in the smallest gap that it fits: runs of other lengths use the pages
//!   that the largest has touched.

#![expect(unsafe_code, reason = "maps anonymous memory and views it as plain numbers")]

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context as _;
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;
use hwlocality::Topology;
use hwlocality::memory::binding::{MemoryBindingFlags, MemoryBindingPolicy};
use hwlocality::object::TopologyObject;
use hwlocality::object::types::ObjectType;

use crate::locked;

/// Size of a huge page on x86-64 and of a block mapping on aarch64 with 4 KiB pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// What starts and sizes of buffers are multiples of: one page.
const PAGE_BYTES: usize = 4096;
/// Address space of a stretch, which is larger where one buffer is. It costs nothing until it is written to, and runs
/// whose buffers take more are those of models whose weights take a hundred times as much.
const STRETCH_BYTES: usize = 1 << 30;

/// Anonymous memory, zero at first.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// What was mapped, which is what must be unmapped.
    mapping: (*mut libc::c_void, usize),
}

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

// SAFETY: a region owns its mapping as a `Vec` owns its allocation.
unsafe impl Send for Region {}
// SAFETY: a shared region is read, or hands out the pointer of `as_ptr`; code that writes through the pointer says why
// nobody else uses the same bytes meanwhile.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes` of memory and touches none of it.
    ///
    /// # Errors
    /// When the system has no more address space to give.
    pub fn new(bytes: usize) -> anyhow::Result<Self> {
        if bytes == 0 {
            // A null mapping marks what must not be unmapped.
            return Ok(Self {
                start: NonNull::<u64>::dangling().cast(),
                bytes,
                mapping: (ptr::null_mut(), 0),
            });
        }
        let is_huge = bytes >= HUGE_PAGE_BYTES;
        let mapped = if is_huge { bytes.checked_add(HUGE_PAGE_BYTES) } else { Some(bytes) }
            .with_context(|| format!("mapping {bytes} bytes"))?;
        // SAFETY: a new anonymous mapping touches no existing memory.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error())
                .with_context(|| format!("mapping {bytes} bytes"));
        }
        let skip = if is_huge { base.cast::<u8>().align_offset(HUGE_PAGE_BYTES) } else { 0 };
        // SAFETY: `skip` is below the huge page that was added to the mapping.
        let start = unsafe { base.cast::<u8>().add(skip) };
        #[cfg(target_os = "linux")]
        if is_huge {
            // SAFETY: the range lies in the mapping. A refusal leaves ordinary pages, which are as right.
            unsafe { libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        let start = NonNull::new(start).context("the system mapped memory at address zero")?;
        Ok(Self { start, bytes, mapping: (base, mapped) })
    }

    /// Lets the system take these pages, which nobody has touched, from a NUMA node.
    ///
    /// # Errors
    /// When there is no such node, or the system does not do as it is asked to.
    pub fn bind_to_node(&self, node: u32) -> anyhow::Result<()> {
        let topology = Topology::new().context("reading the machine's topology")?;
        let is_it = |found: &&TopologyObject| found.os_index() == Some(node as usize);
        let found = topology.objects_with_type(ObjectType::NUMANode).find(is_it);
        let set = found.and_then(TopologyObject::nodeset);
        let set = set.with_context(|| format!("there is no NUMA node {node}"))?;
        let (policy, flags) = (MemoryBindingPolicy::Bind, MemoryBindingFlags::empty());
        topology
            .bind_memory_area(self.as_slice::<u8>(), set, policy, flags)
            .with_context(|| format!("binding {} bytes to NUMA node {node}", self.bytes))
    }

    /// Size in bytes, as asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first byte; the rest follows.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// All whole elements of type `T`.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        // SAFETY: the memory is mapped, aligned to a page, initialised by the system or by writes since,
        // and any bytes are a `Pod`.
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().cast(), self.bytes / size_of::<T>())
        }
    }

    /// All whole elements of type `T`, to write to.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.bytes / size_of::<T>())
        }
    }

    /// The NUMA node of each page; `None` for pages that nobody has touched.
    ///
    /// # Errors
    /// When the system does not tell.
    #[cfg(all(test, target_os = "linux"))]
    fn resident_nodes(&self) -> anyhow::Result<Vec<Option<u32>>> {
        // SAFETY: asks for a number.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let mut pages: Vec<*mut u8> = (0..self.bytes)
            .step_by(page_bytes)
            .map(|offset| self.start.as_ptr().wrapping_add(offset))
            .collect();
        let mut nodes = vec![0_i32; pages.len()];
        // SAFETY: without target nodes the call moves nothing and writes one status for each page.
        let result = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                0,
                pages.len(),
                pages.as_mut_ptr(),
                ptr::null::<i32>(),
                nodes.as_mut_ptr(),
                0,
            )
        };
        anyhow::ensure!(
            result == 0,
            "asking where {} pages are: {}",
            pages.len(),
            std::io::Error::last_os_error()
        );
        Ok(nodes.into_iter().map(|node| u32::try_from(node).ok()).collect())
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let (base, bytes) = self.mapping;
        if !base.is_null() {
            // SAFETY: this mapping is ours and nothing borrows it any more.
            unsafe { libc::munmap(base, bytes) };
        }
    }
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

/// Whole pages for `bytes`, one at least; `None` where there is no such size.
fn whole_pages(bytes: usize) -> Option<usize> {
    bytes.max(1).checked_next_multiple_of(PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use burn::tensor::DType;
    use burn_flex::FlexTensor;

    use super::*;

    #[test]
    fn a_region_is_zero_and_can_be_written() {
        for bytes in [0, 1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5] {
            let mut region = Region::new(bytes).unwrap();
            assert_eq!(region.as_slice::<u8>().len(), bytes);
            assert!(region.as_slice::<u8>().iter().all(|&byte| byte == 0));
            region.as_mut_slice::<f32>().fill(1.5);
            assert_eq!(region.as_slice::<f32>().len(), bytes / 4);
            assert!(region.as_slice::<f32>().iter().all(|&value| value == 1.5));
            let alignment = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { 8 };
            assert!(region.as_ptr().addr().is_multiple_of(alignment));
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(Region::new(usize::MAX).is_err());
        assert!(Region::new(1 << 60).is_err());
    }

    #[test]
    #[cfg(target_os = "linux")]
    #[expect(clippy::print_stderr, reason = "a test says why it checks less")]
    fn pages_lie_where_they_are_touched_first() {
        let mut region = Region::new(1 << 20).unwrap();
        let nodes = match region.resident_nodes() {
            Ok(nodes) => nodes,
            Err(error) => return eprintln!("skipped: {error:#}"),
        };
        assert!(nodes.iter().all(Option::is_none), "nothing is touched at first");
        region.as_mut_slice::<u8>().fill(1);
        let nodes = region.resident_nodes().unwrap();
        assert!(nodes.iter().all(Option::is_some));
        let topology = Topology::new().unwrap();
        let numa = ObjectType::NUMANode;
        for node in topology.objects_with_type(numa).filter_map(TopologyObject::os_index) {
            let mut region = Region::new(1 << 20).unwrap();
            if let Err(error) = region.bind_to_node(node as u32) {
                return eprintln!("skipped: {error:#}");
            }
            region.as_mut_slice::<u8>().fill(1);
            let nodes = region.resident_nodes().unwrap();
            assert!(nodes.iter().all(|&found| found == Some(node as u32)));
        }
        let none = Region::new(1 << 20).unwrap().bind_to_node(4321).unwrap_err();
        assert_eq!(none.to_string(), "there is no NUMA node 4321");
        if topology.objects_with_type(numa).len() < 2 {
            return eprintln!("skipped: this machine has one NUMA node");
        }
        for node in topology.objects_with_type(numa) {
            let (Some(index), Some(cpuset)) = (node.os_index(), node.cpuset()) else { continue };
            let Some(cpu) = cpuset.iter_set().next().map(usize::from) else { continue };
            let nodes = std::thread::spawn(move || {
                let team = crate::team::Team::new(&[cpu as u32]).unwrap();
                let mut region = Region::new(4 << 20).unwrap();
                let start = region.as_mut_slice::<u8>();
                let start = std::sync::Mutex::new(start);
                team.run(|_| start.lock().unwrap().fill(1));
                region.resident_nodes().unwrap()
            });
            let nodes = nodes.join().unwrap();
            assert!(nodes.iter().all(|&found| found == Some(index as u32)));
        }
    }

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
