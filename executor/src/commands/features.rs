//! `features`: what the processor offers and which kernel each operation uses.

use anyhow::{Result, ensure};

use executor::kernels::cpu::describe::describe;
use executor::kernels::cpu::isa::Isa;

use super::FeaturesArguments;
use super::answer::print;

pub(super) fn run(arguments: FeaturesArguments) -> Result<()> {
    let highest = Isa::detect();
    let isa = arguments.isa.unwrap_or(highest);
    let mut text = String::from("levels\n");
    for level in Isa::ALL {
        let found = if level.is_available() { "found" } else { "not here" };
        let used = if level == isa { ", used" } else { "" };
        text += &format!("  {:<18} {found}{used}\n", level.to_string());
    }
    text += "operations\n";
    for (operation, kernel) in describe(isa) {
        text += &format!("  {operation:<30} {kernel}\n");
    }
    print(&text)
}

/// The level of that name, if this processor has it.
pub(super) fn available(name: &str) -> Result<Isa> {
    let (isa, highest) = (name.parse::<Isa>()?, Isa::detect());
    ensure!(
        isa.is_available(),
        "this processor does not have {isa}; its highest level is {highest}"
    );
    Ok(isa)
}
