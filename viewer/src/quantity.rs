//! Times, bytes and shares as people read them.

/// `840 ns`, `12.3 µs`, `4.56 ms`, `1.2 s`: three figures.
pub fn nanos(nanos: f64) -> String {
    let size = nanos.abs();
    if size < 1e3 {
        format!("{nanos:.0} ns")
    } else if size < 999.5e3 {
        format!("{} µs", figures(nanos / 1e3))
    } else if size < 999.5e6 {
        format!("{} ms", figures(nanos / 1e6))
    } else {
        format!("{} s", figures(nanos / 1e9))
    }
}

/// A time on an axis whose ticks are `step` apart: as many decimals as tell them apart.
pub fn nanos_in_steps(nanos: f64, step: f64) -> String {
    let units = [(1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns")];
    // The unit of a few steps, so that neighbours have the same one.
    let (size, unit) =
        units.into_iter().find(|(size, _)| step * 5.0 >= *size).unwrap_or((1.0, "ns"));
    let decimals = (-(step / size).log10()).ceil().clamp(0.0, 3.0) as usize;
    // Not the −0 that rounding leaves.
    format!("{:.decimals$} {unit}", nanos / size + 0.0)
}

/// `512 B`, `16.0 KiB`, `23.4 GiB`: three figures.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 999.5 && unit + 1 < UNITS.len() {
        size /= 1024.0;
        unit += 1;
    }
    format!("{} {}", figures(size), UNITS[unit])
}

/// `3.2 GFLOP`.
pub fn flops(flops: f64) -> String {
    for (unit, size) in [("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)] {
        if flops >= size {
            return format!("{} {unit}FLOP", figures(flops / size));
        }
    }
    format!("{flops:.0} FLOP")
}

/// `1 token`, `512 tokens`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// `81 %`, with one decimal below 10.
pub fn share(part: f64) -> String {
    let percent = part * 100.0;
    if percent.abs() < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A relative change, with its sign; changes beyond tenfold as a factor.
pub fn change(change: f64) -> String {
    if change >= 9.0 {
        return format!("{:.0}×", change + 1.0);
    }
    signed(change, share(change.abs()))
}

/// How much more the second is than the first, relative to the first.
pub fn relative_change(before: u64, after: u64) -> Option<f64> {
    (before > 0).then(|| after as f64 / before as f64 - 1.0)
}

fn signed(value: f64, size: String) -> String {
    if value < 0.0 { format!("−{size}") } else { format!("+{size}") }
}

fn figures(value: f64) -> String {
    let size = value.abs();
    if size < 9.995 {
        format!("{value:.2}")
    } else if size < 99.95 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_ticks_differ() {
        assert_eq!(nanos_in_steps(124_050_000.0, 50_000.0), "124050 µs");
        assert_eq!(nanos_in_steps(-0.0, 20e6), "0 ms");
        assert_eq!(nanos_in_steps(1.5e9, 500e6), "1.5 s");
        assert_eq!(nanos_in_steps(300.0, 100.0), "300 ns");
    }

    #[test]
    fn quantities_keep_three_figures_and_change_units_before_four() {
        assert_eq!(nanos(840.0), "840 ns");
        assert_eq!(nanos(12_345.0), "12.3 µs");
        assert_eq!(nanos(999_999.0), "1.00 ms");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(23_400 << 20), "22.9 GiB");
        assert_eq!(flops(3.2e9), "3.20 GFLOP");
        assert_eq!(change(-0.065), "−6.5 %");
        assert_eq!(change(11.0), "12×");
    }

    #[test]
    fn only_one_has_no_plural() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "run")), ["0 runs", "1 run", "2 runs"]);
    }
}
