//! `calibrate`: a machine file with rates measured here.

use std::process::{Child, Command, Stdio};
use std::{env, mem};

use anyhow::{Context as _, Result, bail};
use command_line::FileKind;
use indicatif::ProgressBar;
use ir::machine::Machine;

use executor::calibrate::{Share, calibrate, compile, compiling, spared, unbind};
use executor::kernels::cpu::isa::Isa;

use super::answer::print;
use super::{CalibrateArguments, CompileArguments};

pub(super) fn run(arguments: CalibrateArguments) -> Result<()> {
    // The file of the machine may be the one to fill in.
    let output = command_line::output_file(&arguments.output);
    command_line::check_outputs(output, [])?;
    let mut machine = match &arguments.machine {
        Some(path) => {
            let machine = command_line::read(path, FileKind::Machine, Machine::from_ron)?;
            machine.check().with_context(|| path.display().to_string())?;
            machine
        }
        None => probe::machine(None)?,
    };
    let differences = probe::mismatch(&machine)?;
    if !differences.is_empty() {
        bail!("the machine file describes another machine: {}", differences.join("; "));
    }
    let spinner = ProgressBar::new_spinner();
    let spared = spared(&machine);
    let mut compilers = compilers(&machine, &spared);
    let wait = |compilers: Vec<Child>| {
        spinner.set_message("compiling kernels");
        wait_for(compilers);
    };
    if spared.is_empty() {
        wait(mem::take(&mut compilers));
    }
    let progress = |what: &str| spinner.set_message(format!("measuring {what}"));
    calibrate(&mut machine, Isa::detect(), progress, || wait(compilers))?;
    spinner.finish_and_clear();
    let text = machine.to_ron()?;
    match output {
        Some(path) => {
            command_line::write(path, text.as_bytes())?;
            let devices = machine.listed_devices();
            command_line::tell(format_args!("wrote {}: measured {devices}", path.display()));
            Ok(())
        }
        None => print(&text),
    }
}

/// Processes of this program that compile the kernels of each kind of GPU: on `cpus`, or, where there are none, on all
/// processors. Where measuring fails they are left to their end: one that is stopped while it writes could leave half a
/// kernel in the cache.
fn compilers(machine: &Machine, cpus: &[u32]) -> Vec<Child> {
    let Ok(program) = env::current_exe() else { return Vec::new() };
    let start = |ordinal: u32, number: u32, shares: u32| {
        let mut command = Command::new(&program);
        command.arg("compile-kernels").args([ordinal, number, shares].map(|n| n.to_string()));
        command.args(cpus.iter().map(u32::to_string));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().ok()
    };
    let kinds = compiling(machine).into_iter();
    kinds
        .flat_map(|(ordinal, shares)| (0..shares).map(move |number| (ordinal, number, shares)))
        .filter_map(|(ordinal, number, shares)| start(ordinal, number, shares))
        .collect()
}

/// Waits for such processes, which may use all processors meanwhile. What one fails to compile is compiled when it is
/// measured, which then says what is wrong.
fn wait_for(processes: Vec<Child>) {
    for process in &processes {
        if let Err(error) = unbind(process.id()) {
            tracing::debug!("a process compiles on few processors: {error:#}");
        }
    }
    for mut process in processes {
        if !process.wait().is_ok_and(|status| status.success()) {
            tracing::debug!("a process that compiles kernels failed");
        }
    }
}

/// What such a process does.
pub(super) fn compile_share(arguments: &CompileArguments) -> Result<()> {
    let CompileArguments { ordinal, number, shares, cpus } = arguments;
    compile(*ordinal, Share { number: *number, shares: *shares }, cpus)
}
