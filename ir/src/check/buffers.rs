//! Every buffer is written once, then read, then freed once.

use std::collections::BTreeSet;

use crate::check::order::Order;
use crate::check::{Scope, Violation};
use crate::id::{BufferId, Id as _, StepId, Table};

/// The steps that change a buffer; the first of each in the order of the program.
#[derive(Clone, Copy, Default)]
struct Life {
    writer: Option<StepId>,
    freer: Option<StepId>,
}

pub(super) fn check(scope: Scope<'_>, order: &Order, found: &mut Vec<Violation>) {
    let program = scope.program;
    let lives = lives(scope, order, found);
    for (buffer, life) in lives.iter() {
        let program_name = || program.name.clone();
        match life {
            Life { writer: None, .. } => {
                found.push(Violation::NeverWritten { program: program_name(), buffer });
            }
            Life { writer: Some(_), freer: None } if buffer != program.output => {
                found.push(Violation::Leak { program: program_name(), buffer });
            }
            Life { freer: Some(step), .. } if buffer == program.output => {
                found.push(Violation::OutputFreed { step: scope.name(*step) });
            }
            Life { .. } => (),
        }
    }
    let mut pairs = Pairs { scope, order, races: BTreeSet::new(), found };
    for (id, step) in program.steps.iter() {
        let reads: BTreeSet<BufferId> = step.reads.iter().copied().collect();
        for buffer in reads {
            let Some(&Life { writer, freer }) = lives.get(buffer) else { continue };
            if let Some(writer) = writer {
                let early = Violation::ReadBeforeWrite { step: scope.name(id), buffer };
                pairs.check(writer, id, buffer, early);
            }
            if let Some(freer) = freer.filter(|&freer| freer != id) {
                let late = Violation::AfterFree { step: scope.name(id), buffer };
                pairs.check(id, freer, buffer, late);
            }
        }
    }
    for (buffer, life) in lives.iter() {
        // A buffer that no one reads may end with the step that writes it.
        if let Life { writer: Some(writer), freer: Some(freer) } = *life
            && writer != freer
        {
            let late = Violation::AfterFree { step: scope.name(writer), buffer };
            pairs.check(writer, freer, buffer, late);
        }
    }
}

/// Pairs of steps of which the first must end before the second starts.
struct Pairs<'a> {
    scope: Scope<'a>,
    order: &'a Order,
    /// Races that are reported: a step that reads a buffer and frees it is in two pairs with the writer.
    races: BTreeSet<(StepId, StepId, BufferId)>,
    found: &'a mut Vec<Violation>,
}

impl Pairs<'_> {
    /// Reports `reversed` where the second comes first or is the first, a race where neither does.
    fn check(&mut self, first: StepId, second: StepId, buffer: BufferId, reversed: Violation) {
        if self.order.before(first, second) {
            return;
        }
        if first == second || self.order.before(second, first) {
            self.found.push(reversed);
        } else if self.races.insert((first, second, buffer)) {
            let (first, second) = (self.scope.name(first), self.scope.name(second));
            self.found.push(Violation::Race { first, second, buffer });
        }
    }
}

fn lives(scope: Scope<'_>, order: &Order, found: &mut Vec<Violation>) -> Table<BufferId, Life> {
    let program = scope.program;
    let mut lives: Table<BufferId, Life> = program.buffers.ids().map(|_| Life::default()).collect();
    for &id in &order.steps {
        let step = &program.steps[id];
        for &buffer in &step.writes {
            let Some(life) = lives.rows_mut().get_mut(buffer.index()) else { continue };
            if life.writer.is_some() {
                found.push(Violation::WrittenTwice { step: scope.name(id), buffer });
            } else {
                life.writer = Some(id);
            }
        }
        for &buffer in &step.frees {
            let Some(life) = lives.rows_mut().get_mut(buffer.index()) else { continue };
            if life.freer.is_some() {
                found.push(Violation::FreedTwice { step: scope.name(id), buffer });
            } else {
                life.freer = Some(id);
            }
        }
    }
    lives
}
