//! Tables of NUMA nodes that GPUs look rows up in.

use ir::op::Op;
use ir::plan::{Action, Plan};

use crate::plans::{d, pipeline, streamed, w};
use crate::{findings, finds, named};

/// A GPU that looks tokens up in a table of a node.
fn reaching() -> Plan {
    let mut plan = streamed();
    plan.weights[w(0)].device = d(1);
    plan
}

#[test]
fn a_gpu_reaches_a_table_of_a_node() {
    let plan = reaching();
    assert_eq!(findings(&plan), Vec::<String>::new());
    assert_eq!(plan.reached_by(d(0)).into_iter().collect::<Vec<_>>(), [w(0)]);
    assert!(plan.reached_by(d(1)).is_empty());
    assert!(streamed().reached_by(d(0)).is_empty());
}

#[test]
fn a_node_reaches_none() {
    finds(
        pipeline(),
        |plan| plan.weights[w(0)].device = d(1),
        &[
            "s0 (embed) of prefill computes with w0, which is on another device",
            "s0 (embed) of decode computes with w0, which is on another device",
        ],
    );
}

#[test]
fn a_table_is_reached_over_a_link() {
    let mut plan = reaching();
    plan.machine.links.retain(|link| link.to != d(0));
    let expected = "s0 (embed) of prefill moves from numa1 to gpu0, between which there is no link";
    assert!(findings(&plan).iter().any(|found| found == expected));
}

#[test]
fn a_table_that_is_reached_is_nothing_else() {
    let mut plan = reaching();
    for program in &mut plan.programs {
        let router = named(program, "router");
        let Action::Run(Op::Linear(linear)) = &mut program.steps[router].action else {
            panic!("the router is a linear")
        };
        linear.weights[0] = w(0);
    }
    let expected = "w0 (weight0): a GPU looks rows up in it, and others use it as well";
    assert!(findings(&plan).iter().any(|found| found == expected));
}
