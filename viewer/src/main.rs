//! `hybrid-viewer plan.ron [trace.ron]`: the window, or a picture of it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Parser;
use viewer::Viewer;
use viewer::document::{Document, is_trace};
use viewer::picture::Shot;
use viewer::recent::Recent;
use viewer::search;
use viewer::theme::{self, Coloring};
use viewer::view::{Panel, Selection};
use viewer::what_if;

/// Shows where every layer of a plan runs, why, and how long it took.
#[derive(Parser)]
#[command(name = "hybrid-viewer", version)]
struct Arguments {
    /// The plan; without it the window opens empty.
    plan: Option<PathBuf>,
    /// A trace of that plan.
    trace: Option<PathBuf>,
    /// A second plan, or another trace of the same plan, to compare with.
    #[arg(long, value_name = "FILE", requires = "plan")]
    compare: Option<PathBuf>,
    /// The panel to start with.
    #[arg(long, value_enum)]
    panel: Option<Panel>,
    /// What colors say at the start.
    #[arg(long, value_enum)]
    color: Option<Coloring>,
    /// The program to start with.
    #[arg(long, requires = "plan")]
    program: Option<String>,
    /// Selects what a search for it finds first.
    #[arg(long, value_name = "TEXT", requires = "plan")]
    select: Option<String>,
    /// Writes a picture (PNG, or SVG by the file's ending) and opens no window.
    #[arg(long, value_name = "FILE", requires = "plan")]
    screenshot: Option<PathBuf>,
    /// Size of the picture or window.
    #[arg(long, default_value = "1600x1000", value_parser = parse_size)]
    size: [f32; 2],
    /// Dark on light.
    #[arg(long)]
    light: bool,
}

fn main() -> ExitCode {
    command_line::run(|arguments| run(arguments).map(|()| ExitCode::SUCCESS))
}

fn run(arguments: Arguments) -> Result<()> {
    let picture = arguments.screenshot.as_deref();
    let as_svg = picture.map(is_svg).transpose()?;
    let plan = arguments.plan.as_deref();
    let document = plan.map(|plan| Document::open(plan, arguments.trace.as_deref())).transpose()?;
    let mut viewer = Viewer::new(document, what_if::compiler());
    if let Some(path) = &arguments.compare {
        let other = match (is_trace(path), plan) {
            (true, Some(plan)) => Document::open(plan, Some(path))?,
            _ => Document::open(path, None)?,
        };
        viewer.set_other(other);
    }
    choose(&mut viewer, &arguments)?;
    if let Some((path, as_svg)) = picture.zip(as_svg) {
        let inputs = arguments.plan.iter().chain(&arguments.trace).chain(&arguments.compare);
        command_line::check_outputs([path], inputs.map(PathBuf::as_path))?;
        let shot = Shot { size: arguments.size, scale: 1.0, dark: !arguments.light };
        return viewer.save_picture(as_svg, path, shot, None);
    }
    viewer.recent = Recent::of_user();
    if let Some(plan) = plan {
        viewer.recent.add(plan, arguments.trace.as_deref());
    }
    let options = eframe::NativeOptions {
        viewport: egui::ViewportBuilder::default()
            .with_inner_size(arguments.size)
            .with_min_inner_size([800.0, 500.0])
            .with_drag_and_drop(true),
        ..eframe::NativeOptions::default()
    };
    let chosen = if arguments.light { egui::Theme::Light } else { egui::Theme::Dark };
    let create: eframe::AppCreator<'_> = Box::new(move |created| {
        theme::install(&created.egui_ctx);
        created.egui_ctx.set_theme(chosen);
        Ok(Box::new(viewer))
    });
    // The error of the window system is not `Sync`.
    eframe::run_native("hybrid-viewer", options, create)
        .map_err(|error| anyhow!("{}", without_source(&error.to_string())))
        .context("opening a window; --screenshot needs none")
}

/// Whether a picture is to be a drawing, by its file's ending.
fn is_svg(path: &Path) -> Result<bool> {
    let ending = path.extension().map(|ending| ending.to_ascii_lowercase());
    match ending.as_ref().and_then(|ending| ending.to_str()) {
        Some("svg") => Ok(true),
        Some("png") => Ok(false),
        Some(_) | None => bail!("a picture ends in .png or .svg, {} does not", path.display()),
    }
}

/// An error of the window system without the place in its source: `os error at /path/mod.rs:7: cause` is the cause.
fn without_source(error: &str) -> String {
    let cut = error.split_once("os error at ").and_then(|(before, rest)| {
        let (_, cause) = rest.split_once(".rs:")?;
        let (_, cause) = cause.split_once(": ")?;
        Some(format!("{before}{cause}"))
    });
    cut.unwrap_or_else(|| error.to_owned())
}

/// Turns to the panel, program and selection that were asked for.
fn choose(viewer: &mut Viewer, arguments: &Arguments) -> Result<()> {
    if let Some(panel) = arguments.panel {
        viewer.view.panel = panel;
    }
    if let Some(color) = arguments.color {
        viewer.view.coloring = color;
    }
    let Some(document) = &viewer.document else { return Ok(()) };
    let scene = &document.scene;
    if let Some(name) = &arguments.program {
        let number = scene.programs.iter().position(|program| program.name == *name);
        let number = number.with_context(|| format!("the plan has no program {name:?}"))?;
        viewer.view.show_program(scene, number);
    }
    if let Some(text) = &arguments.select {
        let found = search::find(scene, &viewer.view, text, 1);
        ensure!(!found.is_empty(), "nothing in the plan is called {text:?}");
        viewer.view.selection = found[0].1;
        viewer.view.scroll_to_selection = true;
        if let Selection::Blocks(block, _) = found[0].1 {
            viewer.view.unfold(scene, block);
        }
    }
    Ok(())
}

fn parse_size(text: &str) -> Result<[f32; 2]> {
    let (width, height) = text.split_once('x').context("a size is written 1600x1000")?;
    let side = |text: &str| -> Result<f32> {
        let side: u32 = text.parse().with_context(|| format!("{text:?} is no number of points"))?;
        ensure!((100..=8000).contains(&side), "a side has 100 to 8000 points, not {side}");
        Ok(side as f32)
    };
    Ok([side(width)?, side(height)?])
}
