//! Loads and stores by address, in memory that other GPUs and the host see too.

use cubecl::prelude::*;

use super::registers::held;
use super::words::Four;

/// Writes four numbers; `address` is a multiple of 16.
#[cube]
pub(super) fn store_four(address: u64, value: Four) {
    let (address, value) = (held::<u64>(address), held::<Four>(value));
    gpu_asm!("st.global.v4.f32 [{a}], {v};", a = in(_) address, v = in(_) value);
}

/// Reads four numbers from memory, whatever a cache holds; `address` is a multiple of 16.
#[cube]
pub(super) fn load_four(address: u64) -> Four {
    let address = held::<u64>(address);
    let value: Four;
    gpu_asm!("ld.volatile.global.v4.f32 {v}, [{a}];", v = out(_) value, a = in(_) address);
    value
}

/// Writes two words at once: a reader that sees one of them sees the other. `address` is a multiple of 8.
#[cube]
pub(super) fn store_long(address: u64, value: u64) {
    let (address, value) = (held::<u64>(address), held::<u64>(value));
    gpu_asm!("st.volatile.global.u64 [{a}], {v};", a = in(_) address, v = in(_) value);
}

/// Reads two words from memory at once, whatever a cache holds; `address` is a multiple of 8.
#[cube]
pub(super) fn load_long(address: u64) -> u64 {
    let address = held::<u64>(address);
    let value: u64;
    gpu_asm!("ld.volatile.global.u64 {v}, [{a}];", v = out(_) value, a = in(_) address);
    value
}

/// Writes a word to memory.
#[cube]
pub(super) fn store_word(address: u64, value: u32) {
    let (address, value) = (held::<u64>(address), held::<u32>(value));
    gpu_asm!("st.volatile.global.u32 [{a}], {v};", a = in(_) address, v = in(_) value);
}

/// Reads a word from memory, whatever a cache holds.
#[cube]
pub(super) fn load_word(address: u64) -> u32 {
    let address = held::<u64>(address);
    let value: u32;
    gpu_asm!("ld.volatile.global.u32 {v}, [{a}];", v = out(_) value, a = in(_) address);
    value
}

/// Writes a flag: a reader that sees it sees what this unit wrote before.
#[cube]
pub(super) fn raise(address: u64, value: u32) {
    let (address, value) = (held::<u64>(address), held::<u32>(value));
    gpu_asm!("st.release.sys.global.u32 [{a}], {v};", a = in(_) address, v = in(_) value);
}

/// Reads a flag: what was written before it was raised can be read from now on.
#[cube]
pub(super) fn look(address: u64) -> u32 {
    let address = held::<u64>(address);
    let value: u32;
    gpu_asm!("ld.acquire.sys.global.u32 {v}, [{a}];", v = out(_) value, a = in(_) address);
    value
}

/// Writes a flag of 64 bits, as [`raise()`] does.
#[cube]
pub(super) fn raise_long(address: u64, value: u64) {
    let (address, value) = (held::<u64>(address), held::<u64>(value));
    gpu_asm!("st.release.sys.global.u64 [{a}], {v};", a = in(_) address, v = in(_) value);
}

/// Reads a flag of 64 bits, as [`look()`] does.
#[cube]
pub(super) fn look_for_long(address: u64) -> u64 {
    let address = held::<u64>(address);
    let value: u64;
    gpu_asm!("ld.acquire.sys.global.u64 {v}, [{a}];", v = out(_) value, a = in(_) address);
    value
}

/// What this unit wrote is seen by all before what it writes from now on.
#[cube]
pub(super) fn fence() {
    gpu_asm!("fence.acq_rel.sys;");
}
