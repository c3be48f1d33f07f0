//! Every buffer is written once, then read, then freed once.

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
    for (id, step) in program.steps.iter() {
        let mut reads = step.reads.clone();
        reads.sort_unstable();
        reads.dedup();
        for buffer in reads.into_iter().filter(|&buffer| lives.get(buffer).is_some()) {
            let Life { writer, freer } = lives[buffer];
            if let Some(writer) = writer {
                let early = Violation::ReadBeforeWrite { step: scope.name(id), buffer };
                ordered(scope, order, (writer, id), buffer, early, found);
            }
            if let Some(freer) = freer.filter(|&freer| freer != id) {
                let late = Violation::AfterFree { step: scope.name(id), buffer };
                ordered(scope, order, (id, freer), buffer, late, found);
            }
        }
    }
    for (buffer, life) in lives.iter() {
        // A buffer that no one reads may end with the step that writes it.
        if let Life { writer: Some(writer), freer: Some(freer) } = *life
            && writer != freer
        {
            let late = Violation::AfterFree { step: scope.name(writer), buffer };
            ordered(scope, order, (writer, freer), buffer, late, found);
        }
    }
}

/// Reports `reversed` where the second of a pair of steps comes first or is the first, a race where neither does.
fn ordered(
    scope: Scope<'_>,
    order: &Order,
    (first, second): (StepId, StepId),
    buffer: BufferId,
    reversed: Violation,
    found: &mut Vec<Violation>,
) {
    if order.before(first, second) {
        return;
    }
    found.push(if first == second || order.before(second, first) {
        reversed
    } else {
        Violation::Race { first: scope.name(first), second: scope.name(second), buffer }
    });
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
