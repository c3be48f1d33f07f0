//! Writes the made-up plans and traces of the tests to a folder, to be looked at.

#[path = "../tests/made_up/mod.rs"]
mod made_up;

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use made_up::{Style, Wish};

fn main() -> Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).context("name a folder")?);
    fs::create_dir_all(&folder)?;
    for (name, wish, spans) in [
        ("pipeline", Wish::new(16, 1, 2, Style::Pipeline), 400),
        ("larger", Wish { gpu_layers: 8, ..Wish::new(16, 1, 2, Style::Pipeline) }, 400),
        ("tensor", Wish::new(6, 2, 0, Style::Tensor), 300),
        ("streaming", Wish::new(6, 1, 1, Style::Streaming), 300),
        ("large", Wish { hidden: 256, ..Wish::new(80, 8, 8, Style::Tensor) }, 200_000),
    ] {
        let plan = made_up::plan(wish);
        let text = plan.to_ron()?;
        fs::write(folder.join(format!("{name}.ron")), &text)?;
        let trace = made_up::trace(&plan, ir::fingerprint(text.as_bytes()), spans);
        fs::write(folder.join(format!("{name}-trace.ron")), trace.to_ron()?)?;
    }
    Ok(())
}
