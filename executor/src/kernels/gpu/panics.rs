//! Panics of the threads that CubeCL drives GPUs with.
//!
//! CubeCL catches them, logs them and goes on without the launch that was under way, for which nothing waits: what it
//! would have written stays as it was. Two processes that fill the same cache of compiled kernels can come to that.

use std::panic;
use std::sync::{Once, OnceLock};
use std::thread;

use anyhow::{Result, bail};

/// How CubeCL's names of such threads begin.
const DRIVERS: [&str; 2] = ["DSU-", "DSD-"];

/// What the first one said.
static FIRST: OnceLock<String> = OnceLock::new();

/// Notices panics of such threads from now on; they are reported as before, too.
pub(super) fn notice() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let thread = thread::current();
            if thread.name().is_some_and(|name| DRIVERS.iter().any(|start| name.starts_with(start)))
            {
                let said = info.payload_as_str().unwrap_or("a panic").to_owned();
                // Only the first is kept: others may follow from it.
                let _is_first = FIRST.set(said);
            }
            report(info);
        }));
    });
}

/// # Errors
/// When a launch was lost in a panic.
pub(super) fn check() -> Result<()> {
    if let Some(said) = FIRST.get() {
        let words: Vec<&str> = said.split_whitespace().collect();
        bail!(
            "a launch was lost when the thread that drives the GPU panicked ({}): {}",
            words.join(" "),
            advice(said)
        );
    }
    Ok(())
}

/// What to do about a panic.
fn advice(said: &str) -> &'static str {
    let lacks_toolkit = ["CUDA installation not found", "nvrtc"];
    if lacks_toolkit.iter().any(|words| said.contains(words)) {
        "kernels are compiled by the CUDA toolkit's NVRTC with its headers; install them, and name their folder in \
         CUDA_PATH if it is not /usr/local/cuda, /opt/cuda or /usr, or compile the plan with --without for this GPU"
    } else {
        "start again, with no other process that compiles kernels at the same time"
    }
}

#[cfg(test)]
mod tests {
    use super::advice;

    #[test]
    fn what_a_missing_toolkit_makes_cubecl_say_is_told_apart() {
        // As CubeCL 0.11 and cudarc 0.19 word it.
        let headers =
            "\n        CUDA installation not found.\n        Please ensure that CUDA is installed";
        let library = "Unable to dynamically load the \"nvrtc\" shared library";
        assert!([headers, library].iter().all(|said| advice(said).contains("CUDA_PATH")));
        assert!(!advice("called `Option::unwrap()` on a `None` value").contains("CUDA_PATH"));
    }
}
