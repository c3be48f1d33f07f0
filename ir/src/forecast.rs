//! What a compiler predicts of a plan: bytes, times and what else was priced.

use serde::{Deserialize, Serialize};

use crate::id::{DeviceId, Table};

/// Predictions.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Forecast {
    /// Bytes on each device.
    pub devices: Table<DeviceId, DeviceForecast>,
    /// Time of each program.
    pub programs: Vec<ProgramForecast>,
    /// The chosen placement, then others that were compared with it, best first; not all that were priced.
    pub candidates: Vec<Candidate>,
}

/// Bytes on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceForecast {
    /// Weights in their compute formats.
    pub weight_bytes: u64,
    /// KV caches.
    pub cache_bytes: u64,
    /// Most bytes of buffers at one time, over all programs.
    pub buffer_bytes: u64,
    /// The window that fetched weights pass through.
    pub fetch_bytes: u64,
    /// Scratch memory of its kernels; of a NUMA node also the letters of the GPUs that it exchanges values with.
    pub workspace_bytes: u64,
    /// What the driver and libraries take of a GPU that is used.
    pub reserved_bytes: u64,
    /// What the device has.
    pub capacity_bytes: u64,
}

/// Time of one program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramForecast {
    /// The program.
    pub program: String,
    /// Tokens that prefill feeds, or that each sequence has cached before decode.
    pub tokens: u32,
    /// Start to end of one run of [`crate::plan::Program::estimated()`]; of prefill with nothing cached.
    pub nanos: u64,
    /// Time the busiest lane works meanwhile: what bounds throughput when runs overlap.
    pub busiest_lane_nanos: u64,
    /// Runs with other numbers of such tokens.
    pub others: Vec<RunForecast>,
    /// A run of prefill of the most tokens behind as many cached tokens as the context leaves; `None` where that
    /// leaves none, and for decode.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub behind: Option<RunForecast>,
}

/// Time of a run of another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunForecast {
    /// Tokens that prefill feeds, or that each sequence has cached before.
    pub tokens: u32,
    /// Start to end.
    pub nanos: u64,
}

/// A placement that was priced.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// What it is, for people: `all on gpu0`, `pipeline numa0 → numa1`.
    pub name: String,
    /// One prefill of the most tokens; `None` where it does not fit.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub prefill_nanos: Option<u64>,
    /// One decode step of one sequence.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub decode_nanos: Option<u64>,
    /// What it lacks: device and bytes.
    #[serde(deserialize_with = "crate::ron_text::written")]
    pub missing: Option<(DeviceId, u64)>,
}

impl DeviceForecast {
    /// Everything that must be there at once; at most `u64::MAX`.
    pub fn needed_bytes(&self) -> u64 {
        let Self {
            weight_bytes,
            cache_bytes,
            buffer_bytes,
            fetch_bytes,
            workspace_bytes,
            reserved_bytes,
            capacity_bytes: _,
        } = *self;
        [weight_bytes, cache_bytes, buffer_bytes, fetch_bytes, workspace_bytes, reserved_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// What of that the device has no room for.
    pub fn missing_bytes(&self) -> u64 {
        self.needed_bytes().saturating_sub(self.capacity_bytes)
    }

    /// What the device has left beside that.
    pub fn free_bytes(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.needed_bytes())
    }
}

impl ProgramForecast {
    /// Nanoseconds of a run of `tokens` (fed by prefill, cached before decode): on the line between the next fewer and
    /// the next more that are known, beyond all on that of the last two, and below all as long as the first.
    pub fn nanos_of(&self, tokens: u32) -> f64 {
        let own = RunForecast { tokens: self.tokens, nanos: self.nanos };
        let mut runs: Vec<RunForecast> = [own].into_iter().chain(self.others.clone()).collect();
        runs.sort_by_key(|run| run.tokens);
        runs.dedup_by_key(|run| run.tokens);
        let above = runs.partition_point(|run| run.tokens < tokens).min(runs.len() - 1);
        let Some(below) = above.checked_sub(1) else { return runs[above].nanos as f64 };
        let point = |run: RunForecast| (f64::from(run.tokens), run.nanos as f64);
        on_line(f64::from(tokens), [runs[below], runs[above]].map(point))
    }

    /// Nanoseconds that a run of prefill of `tokens` takes longer behind `past` cached tokens than behind none: each
    /// looks back on all of them.
    pub fn look_back_nanos(&self, tokens: f64, past: f64) -> f64 {
        let Some(behind) = &self.behind else { return 0.0 };
        let longer = behind.nanos.saturating_sub(self.nanos) as f64;
        longer * (tokens / f64::from(self.tokens.max(1))) * (past / f64::from(behind.tokens.max(1)))
    }
}

/// The second number of the point at `at` on the line through two points with unlike first numbers.
pub fn on_line(at: f64, [(from, below), (to, above)]: [(f64, f64); 2]) -> f64 {
    let part = (at - from) / (to - from);
    below + part * (above - below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_between_known_ones_lie_on_lines() {
        let run = |tokens, nanos| RunForecast { tokens, nanos };
        let forecast = |tokens, others| ProgramForecast {
            program: "prefill".into(),
            tokens,
            nanos: 500,
            busiest_lane_nanos: 0,
            others,
            behind: None,
        };
        let known = forecast(512, vec![run(32, 100), run(128, 200)]);
        let times = [1, 32, 80, 128, 320, 512, 1024].map(|tokens| known.nanos_of(tokens));
        assert_eq!(times, [100.0, 100.0, 150.0, 200.0, 350.0, 500.0, 900.0]);
        // Of decode, the other is the one with nothing cached.
        assert_eq!(forecast(128, vec![run(0, 300)]).nanos_of(64), 400.0);
        assert_eq!(forecast(512, Vec::new()).nanos_of(7), 500.0);
        assert_eq!(forecast(0, vec![run(0, 400)]).nanos_of(0), 500.0);
    }

    #[test]
    fn a_run_takes_longer_behind_others_as_both_are_long() {
        let mut forecast = ProgramForecast {
            program: "prefill".into(),
            tokens: 512,
            nanos: 500,
            busiest_lane_nanos: 500,
            others: Vec::new(),
            behind: None,
        };
        assert_eq!(forecast.look_back_nanos(512.0, 1024.0), 0.0);
        forecast.behind = Some(RunForecast { tokens: 1024, nanos: 700 });
        assert_eq!(forecast.look_back_nanos(512.0, 1024.0), 200.0);
        assert_eq!(forecast.look_back_nanos(128.0, 2048.0), 100.0);
    }
}
