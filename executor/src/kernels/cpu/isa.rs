//! Levels of the instruction set that kernels are written for.
//!
//! A level holds all lower ones, but that those with AVX-512 need not hold AVX-VNNI, which has wider dot products
//! there. So a kernel that has nothing for a level runs the next lower one it has.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use anyhow::bail;

/// A set of processor features, lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust: any processor.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI dot products of bytes: processors for desktops and laptops.
    Avx2Vnni,
    /// AVX-512 F, BW, DQ and VL, with AVX2.
    Avx512,
    /// The same with VNNI dot products of bytes, as before there were those of BF16.
    Avx512Vnni,
    /// The same with BF16 dot products.
    Avx512Bf16Vnni,
    /// The same with AMX tiles of bf16 and 8-bit integers.
    Amx,
}

impl Isa {
    /// All levels, lowest first.
    pub const ALL: [Isa; 7] = [
        Isa::Portable,
        Isa::Avx2,
        Isa::Avx2Vnni,
        Isa::Avx512,
        Isa::Avx512Vnni,
        Isa::Avx512Bf16Vnni,
        Isa::Amx,
    ];

    /// The highest level that this processor and its system offer.
    ///
    /// Where there is AMX this also asks the system to let the process use it.
    pub fn detect() -> Self {
        // A fact about the machine, and asking for it is too slow for every kernel.
        static HIGHEST: OnceLock<Isa> = OnceLock::new();
        *HIGHEST.get_or_init(detect)
    }

    /// This level, which kernels may then rely on.
    ///
    /// # Panics
    /// When this processor does not have it.
    pub(super) fn checked(self) -> Self {
        if !self.is_available() {
            self.is_missing();
        }
        self
    }

    /// Whether this processor and its system offer the level.
    pub fn is_available(self) -> bool {
        self <= Self::detect() && (self != Isa::Avx2Vnni || has_avx_vnni())
    }

    /// Ends what relies on a level that is not there.
    pub(super) fn is_missing(self) -> ! {
        panic!("this processor does not have {self}")
    }

    /// The levels of this processor, lowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx2Vnni => "avx2-vnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vnni => "avx512-vnni",
            Isa::Avx512Bf16Vnni => "avx512-bf16-vnni",
            Isa::Amx => "amx",
        })
    }
}

impl FromStr for Isa {
    type Err = anyhow::Error;
    fn from_str(text: &str) -> anyhow::Result<Self> {
        match Self::ALL.into_iter().find(|isa| isa.to_string() == text) {
            Some(isa) => Ok(isa),
            None => {
                let names = Self::ALL.map(|isa| isa.to_string());
                bail!("unknown instruction set {text:?}: there are {}", names.join(", "))
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Portable
}

/// Whether there are dot products of bytes that need no AVX-512.
fn has_avx_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avxvnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    macro_rules! has { ($($feature:tt),*) => { $(is_x86_feature_detected!($feature))&&* } }
    if !has!("avx2", "fma", "f16c") {
        Isa::Portable
    } else if !has!("avx512f", "avx512bw", "avx512dq", "avx512vl") {
        if has_avx_vnni() { Isa::Avx2Vnni } else { Isa::Avx2 }
    } else if !has!("avx512vnni") {
        Isa::Avx512
    } else if !has!("avx512bf16") {
        Isa::Avx512Vnni
    } else if !amx::is_usable() {
        Isa::Avx512Bf16Vnni
    } else {
        Isa::Amx
    }
}

#[cfg(target_arch = "x86_64")]
mod amx {
    #![expect(unsafe_code, reason = "asks the system for the tile registers")]

    use std::arch::x86_64::__cpuid_count;

    /// Bits of leaf 7's EDX: AMX-BF16, AMX-TILE and AMX-INT8.
    const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    /// `ARCH_REQ_XCOMP_PERM` of Linux's asm/prctl.h.
    #[cfg(target_os = "linux")]
    const REQUEST_PERMISSION: libc::c_long = 0x1023;
    /// The tile data's component of the extended state.
    #[cfg(target_os = "linux")]
    const TILE_DATA: libc::c_long = 18;

    pub(super) fn is_usable() -> bool {
        __cpuid_count(7, 0).edx & FEATURES == FEATURES && is_permitted()
    }

    #[cfg(target_os = "linux")]
    fn is_permitted() -> bool {
        // SAFETY: the call takes two integers and touches no memory of this process.
        unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn is_permitted() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse::<Isa>().unwrap(), isa);
        }
        let message = "sse9".parse::<Isa>().unwrap_err().to_string();
        assert!(message.contains("sse9") && message.contains("avx2"), "{message}");
    }

    #[test]
    fn lower_levels_are_available_too() {
        let available = Isa::available();
        assert_eq!(available.first(), Some(&Isa::Portable));
        assert_eq!(available.last(), Some(&Isa::detect()));
        assert!(available.is_sorted());
    }
}
