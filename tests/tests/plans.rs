//! Whole plans of toys on small machines, as people read them. A change that moves a plan shows here.

use compiler::Options;
use compiler::options::{Request, parse_pipeline, parse_tensor_parallel};
use ir::machine::Machine;
use tests::machines;
use tests::toys::Toy;

fn plan(toy: &Toy, machine: &Machine, request: Request) -> String {
    let model = toy.model().expect("the toy is a model");
    let options = Options { request, ..Options::default() };
    let plan = compiler::compile(&model, machine, &options, &mut |_, _| ());
    plan.expect("the toy fits").to_string()
}

#[test]
fn llama() {
    let plan = |machine| plan(&Toy::llama(), &machine, Request::Any);
    insta::assert_snapshot!("llama on one gpu", plan(machines::one_gpu()));
    insta::assert_snapshot!("llama on one gpu and two numa", plan(machines::one_gpu_two_numa()));
    insta::assert_snapshot!("llama on two gpu and two numa", plan(machines::two_gpu_two_numa()));
    insta::assert_snapshot!("llama on two numa", plan(machines::two_numa()));
}

#[test]
fn mixture() {
    let plan = |machine| plan(&Toy::mixture(), &machine, Request::Any);
    insta::assert_snapshot!("mixture on one gpu", plan(machines::one_gpu()));
    insta::assert_snapshot!("mixture on one gpu and two numa", plan(machines::one_gpu_two_numa()));
    insta::assert_snapshot!("mixture on two gpu and two numa", plan(machines::two_gpu_two_numa()));
    insta::assert_snapshot!("mixture on two numa", plan(machines::two_numa()));
}

#[test]
fn fetched_weights() {
    let model = Toy { layers: 4, ..Toy::llama() }.model().expect("the toy is a model");
    let options = Options { context: Some(128), prefill_tokens: 64, ..Options::default() };
    let machine = machines::fast_link(600 << 10);
    let plan = compiler::compile(&model, &machine, &options, &mut |_, _| ());
    let plan = plan.expect("the toy fits").to_string();
    insta::assert_snapshot!("llama fetched to a gpu", plan);
}

#[test]
fn requested_shapes() {
    let stages = parse_pipeline("numa1,gpu0").expect("it is a request");
    let machine = machines::one_gpu_two_numa();
    insta::assert_snapshot!("llama in two stages", plan(&Toy::llama(), &machine, stages));
    let shares = parse_tensor_parallel("numa0:3,numa1:1").expect("it is a request");
    let machine = machines::two_numa();
    insta::assert_snapshot!(
        "llama in uneven shares",
        plan(&Toy::llama(), &machine, shares.clone())
    );
    insta::assert_snapshot!("mixture in uneven shares", plan(&Toy::mixture(), &machine, shares));
}
