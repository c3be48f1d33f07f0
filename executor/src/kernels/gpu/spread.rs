//! Cubes of a launch spread evenly over a GPU's processors, whenever each of them begins.
//!
//! Processors that are all free are given cubes in turn. Where a launch begins while the one before ends (see
//! [`super::overlap`]), those that are free first are given as many as fit, and the last of them are what all wait for:
//! on an H200 224 cubes of a gate and an up went to 108 of 132 processors, three to some, and took 33.6 µs instead of
//! 26.4. So cubes ask for as much shared memory as lets no more than their share of a processor find a place there.

use super::device::{Gpu, is_hopper_or_newer};

/// Bytes of a processor's shared memory that a cube takes beside what it asks for.
const RESERVED_BYTES: usize = 1 << 10;

impl Gpu {
    /// Bytes of shared memory of a cube by which so many find places on a processor.
    pub(super) fn most_bytes_for_places(&self, places: usize) -> usize {
        self.processor_bytes() / places - RESERVED_BYTES
    }

    /// Bytes of shared memory of a cube by which no more than so many find places on a processor; 0 on GPUs whose
    /// launches follow one another as a whole.
    pub(super) fn least_bytes_for_places(&self, places: usize) -> usize {
        if is_hopper_or_newer(self.client.properties()) {
            bytes_of_one_less(self.processor_bytes(), places)
        } else {
            0
        }
    }

    /// Shared memory of a processor.
    fn processor_bytes(&self) -> usize {
        self.client.properties().hardware.max_shared_memory_size + RESERVED_BYTES
    }
}

/// The fewest bytes of a cube by which one more than `places` do not fit.
fn bytes_of_one_less(all: usize, places: usize) -> usize {
    (all / (places + 1) + 1 - RESERVED_BYTES).next_multiple_of(16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_cubes_fit_as_are_meant_to() {
        for (all, places) in [228, 100].into_iter().flat_map(|all| [(all << 10, 1), (all << 10, 2)])
        {
            let bytes = bytes_of_one_less(all, places) + RESERVED_BYTES;
            assert!(bytes * places <= all, "{places} fit");
            assert!(bytes * (places + 1) > all, "no more than {places} do");
        }
    }
}
