//! Regions of memory that their users touch first.

use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use bytemuck::Pod;
use hwlocality::Topology;
use hwlocality::memory::binding::{MemoryBindingFlags, MemoryBindingPolicy};
use hwlocality::object::TopologyObject;
use hwlocality::object::types::ObjectType;
use ir::machine::DeviceKind;

use super::{HUGE_PAGE_BYTES, STRETCH_BYTES, whole_pages};
use crate::locked;

/// Regions from this size on have a mapping of their own: at most one of sixteen of their huge pages is not whole.
const LARGE_BYTES: usize = 16 * HUGE_PAGE_BYTES;

/// Anonymous memory, zero at first.
pub struct Region {
    start: NonNull<u8>,
    bytes: usize,
    /// What it lies in; `None` where it has no bytes.
    _mapping: Option<Arc<Mapping>>,
}

/// Where a device's regions come from: small ones lie side by side in stretches that have huge pages.
#[derive(Default)]
pub struct Regions {
    newest: Mutex<Option<Newest>>,
}

/// The stretch that regions come from.
struct Newest {
    stretch: Arc<Mapping>,
    /// Bytes of it that are in regions.
    used: usize,
}

/// Pages of the system's.
struct Mapping {
    base: *mut libc::c_void,
    /// What was mapped, which is what must be unmapped.
    mapped: usize,
    start: NonNull<u8>,
}

// SAFETY: a mapping is no more than addresses, which any thread may unmap.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Mapping {}
// SAFETY: a region owns its part of a mapping as a `Vec` owns its allocation.
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
            return Ok(Self { start: NonNull::<u64>::dangling().cast(), bytes, _mapping: None });
        }
        let mapping = Mapping::new(bytes)?;
        Ok(Self { start: mapping.start, bytes, _mapping: Some(Arc::new(mapping)) })
    }

    /// The same of pages that the system takes from a NUMA node, if that is one and it does as it is asked to: anywhere
    /// else they are as right.
    ///
    /// # Errors
    /// As there.
    pub fn near(bytes: usize, home: Option<&DeviceKind>) -> anyhow::Result<Self> {
        let region = Self::new(bytes)?;
        if let Some(&DeviceKind::Numa { node, .. }) = home
            && let Err(error) = region.bind_to_node(node)
        {
            tracing::debug!("{bytes} bytes lie where threads touch them first: {error:#}");
        }
        Ok(region)
    }

    /// Lets the system take these pages, which nobody has touched, from a NUMA node.
    ///
    /// # Errors
    /// When there is no such node, or the system does not do as it is asked to.
    fn bind_to_node(&self, node: u32) -> anyhow::Result<()> {
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

impl Regions {
    /// A region of `bytes` that nobody has touched: side by side with others if it is small.
    ///
    /// # Errors
    /// When the system has no more address space to give.
    pub fn take(&self, bytes: usize) -> anyhow::Result<Region> {
        if bytes == 0 || bytes >= LARGE_BYTES {
            return Region::new(bytes);
        }
        let size = whole_pages(bytes).with_context(|| format!("a region of {bytes} bytes"))?;
        let mut newest = locked(&self.newest);
        let fits = |newest: &Newest| {
            // The pages of one that nobody uses any more go back to the system.
            Arc::strong_count(&newest.stretch) > 1 && newest.used + size <= STRETCH_BYTES
        };
        let Newest { stretch, used } = match newest.take().filter(fits) {
            Some(newest) => newest,
            None => Newest { stretch: Arc::new(Mapping::new(STRETCH_BYTES)?), used: 0 },
        };
        // SAFETY: the stretch has as many bytes behind those that are used.
        let start = unsafe { stretch.start.add(used) };
        let region = Region { start, bytes, _mapping: Some(Arc::clone(&stretch)) };
        *newest = Some(Newest { stretch, used: used + size });
        Ok(region)
    }
}

impl Mapping {
    /// Maps `bytes`, aligned for huge pages where they are large enough for one.
    fn new(bytes: usize) -> anyhow::Result<Self> {
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
        Ok(Self { base, mapped, start })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours and nothing borrows it any more.
        unsafe { libc::munmap(self.base, self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::PAGE_BYTES;
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
    fn small_regions_lie_side_by_side() {
        let regions = Regions::default();
        let [mut first, second] = [5000, 1].map(|bytes| regions.take(bytes).unwrap());
        assert_eq!(second.as_ptr().addr() - first.as_ptr().addr(), 2 * PAGE_BYTES);
        assert!(first.as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
        first.as_mut_slice::<u8>().fill(1);
        assert_eq!(second.as_slice::<u8>(), [0]);
        drop(first);
        // Its pages are not handed out again.
        let third = regions.take(LARGE_BYTES - 1).unwrap();
        assert_eq!(third.as_ptr().addr() - second.as_ptr().addr(), PAGE_BYTES);
        assert!(third.as_slice::<u8>().iter().all(|&byte| byte == 0));
        let large = regions.take(LARGE_BYTES).unwrap();
        assert_eq!(Arc::strong_count(large._mapping.as_ref().unwrap()), 1);
        drop([second, third]);
        assert_eq!(Arc::strong_count(&locked(&regions.newest).as_ref().unwrap().stretch), 1);
        let next = regions.take(1).unwrap();
        assert!(next.as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
        // More than a stretch takes goes to the next.
        let many: Vec<Region> = (0..40).map(|_| regions.take(LARGE_BYTES - 1).unwrap()).collect();
        assert_eq!(many[0].as_ptr().addr() - next.as_ptr().addr(), PAGE_BYTES);
        assert!(many.windows(2).any(|pair| {
            pair[1].as_ptr().addr().abs_diff(pair[0].as_ptr().addr()) != LARGE_BYTES
        }));
        assert!(regions.take(0).unwrap().as_slice::<u8>().is_empty());
        assert!(regions.take(usize::MAX).is_err());
    }
}
