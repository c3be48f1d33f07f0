//! A launch that is lost in a panic of the thread that drives a GPU ends the run. In a process of its own, which no
//! other test can use a GPU in afterwards.

#[cfg(target_os = "linux")]
use std::fs;
use std::thread;

use executor::kernels::gpu::device::Gpu;

#[test]
fn a_panic_of_the_thread_that_drives_a_gpu_is_an_error() {
    let gpu = match Gpu::cuda(0).or_else(|_| Gpu::vulkan()) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("skipped: no GPU, and no Vulkan device in software: {error:#}");
            return;
        }
    };
    let span = gpu.allocate(256).unwrap();
    let panics = |name: &str| {
        let thread = thread::Builder::new().name(name.to_owned());
        assert!(thread.spawn(|| panic!("on purpose")).unwrap().join().is_err());
    };
    panics("some other thread");
    assert!(gpu.sync().is_ok() && gpu.check(&[&span]).is_ok() && gpu.read(&span).is_ok());
    // Its own thread has such a name, or panics of it would go unseen.
    #[cfg(target_os = "linux")]
    assert!(thread_names().iter().any(|name| name.starts_with("DSD-")), "{:?}", thread_names());
    panics("DSD-0-0");
    let errors = [gpu.sync(), gpu.check(&[&span]), gpu.flush(), gpu.read(&span).map(drop)];
    for error in errors.map(|done| format!("{:#}", done.unwrap_err())) {
        assert!(error.contains("a launch was lost") && error.contains("on purpose"), "{error}");
    }
}

/// The names of this process's threads.
#[cfg(target_os = "linux")]
fn thread_names() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    // A thread may have ended meanwhile.
    tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok()).collect()
}
