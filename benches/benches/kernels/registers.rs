//! Loops of products of numbers that stay in registers.

use executor::kernels::cpu::arithmetic::Arithmetic;

/// Turns of a loop.
#[derive(Clone, Copy)]
pub(crate) struct Turns {
    /// Multiplications and additions of a turn.
    operations: usize,
    take: unsafe fn(usize),
}

impl Turns {
    /// Multiplications and additions of a turn.
    pub(crate) fn operations(self) -> usize {
        self.operations
    }

    /// Takes so many.
    pub(crate) fn take(self, turns: usize) {
        #[expect(unsafe_code, reason = "loops of instructions that were looked for")]
        // SAFETY: turns are made for levels that the processor has.
        unsafe {
            (self.take)(turns);
        }
    }

    /// Those that multiply with what kernels multiply with; none of plain Rust.
    ///
    /// # Panics
    /// When this processor does not have the instructions.
    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn of(_: Arithmetic) -> Option<Self> {
        None
    }

    /// Those that multiply with what kernels multiply with; none of plain Rust.
    ///
    /// # Panics
    /// When this processor does not have the instructions.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn of(arithmetic: Arithmetic) -> Option<Self> {
        use executor::kernels::cpu::isa::Isa;
        use x86_64::{SUMS_OF_256, SUMS_OF_512, SUMS_OF_TILES};

