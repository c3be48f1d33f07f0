//! `calibrate`: a machine file with rates measured here.

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;
use ir::machine::Machine;

use executor::calibrate::calibrate;
use executor::kernels::cpu::isa::Isa;

use super::CalibrateArguments;
use super::answer::print;

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
