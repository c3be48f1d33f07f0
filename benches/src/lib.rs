//! Measurements: `benches/kernels.rs` for kernels against the machine's limits, `peers/` for other programs.
