//! Every pass on graphs as text: `passes/<pass>/<behaviour>.ir` holds what goes in and what comes out.
//!
//! A file starts with `; pass: NAME`, may name the machine its devices are of, says what it tests, and has the
//! input and the expected output with a line `; ---` between them. `BLESS=1` writes what comes out.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use compiler::{LAYER_PASSES, PLACED_PASSES, insert_moves};
use ir::graph::{LayerGraph, Placed, PlacedGraph, Work};
use ir::id::{Id as _, NodeId, Table};
use tests::machines;

const DIVIDER: &str = "; ---\n";

#[test]
fn passes_make_what_their_files_expect() {
    let mut failures = Vec::new();
    for file in files() {
        if let Err(error) = check(&file) {
            failures.push(format!("{}: {error:#}", file.display()));
        }
    }
    let count = failures.len();
    assert!(
        failures.is_empty(),
        "{}\n{count} of the files differ; BLESS=1 cargo test --release --workspace --test passes writes what comes out",
        failures.join("\n")
    );
}

#[test]
fn every_pass_has_a_file() {
    let files = files();
    for pass in names() {
        let has_file = files.iter().any(|file| folder(file) == pass);
        assert!(has_file, "passes/{pass} holds no file");
    }
}

/// What a pass made it leaves alone.
#[test]
fn passes_have_nothing_left_to_do() {
    for file in files() {
        let text = fs::read_to_string(&file).expect("the file is there");
        let pass = folder(&file);
        if pass == "insert_moves" {
            continue;
        }
        let (_, expected) = text.split_once(DIVIDER).expect("the file has two parts");
        assert_eq!(run(pass, expected).expect("the pass runs"), expected, "{}", file.display());
    }
}

fn names() -> Vec<&'static str> {
    let layer = LAYER_PASSES.iter().map(|pass| pass.name);
    layer.chain(["insert_moves"]).chain(PLACED_PASSES.iter().map(|pass| pass.name)).collect()
}

/// All files, in order of their paths.
fn files() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("passes");
    let entries = |path: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(path).expect("the folder is there");
        entries.map(|entry| entry.expect("the entry is there").path()).collect()
    };
    let mut files: Vec<PathBuf> = entries(&root).iter().flat_map(|path| entries(path)).collect();
    files.sort();
    files
}

/// The pass that a file is for.
fn folder(file: &Path) -> &str {
    let folder = file.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    folder.expect("files lie in folders named as passes")
}

fn check(file: &Path) -> Result<()> {
    let text = fs::read_to_string(file)?;
    let (head, expected) = text.split_once(DIVIDER).unwrap_or((&text, ""));
    let pass = folder(file);
    ensure!(
        text.starts_with(&format!("; pass: {pass}\n")),
        "the first line is not `; pass: {pass}`"
    );
    ensure!(head.contains("\n; Tests that "), "no line says what is tested: `; Tests that …`");
    if let Some(machine) = head.lines().find_map(|line| line.strip_prefix("; machine: ")) {
        let machine =
            machines::named(machine).with_context(|| format!("no machine {machine:?}"))?;
        check_devices(&head.parse()?, machine.devices.len())?;
    }
    let made = run(pass, head)?;
    if made == expected {
        return Ok(());
    }
    if std::env::var_os("BLESS").is_some() {
        fs::write(file, format!("{head}{DIVIDER}{made}"))?;
        return Ok(());
    }
    bail!("\n{}", difference(expected, &made))
}

fn run(pass: &str, text: &str) -> Result<String> {
    if pass == "insert_moves" {
        let (layers, placed) = taken_apart(&text.parse()?)?;
        return Ok(insert_moves(&layers, placed)?.to_string());
    }
    if let Some(pass) = LAYER_PASSES.iter().find(|layer| layer.name == pass) {
        return Ok((pass.run)(text.parse()?)?.to_string());
    }
    let found = PLACED_PASSES.iter().find(|placed| placed.name == pass);
    let pass = found.with_context(|| format!("there is no pass {pass:?}"))?;
    Ok((pass.run)(text.parse()?)?.to_string())
}

/// A placed graph without moves as the layer graph and its placement.
fn taken_apart(graph: &PlacedGraph) -> Result<(LayerGraph, Table<NodeId, Placed>)> {
    let mut layers = LayerGraph::default();
    let mut placed = Table::default();
    for (_, node) in graph.nodes() {
        let Work::Compute(op) = &node.work.work else { bail!("{} moves", node.name) };
        let types: Vec<_> = node.outputs.iter().map(|&v| graph.value(v).ty.clone()).collect();
        layers.push(node.name.clone(), op.clone(), &node.inputs, &types)?;
        placed.push(node.work.clone());
    }
    graph.outputs().iter().for_each(|&output| layers.return_value(output));
    Ok((layers, placed))
}

fn check_devices(graph: &PlacedGraph, devices: usize) -> Result<()> {
    for (_, node) in graph.nodes() {
        let layouts = node.work.layouts.iter().chain(&node.work.needs);
        for device in layouts.flat_map(|layout| &layout.devices) {
            ensure!(device.index() < devices, "the machine has no {device}");
        }
    }
    Ok(())
}

/// Lines that only one of two texts has, between what both start and end with.
fn difference(expected: &str, made: &str) -> String {
    let (old, new): (Vec<&str>, Vec<&str>) = (expected.lines().collect(), made.lines().collect());
    let same = |pair: &(&&str, &&str)| pair.0 == pair.1;
    let front = old.iter().zip(&new).take_while(same).count();
    let (old, new) = (&old[front..], &new[front..]);
    let back = old.iter().rev().zip(new.iter().rev()).take_while(same).count();
    let lines = |sign: char, lines: &[&str]| -> String {
        lines[..lines.len() - back].iter().map(|line| format!("{sign} {line}\n")).collect()
    };
    format!("after line {front}:\n{}{}", lines('-', old), lines('+', new))
}
