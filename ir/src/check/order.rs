//! Which step happens before which: lane order and waits.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::toposort;
use petgraph::graph::{DiGraph, NodeIndex};

use crate::check::{Scope, Violation};
use crate::id::{CollectiveId, Id, StepId, Table};
use crate::plan::{Action, Program};

/// Two queues for each of 128 devices; bounds the clocks at 1 KiB a step.
pub(super) const MAX_LANES: usize = 256;

/// Where a step is: its lane, and its place among the lane's steps.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct LanePosition {
    pub(super) lane: usize,
    pub(super) position: usize,
}

/// The order that lanes and waits enforce.
pub(super) struct Order {
    /// Every step after all that happen before it.
    pub(super) steps: Vec<StepId>,
    positions: Table<StepId, LanePosition>,
    lanes: usize,
    /// For each step and lane how many of the lane's steps happen before the step or are it.
    clocks: Vec<u32>,
}

/// For each step the first lane that names it.
pub(super) fn positions(program: &Program) -> Table<StepId, Option<LanePosition>> {
    let mut positions: Table<StepId, Option<LanePosition>> =
        program.steps.ids().map(|_| None).collect();
    for (lane, steps) in program.lanes.iter().map(|lane| &lane.steps).enumerate() {
        for (position, &step) in steps.iter().enumerate() {
            if positions.get(step) == Some(&None) {
                positions[step] = Some(LanePosition { lane, position });
            }
        }
    }
    positions
}

/// Each step is in one lane, and the lanes can come to their ends.
pub(super) fn check_lanes(
    scope: Scope<'_>,
    positions: &Table<StepId, Option<LanePosition>>,
    found: &mut Vec<Violation>,
) {
    let program = scope.program;
    if program.lanes.len() > MAX_LANES {
        let lanes = program.lanes.len();
        found.push(Violation::TooManyLanes { program: program.name.clone(), lanes });
    }
    let mut queues = BTreeSet::new();
    for (index, lane) in program.lanes.iter().enumerate() {
        if !queues.insert((lane.device, lane.queue)) {
            found.push(Violation::DuplicateLane { program: program.name.clone(), lane: index });
        }
    }
    let mut times: Table<StepId, usize> = positions.ids().map(|_| 0).collect();
    for &step in program.lanes.iter().flat_map(|lane| &lane.steps) {
        if let Some(times) = times.rows_mut().get_mut(step.index()) {
            *times += 1;
        }
    }
    for (step, &times) in times.iter().filter(|(_, times)| **times != 1) {
        found.push(Violation::NotInOneLane { step: scope.name(step), times });
    }
    // Members of a collective may have to meet, so its steps are one node; but a member may let another go first,
    // as long as the steps by themselves have an order.
    let meeting = sorted(program, &|step| collective(program, step));
    if let Err(step) = meeting.and_then(|_| sorted(program, &|_| None)) {
        found.push(Violation::Deadlock { step: scope.name(step) });
    }
}

impl Order {
    /// The order of a program's steps; `None` where a step has no lane or several, or waits for itself.
    pub(super) fn of(program: &Program) -> Option<Self> {
        let named: usize = program.lanes.iter().map(|lane| lane.steps.len()).sum();
        let positions: Table<StepId, LanePosition> =
            positions(program).rows().iter().copied().collect::<Option<_>>()?;
        if named != positions.len() || program.lanes.len() > MAX_LANES {
            return None;
        }
        let steps = sorted(program, &|_| None).ok()?;
        let lanes = program.lanes.len();
        let mut order = Self { steps, lanes, clocks: vec![0; lanes * positions.len()], positions };
        for index in 0..order.steps.len() {
            let step = order.steps[index];
            let LanePosition { lane, position } = order.positions[step];
            let previous = position.checked_sub(1).map(|before| program.lanes[lane].steps[before]);
            for &before in previous.iter().chain(&program.steps[step].waits) {
                if order.positions.get(before).is_some() {
                    order.join(step, before);
                }
            }
            order.clocks[step.index() * lanes + lane] = position as u32 + 1;
        }
        Some(order)
    }

    fn join(&mut self, step: StepId, before: StepId) {
        for lane in 0..self.lanes {
            let known = self.clocks[before.index() * self.lanes + lane];
            let clock = &mut self.clocks[step.index() * self.lanes + lane];
            *clock = known.max(*clock);
        }
    }

    pub(super) fn position(&self, step: StepId) -> LanePosition {
        self.positions[step]
    }

    /// How many steps of `lane` happen before `step` or are it.
    pub(super) fn reached(&self, step: StepId, lane: usize) -> usize {
        self.clocks[step.index() * self.lanes + lane] as usize
    }

    /// Whether `first` ends before `second` starts, in every run.
    pub(super) fn before(&self, first: StepId, second: StepId) -> bool {
        let LanePosition { lane, position } = self.positions[first];
        first != second && self.reached(second, lane) > position
    }
}

fn collective(program: &Program, step: StepId) -> Option<CollectiveId> {
    match program.steps[step].action {
        Action::Move { collective, .. } => collective,
        Action::Run(_) | Action::Fetch { .. } => None,
    }
}

/// Steps in an order that respects lanes and waits, where steps of one `group` are one; or a step on a cycle.
fn sorted(
    program: &Program,
    group: &dyn Fn(StepId) -> Option<CollectiveId>,
) -> Result<Vec<StepId>, StepId> {
    let mut graph: DiGraph<(), ()> = DiGraph::new();
    for _ in program.steps.ids() {
        graph.add_node(());
    }
    let mut groups = BTreeMap::new();
    let node: Vec<NodeIndex> = program
        .steps
        .ids()
        .map(|step| match group(step) {
            Some(collective) => *groups.entry(collective).or_insert(NodeIndex::new(step.index())),
            None => NodeIndex::new(step.index()),
        })
        .collect();
    let mut edge = |before: StepId, after: StepId| {
        let (Some(&from), Some(&to)) = (node.get(before.index()), node.get(after.index())) else {
            return;
        };
        if from != to || before == after {
            graph.add_edge(from, to, ());
        }
    };
    for lane in &program.lanes {
        lane.steps.windows(2).for_each(|pair| edge(pair[0], pair[1]));
    }
    for (id, step) in program.steps.iter() {
        step.waits.iter().for_each(|&wait| edge(wait, id));
    }
    let name = |node: NodeIndex| StepId::from_index(node.index());
    match toposort(&graph, None) {
        Ok(nodes) => Ok(nodes.into_iter().map(name).collect()),
        Err(cycle) => Err(name(cycle.node_id())),
    }
}
