//! An independent reader of plans: trusts nothing the compiler believed.
//!
//! A plan is sound when
//!
//! - every id names a row, and the model's limits, programs, weights, caches and ropes make sense by themselves;
//! - every step is in exactly one lane, and lane order, waits and collectives have no cycle, so no run can deadlock;
//! - a step computes only on buffers, weights and caches of its own lane's device, or on weights that were fetched
//!   there for it, tables that a GPU reaches and caches that it may borrow, and moves and fetches only along links;
//! - no weight is fetched over another that may still be read;
//! - every buffer is written once, then read, then freed once, in an order that lanes and waits enforce;
//! - where one program attends, each appends once to the cache of each layer, and all do it alike; the devices of a
//!   layer have all of its heads, and the mixtures behind a router each of its experts;
//! - a collective is one alike step on each of its members, nothing else reads the terms of sums, and GPUs that sum
//!   together always do;
//! - reads and writes have the types that the action expects;
//! - no device ever holds more bytes than it has.
//!
//! It survives anything that can be deserialised, in time that grows with the size of the plan alone.
//! Where a program's order is broken, what depends on the order is not looked at.

use crate::plan::{Plan, Program};

mod attention;
mod buffers;
mod collectives;
mod experts;
mod fetches;
mod ids;
mod limits;
mod matrices;
mod memory;
mod order;
mod places;
mod shapes;
mod violation;
mod weights;

pub use memory::memory;
pub use violation::{StepName, Violation};

use order::Order;

/// Every way in which `plan` is unsound; empty when it may run.
pub fn check(plan: &Plan) -> Vec<Violation> {
    let mut found = Vec::new();
    ids::check_tables(plan, &mut found);
    limits::check(plan, &mut found);
    weights::check(plan, &mut found);
    for program in &plan.programs {
        found.extend(check_program(plan, program));
    }
    attention::check_programs(plan, &mut found);
    collectives::check_groups(plan, &mut found);
    memory::check(plan, &mut found);
    found
}

/// Every way in which one program of `plan` is unsound by itself, all but its peak bytes.
fn check_program(plan: &Plan, program: &Program) -> Vec<Violation> {
    let scope = Scope { plan, program };
    let mut found = Vec::new();
    ids::check_program(scope, &mut found);
    let positions = order::positions(program);
    order::check_lanes(scope, &positions, &mut found);
    places::check(scope, &positions, &mut found);
    shapes::check(scope, &mut found);
    attention::check(scope, &mut found);
    collectives::check(scope, &positions, &mut found);
    if let Some(order) = Order::of(program) {
        experts::check(scope, &order, &mut found);
        buffers::check(scope, &order, &mut found);
        fetches::check(scope, &order, &mut found);
    }
    found
}

/// The program under examination, with the tables its ids name.
#[derive(Clone, Copy)]
struct Scope<'a> {
    plan: &'a Plan,
    program: &'a Program,
}
