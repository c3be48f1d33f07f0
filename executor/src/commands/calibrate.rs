//! `calibrate`: a machine file with rates measured here.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;
use ir::machine::Machine;

use executor::calibrate::{Share, calibrate, compile, compiling};
use executor::kernels::cpu::isa::Isa;

use super::answer::print;
use super::{CalibrateArguments, CompileArguments};

pub(super) fn run(arguments: CalibrateArguments) -> Result<()> {
    // The file of the machine may be the one to fill in.
    let output = command_line::output_file(&arguments.output);
    command_line::check_outputs(output, [])?;
    let mut machine = match &arguments.machine {
        Some(path) => {
            let reading = || format!("reading {}", path.display());
            let text = std::fs::read_to_string(path).with_context(reading)?;
            let machine = Machine::from_ron(&text).with_context(reading)?;
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
    for (ordinal, shares) in compiling(&machine) {
        spinner.set_message(format!("compiling kernels of gpu{ordinal}"));
        compile_side_by_side(ordinal, shares);
    }
    calibrate(&mut machine, Isa::detect(), |what| {
        spinner.set_message(format!("measuring {what}"))
    })?;
    spinner.finish_and_clear();
    let text = machine.to_ron()?;
    match output {
        Some(path) => command_line::write(path, text.as_bytes()),
        None => print(&text),
    }
}

/// Lets processes of this program compile the kernels of a GPU. What one of them fails to compile is compiled when it
/// is measured, which then says what is wrong.
fn compile_side_by_side(ordinal: u32, shares: u32) {
    let Ok(program) = env::current_exe() else { return };
    let start = |number: u32| {
        let mut command = Command::new(&program);
        command.arg("compile-kernels").args([ordinal, number, shares].map(|n| n.to_string()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().ok()
    };
    // All are begun before one is waited for.
    let begun: Vec<_> = (0..shares).filter_map(start).collect();
    for mut process in begun {
        if !process.wait().is_ok_and(|status| status.success()) {
            tracing::debug!("a process that compiles for gpu{ordinal} failed");
        }
    }
}

/// What such a process does.
pub(super) fn compile_share(arguments: &CompileArguments) -> Result<()> {
    let &CompileArguments { ordinal, number, shares } = arguments;
    compile(ordinal, Share { number, shares })
}