        // With the products of one instruction.
        let (level, take, sums, products): (Isa, unsafe fn(usize), usize, usize) = match arithmetic
        {
            Arithmetic::Plain => return None,
            Arithmetic::Avx2F32 => (Isa::Avx2, x86_64::avx2_f32, SUMS_OF_256, 8),
            Arithmetic::Avx2Words => (Isa::Avx2, x86_64::avx2_words, SUMS_OF_256, 16),
            Arithmetic::Avx2Bytes => (Isa::Avx2, x86_64::avx2_bytes, SUMS_OF_256, 32),
            Arithmetic::Avx2Nibbles => (Isa::Avx2, x86_64::avx2_nibbles, SUMS_OF_256, 32),
            Arithmetic::Avx2Vnni => (Isa::Avx2Vnni, x86_64::avx2_vnni, SUMS_OF_256, 32),
            Arithmetic::Avx512F32 => (Isa::Avx512, x86_64::avx512_f32, SUMS_OF_512, 16),
            Arithmetic::Avx512Words => (Isa::Avx512, x86_64::avx512_words, SUMS_OF_512, 32),
            Arithmetic::Avx512Vnni => (Isa::Avx512Vnni, x86_64::avx512_vnni, SUMS_OF_512, 64),
            Arithmetic::Avx512Bf16 => (Isa::Avx512Bf16Vnni, x86_64::avx512_bf16, SUMS_OF_512, 32),
            Arithmetic::AmxBf16 => (Isa::Amx, x86_64::amx_bf16, SUMS_OF_TILES, 16 * 16 * 32),
            Arithmetic::AmxBytes => (Isa::Amx, x86_64::amx_bytes, SUMS_OF_TILES, 16 * 16 * 64),
        };
        assert!(level.is_available(), "{arithmetic} at a level that this processor does not have");
        Some(Self { operations: 2 * sums * products, take })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    #![expect(
        unsafe_code,
        reason = "loops in assembly, or with parts that the compiler cannot see"
    )]

    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;
    use std::mem::transmute;

    /// Sums under way at once: more than the latency of products hides, and as many as leave four of sixteen registers.
    pub(super) const SUMS_OF_256: usize = 12;
    /// The same with 32 registers.
    pub(super) const SUMS_OF_512: usize = 16;
    /// The executor's tiles of sums.
    pub(super) const SUMS_OF_TILES: usize = 4;

    /// Defines a loop that takes `$sum` to `$next` for each of `$sums` sums, with numbers that the compiler takes for
    /// new ones each time: products of the same ones would be made once.
    macro_rules! turns {
        (
            $name:ident, $features:literal, $register:ident, $sums:ident,
            [$start:expr, $number:expr], |$sum:ident, $x:ident| $next:expr
        ) => {
            #[target_feature(enable = $features)]
            pub(super) fn $name(turns: usize) {
                let mut $x = $number;
                let mut sums = [$start; $sums];
                for _ in 0..turns {
                    for sum in &mut sums {
                        // SAFETY: nothing is done.
                        unsafe {
                            asm!("/* {x} */", x = inout($register) $x, options(nomem, nostack));
                        }
                        let $sum = *sum;
                        *sum = $next;
                    }
                }
                black_box(sums);
            }
        };
    }

    turns!(
        avx2_f32,
        "avx2,fma",
        ymm_reg,
        SUMS_OF_256,
        [_mm256_setzero_ps(), _mm256_set1_ps(0.5)],
        |sum, x| _mm256_fmadd_ps(sum, x, x)
    );
    turns!(
        avx2_words,
        "avx2",
        ymm_reg,
        SUMS_OF_256,
        [_mm256_setzero_si256(), _mm256_set1_epi16(0x102)],
        |sum, x| _mm256_add_epi32(sum, _mm256_madd_epi16(x, x))
    );
    // With the sign that goes from one factor to the other.
    turns!(
        avx2_bytes,
        "avx2",
        ymm_reg,
        SUMS_OF_256,
        [_mm256_setzero_si256(), _mm256_set1_epi32(0x0102_0304)],
        |sum, x| {
            let pairs = _mm256_maddubs_epi16(x, _mm256_sign_epi8(x, x));
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    );
    turns!(
        avx2_nibbles,
        "avx2",
        ymm_reg,
        SUMS_OF_256,
        [_mm256_setzero_si256(), _mm256_set1_epi32(0x0102_0304)],
        |sum, x| _mm256_add_epi16(sum, _mm256_maddubs_epi16(x, x))
    );
    turns!(
        avx2_vnni,
        "avx2,avxvnni",
        ymm_reg,
        SUMS_OF_256,
        [_mm256_setzero_si256(), _mm256_set1_epi32(0x0102_0304)],
        |sum, x| _mm256_dpbusd_avx_epi32(sum, x, x)
    );
    turns!(
        avx512_f32,
        "avx512f",
        zmm_reg,
        SUMS_OF_512,
        [_mm512_setzero_ps(), _mm512_set1_ps(0.5)],
        |sum, x| _mm512_fmadd_ps(sum, x, x)
    );
    turns!(
        avx512_words,
        "avx512f,avx512bw",
        zmm_reg,
        SUMS_OF_512,
        [_mm512_setzero_si512(), _mm512_set1_epi16(0x102)],
        |sum, x| _mm512_add_epi32(sum, _mm512_madd_epi16(x, x))
    );
    turns!(
        avx512_vnni,
        "avx512f,avx512vnni",
        zmm_reg,
        SUMS_OF_512,
        [_mm512_setzero_si512(), _mm512_set1_epi32(0x0102_0304)],
        |sum, x| _mm512_dpbusd_epi32(sum, x, x)
    );
    turns!(
        avx512_bf16,
        "avx512f,avx512bf16",
        zmm_reg,
        SUMS_OF_512,
        // Twice 0.5.
        [_mm512_setzero_ps(), _mm512_set1_epi32(0x3f00_3f00)],
        |sum, x| {
            // SAFETY: both are 512 bits.
            let x = unsafe { transmute::<__m512i, __m512bh>(x) };
            _mm512_dpbf16_ps(sum, x, x)
        }
    );

    /// Defines a loop of products of tiles, in the registers that the executor uses.
    macro_rules! turns_of_tiles {
        ($name:ident, $instruction:literal) => {
            /// # Safety
            /// The process has permission to use tiles.
            pub(super) unsafe fn $name(turns: usize) {
                /// The operand of `ldtilecfg`: palette 1, and eight tiles of sixteen rows of 64 bytes.
                #[repr(align(64))]
                struct Shapes([u8; 64]);
                let mut shapes = Shapes([0; 64]);
                shapes.0[0] = 1;
                shapes.0[16..32].copy_from_slice(&[64, 0].repeat(8));
                shapes.0[48..56].fill(16);
                // As bf16, 0.5.
                let numbers = [0x3f00_u16; 16 * 32];
                // SAFETY: the operand is a valid configuration, loads read what the numbers have, and no tile is in
                // use afterwards.
                unsafe {
                    asm!(
                        "ldtilecfg [{shapes}]",
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "tileloadd tmm4, [{numbers} + {stride}*1]",
                        "tileloadd tmm5, [{numbers} + {stride}*1]",
                        "tileloadd tmm6, [{numbers} + {stride}*1]",
                        "tileloadd tmm7, [{numbers} + {stride}*1]",
                        "test {turns}, {turns}",
                        "jz 3f",
                        "2:",
                        concat!($instruction, " tmm0, tmm4, tmm6"),
                        concat!($instruction, " tmm1, tmm4, tmm7"),
                        concat!($instruction, " tmm2, tmm5, tmm6"),
                        concat!($instruction, " tmm3, tmm5, tmm7"),
                        "dec {turns}",
                        "jnz 2b",
                        "3:",
                        "tilerelease",
                        shapes = in(reg) &raw const shapes,
                        numbers = in(reg) numbers.as_ptr(),
                        stride = in(reg) 64_usize,
                        turns = inout(reg) turns => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack, readonly),
                    );
                }
            }
        };
    }

    turns_of_tiles!(amx_bf16, "tdpbf16ps");
    turns_of_tiles!(amx_bytes, "tdpbssd");
}
