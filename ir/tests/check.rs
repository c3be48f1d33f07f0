//! A checker no one has seen fail is not a checker.

mod plans;

use ir::check::check;
use ir::plan::Plan;
use plans::{one_device, pipeline, tensor_parallel};

#[track_caller]
fn sound(plan: &Plan) {
    let found: Vec<String> = check(plan).iter().map(ToString::to_string).collect();
    assert_eq!(found, [""; 0], "{plan}");
}

#[test]
fn plans_made_with_care_are_sound() {
    sound(&one_device());
    sound(&pipeline());
    sound(&tensor_parallel());
}
