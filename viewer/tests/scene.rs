//! Scenes of made-up plans, as text.

mod made_up;

use ir::plan::Plan;
use made_up::{Style, Wish};
use viewer::scene::Scene;

fn scene(wish: Wish, spans: usize) -> (Plan, Scene) {
    let plan = made_up::plan(wish);
    let violations = ir::check::check(&plan);
    assert!(violations.is_empty(), "{violations:?}");
    let trace = (spans > 0).then(|| made_up::trace(&plan, 7, spans));
    let scene = Scene::new(&plan, trace.as_ref(), Vec::new());
    (plan, scene)
}

#[test]
fn one_device_is_never_idle_and_its_layers_fold_into_one_group() {
    let (_, scene) = scene(Wish::new(3, 0, 1, Style::Pipeline), 0);
    insta::assert_snapshot!("one_device", scene.to_string());
}

#[test]
fn a_pipeline_names_its_transfers_its_bottleneck_and_the_limit_that_made_it() {
    let (_, scene) = scene(Wish::new(12, 1, 2, Style::Pipeline), 200);
    insta::assert_snapshot!("pipeline", scene.to_string());
}

#[test]
fn tensor_parallel_layers_count_their_collectives_once() {
    let (_, scene) = scene(Wish::new(2, 2, 0, Style::Tensor), 0);
    insta::assert_snapshot!("tensor_parallel", scene.to_string());
}

#[test]
fn a_run_that_ended_early_measures_nothing() {
    let plan = made_up::plan(Wish::new(4, 0, 1, Style::Pipeline));
    let mut trace = made_up::trace(&plan, 7, 2000);
    let last = trace.runs.len() as u32 - 1;
    let (program, before) = {
        let scene = Scene::new(&plan, Some(&trace), Vec::new());
        let program = scene.runs[last as usize].program;
        (program, scene.summaries[program].runs)
    };
    assert!(before > 1);
    // It is cut off after its first step, and long.
    let mut is_first = true;
    trace.spans.retain(|span| span.run != last || std::mem::take(&mut is_first));
    trace.runs[last as usize].end += 1 << 40;
    let scene = Scene::new(&plan, Some(&trace), Vec::new());
    assert_eq!(scene.summaries[program].runs, before - 1);
    assert!(scene.typical_run(program).is_some_and(|run| run as u32 != last));
    assert!(scene.findings.contains(&"1 run ended early and counts for no time".to_owned()));
    trace.spans.clear();
    let scene = Scene::new(&plan, Some(&trace), Vec::new());
    assert!(scene.typical_run(program).is_none());
    // What there is of it can be looked at.
    assert!(scene.first_shown_run(program).is_some());
}

#[test]
fn copies_beside_compute_are_rows_of_their_own() {
    let (_, scene) = scene(Wish::new(4, 1, 1, Style::Streaming), 60);
    insta::assert_snapshot!("streaming", scene.to_string());
}

#[test]
fn a_plan_of_eighty_layers_and_sixteen_devices_joins_with_200_000_spans() {
    let wish = Wish { hidden: 256, ..Wish::new(80, 8, 8, Style::Tensor) };
    let (plan, scene) = scene(wish, 200_000);
    assert_eq!(scene.devices.len(), 16);
    let spans: usize = scene.runs.iter().flat_map(|run| &run.times).flatten().count();
    assert!(spans >= 200_000);
    let queues = &scene.lanes[..plan.programs[0].lanes.len()];
    let bars: usize = queues.iter().map(|lane| lane.measured.rows().len()).sum();
    assert_eq!(bars, spans);
}
