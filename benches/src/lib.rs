//! Measurements: `benches/kernels/` for kernels against the machine's limits, `peers/` for other programs.
