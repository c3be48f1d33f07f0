#![allow(warnings, unsafe_code, clippy::all)]
use executor::kernels::cpu::{isa::Isa, linear::*, pack::*};
use executor::memory::*;
use executor::team::*;
use ir::op::Then;
use ir::tensor::Format;
use std::arch::x86_64::*;
use std::time::Instant;
#[target_feature(enable = "avx512f")]
unsafe fn read(p: &[u8]) -> i64 {
    let mut a = [_mm512_setzero_si512(); 4];
    let mut q = p.as_ptr();
    let e = q.add(p.len());
    while q < e {
        for i in 0..4 {
            a[i] = _mm512_add_epi64(a[i], _mm512_loadu_si512(q.add(i * 64) as _));
            _mm_prefetch::<_MM_HINT_T0>(q.wrapping_add(4096 + 64 * i) as *const i8);
        }
        q = q.add(256);
    }
    let mut s = 0;
    for v in a {
        s += _mm512_reduce_add_epi64(v);
    }
    s
}
#[target_feature(enable = "avx512f,avx512bf16,avx512vnni,avx512bw")]
unsafe fn bf16(n: usize) -> f32 {
    let mut a = [_mm512_setzero_ps(); 16];
    let x: __m512bh = std::mem::transmute(_mm512_set1_epi16(0x3f80));
    let y = x;
    for _ in 0..n {
        for i in 0..16 {
            a[i] = _mm512_dpbf16_ps(a[i], x, y);
        }
    }
    let mut s = 0.;
    for v in a {
        s += _mm512_reduce_add_ps(v);
    }
    s
}
static CPU: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
fn now() -> f64 {
    if CPU.load(std::sync::atomic::Ordering::Relaxed) {
        let mut t: libc::timespec = unsafe { std::mem::zeroed() };
        unsafe {
            libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t);
        }
        t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
    } else {
        static S: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        S.get_or_init(Instant::now).elapsed().as_secs_f64()
    }
}
fn best(n: usize, mut f: impl FnMut(usize)) -> f64 {
    let mut b = f64::MAX;
    for i in 0..n {
        let t = now();
        f(i);
        b = b.min(now() - t);
    }
    b
}
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let isa: Isa =
        if args.len() > 1 && args[1] != "-" { args[1].parse().unwrap() } else { Isa::detect() };
    let formats: Vec<Format> = if args.len() > 2 && args[2] != "-" {
        args[2].split(',').map(|f| f.parse().unwrap()).collect()
    } else {
        Format::ALL.to_vec()
    };
    let ms: Vec<usize> = if args.len() > 3 {
        args[3].split(',').map(|f| f.parse().unwrap()).collect()
    } else {
        vec![1, 8, 512]
    };
    let threads: usize = args.get(4).map_or(2, |t| t.parse().unwrap());
    let n: usize = args.get(5).map_or(4096, |t| t.parse().unwrap());
    let k: usize = args.get(6).map_or(4096, |t| t.parse().unwrap());
    CPU.store(threads == 1, std::sync::atomic::Ordering::Relaxed);
    let team = Team::new(&(0..threads as u32).collect::<Vec<_>>()).unwrap();
    let mut big = Region::new(512 << 20).unwrap();
    {
        let p = big.as_ptr() as usize;
        team.run(|m| {
            let r = team.split(m, 512 << 20, 1 << 21);
            for i in r.step_by(64) {
                unsafe {
                    *((p + i) as *mut u8) = i as u8;
                }
            }
        });
    }
    let bandwidth = || {
        let b: &[u8] = big.as_slice();
        512. * 1048576.
            / best(5, |_| {
                team.for_each_chunk(512 << 20, 1 << 20, |r| unsafe {
                    std::hint::black_box(read(&b[r]));
                })
            })
            / 1e9
    };
    let peak = || {
        1e5 * 16. * 64. * threads as f64
            / best(20, |_| {
                team.run(|_| unsafe {
                    std::hint::black_box(bf16(100000));
                })
            })
            / 1e9
    };
    let disp = best(2000, |_| team.run(|_| {}));
    println!(
        "bandwidth {:.1} GB/s  bf16 peak {:.0} GF, dispatch {:.2} us",
        bandwidth(),
        peak(),
        disp * 1e6
    );
    for f in formats {
        let count = if ms.iter().any(|&m| m < 64) {
            (200usize << 20).div_ceil(packed_bytes(f, n, k)).max(1)
        } else {
            1
        };
        let w: Vec<PackedMatrix> = (0..count)
            .map(|s| {
                pack(&team, f, n, k, &|r, to| {
                    let mut st = (s as u32 + 1) * 7919 + r.start as u32;
                    for v in to.iter_mut() {
                        st = st.wrapping_mul(1664525).wrapping_add(1013904223);
                        *v = (st >> 8) as f32 / 8388608. - 1.;
                    }
                })
                .unwrap()
            })
            .collect();
        for &m in &ms {
            let x: Vec<f32> = (0..m * k).map(|i| (i as f32 * 0.137).sin()).collect();
            let mut out = vec![0f32; m * n];
            let bw = bandwidth();
            let pk = peak();
            let t = best(if m < 64 { 40.max(3 * count) } else { (40960 / m).max(10) }, |i| {
                linear(
                    &team,
                    isa,
                    &Linear {
                        x: &x,
                        tokens: m,
                        norm: None,
                        weights: &[&w[i % count]],
                        biases: &[],
                        then: Then::Nothing,
                        residual: None,
                    },
                    &mut [&mut out],
                )
                .unwrap()
            });
            let bytes = w[0].bytes() as f64;
            let pk = match f {
                Format::Bf16 => pk,
                Format::F32 | Format::F16 => pk / 2.,
                _ => pk * 2.,
            };
            println!(
                "{isa} {f} M={m} {:.3} ms  {:.1} GB/s ({:.0} % of {bw:.1})  {:.0} GF ({:.0} % of {pk:.0})",
                t * 1e3,
                bytes / t / 1e9,
                bytes / t / 1e7 / bw,
                2. * (m * n * k) as f64 / t / 1e9,
                2. * (m * n * k) as f64 / t / 1e7 / pk
            );
        }
    }
}
