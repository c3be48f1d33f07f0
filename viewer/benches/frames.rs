//! How long opening and one frame take for 80 layers on 16 devices with 200,000 spans.

#[path = "../tests/made_up/mod.rs"]
mod made_up;

use std::fs;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use egui::{Context, RawInput, Rect, vec2};
use made_up::{Style, Wish};
use viewer::Viewer;
use viewer::document::Document;
use viewer::view::Panel;

fn frames(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let plan = made_up::plan(Wish { hidden: 256, ..Wish::new(80, 8, 8, Style::Tensor) });
    let text = plan.to_ron().expect("a plan can be written");
    let trace = made_up::trace(&plan, ir::fingerprint(text.as_bytes()), 200_000);
    let paths = (folder.path().join("plan.ron"), folder.path().join("trace.ron"));
    fs::write(&paths.0, text).expect("a plan can be written");
    fs::write(&paths.1, trace.to_ron().expect("a trace can be written")).expect("it can");
    let open = || Document::open(&paths.0, Some(&paths.1)).expect("the files are sound");

    let mut group = criterion.benchmark_group("80 layers, 16 devices, 200,000 spans");
    group.sample_size(10);
    group.bench_function("open", |bencher| bencher.iter(|| black_box(open())));
    let mut viewer = Viewer::new(Some(open()), "hybridc".into());
    let context = Context::default();
    viewer::theme::install(&context);
    let end = viewer.document.as_ref().map_or(1, |document| document.scene.trace_end) as f64;
    let mut time = 0.0;
    for (name, panel, range) in [
        ("placement and one run", Panel::Placement, None),
        ("timeline of one run", Panel::Timeline, None),
        ("timeline of all runs", Panel::Timeline, Some((0.0, end))),
        ("memory", Panel::Memory, None),
        ("steps and one run", Panel::Steps, None),
    ] {
        viewer.view.panel = panel;
        viewer.view.time = range;
        group.bench_function(format!("frame: {name}"), |bencher| {
            bencher.iter(|| {
                time += 1.0 / 60.0;
                let input = RawInput {
                    screen_rect: Some(Rect::from_min_size(
                        Default::default(),
                        vec2(1600.0, 1000.0),
                    )),
                    time: Some(time),
                    ..RawInput::default()
                };
                let output = context.run_ui(input, |ui| viewer.ui(ui));
                black_box(context.tessellate(output.shapes, output.pixels_per_point))
            });
        });
    }
}

criterion_group!(benches, frames);
criterion_main!(benches);
