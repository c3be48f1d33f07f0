//! Memory of one device: regions that their users touch first, and an arena of buffers used again and again.
//!
//! - A region has no pages until it is written to; the thread that writes first decides the node.
//! - Regions of 2 MiB or more are aligned for huge pages and ask for them.

#![expect(unsafe_code, reason = "maps anonymous memory and views it as plain numbers")]

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context as _, ensure};
use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;

/// Size of a huge page on x86-64 and of a block mapping on aarch64 with 4 KiB pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Smallest size of a buffer: one page.
const SMALLEST_BYTES: usize = 4096;

/// Anonymous memory, zero at first.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// What was mapped, which is what must be unmapped.
    mapping: (*mut libc::c_void, usize),
}

/// Buffers that were given back, ready to be taken again.
#[derive(Clone, Default)]
pub struct Arena {
    free: Arc<Mutex<BTreeMap<usize, Vec<Region>>>>,
}

/// Memory taken from an arena, given back when dropped; its content is whatever was there.
pub struct Buffer {
    /// `None` only while it is being dropped.
    region: Option<Region>,
    bytes: usize,
    arena: Arena,
}

// SAFETY: a region owns its mapping as a `Vec` owns its allocation.
unsafe impl Send for Region {}
// SAFETY: shared access only reads.
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
    #[cfg(target_os = "linux")]
    pub fn resident_nodes(&self) -> anyhow::Result<Vec<Option<u32>>> {
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
        ensure!(
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
    /// A buffer of `bytes`, page-aligned, with unspecified content.
    ///
    /// # Errors
    /// When none is free and the system has no more address space to give.
    pub fn take(&self, bytes: usize) -> anyhow::Result<Buffer> {
        let class = size_class(bytes);
        let recycled = self.free().get_mut(&class).and_then(Vec::pop);
        let region = match recycled {
            Some(region) => region,
            None => Region::new(class)?,
        };
        Ok(Buffer { region: Some(region), bytes, arena: self.clone() })
    }

    /// Bytes of the buffers that wait to be taken again.
    pub fn free_bytes(&self) -> usize {
        self.free().iter().map(|(class, regions)| class * regions.len()).sum()
    }

    fn free(&self) -> MutexGuard<'_, BTreeMap<usize, Vec<Region>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    /// Size in bytes, as asked for.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All whole elements of type `T`.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        &self.region().as_slice()[..self.bytes / size_of::<T>()]
    }

    /// All whole elements of type `T`, to write to.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        let count = self.bytes / size_of::<T>();
        &mut self.region_mut().as_mut_slice()[..count]
    }

    /// The first byte; the rest follows.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region().as_ptr()
    }

    /// The buffer as the storage of a Burn tensor, without a copy; it comes back when the tensor is dropped.
    pub fn into_burn(self) -> Bytes {
        let bytes = self.bytes;
        // SAFETY: all bytes are initialised: the system gives zeros and buffers only ever hold plain numbers.
        unsafe { Bytes::from_controller(Box::new(self), bytes) }
    }

    fn region(&self) -> &Region {
        self.region.as_ref().expect("a buffer has its region until it is dropped")
    }

    fn region_mut(&mut self) -> &mut Region {
        self.region.as_mut().expect("a buffer has its region until it is dropped")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.arena.free().entry(region.bytes()).or_default().push(region);
        }
    }
}

impl AllocationController for Buffer {
    fn alloc_align(&self) -> usize {
        SMALLEST_BYTES
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

/// Sizes in steps of a quarter of a power of two: at most a fifth is lost, and a buffer is found again
/// by a slightly different batch.
fn size_class(bytes: usize) -> usize {
    let step = (bytes.max(SMALLEST_BYTES).next_power_of_two() / 8).max(SMALLEST_BYTES);
    bytes.max(1).next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use burn_backend::DType;
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
        let topology = hwlocality::Topology::new().unwrap();
        let numa = hwlocality::object::types::ObjectType::NUMANode;
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
        assert_eq!((buffer.as_slice::<u8>().len(), arena.free_bytes()), (10_000, 0));
        drop(buffer);
        assert!(arena.free_bytes() >= 10_000);
        let again = arena.take(9_900).unwrap();
        assert_eq!((again.as_ptr(), arena.free_bytes()), (start, 0));
        assert_ne!(arena.take(9_900).unwrap().as_ptr(), start);
    }

    #[test]
    fn size_classes_waste_little() {
        for bytes in (1..1 << 22).step_by(997) {
            let class = size_class(bytes);
            assert!(class >= bytes && class.is_multiple_of(SMALLEST_BYTES));
            assert!(
                class - bytes < SMALLEST_BYTES || class - bytes <= bytes / 4,
                "{bytes} {class}"
            );
        }
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
        assert!(arena.free_bytes() > 0);
    }
}
