//! How much a step computes, and how much it reads of its weights.

use ir::id::{BufferId, WeightId};
use ir::op::{Attention, Experts, Op, Products};
use ir::plan::{Phase, Plan, Program, Step};

/// One step that computes, in the run that estimates are for.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) plan: &'a Plan,
    pub(super) program: &'a Program,
    pub(super) step: &'a Step,
    pub(super) op: &'a Op,
    /// Tokens of each sequence that are cached.
    pub(super) cached: u32,
}

impl Work<'_> {
    /// Multiplications and additions.
    pub(super) fn flops(self) -> f64 {
        match self.op.products() {
            Some(Products::Linear(linear)) => {
                let weights: f64 = linear.weights.iter().map(|&id| elements(self.sizes(id))).sum();
                2.0 * weights * self.rows()
            }
            Some(Products::Attention(attention)) => {
                let Attention { heads, head_dim, .. } = attention;
                4.0 * f64::from(*heads) * f64::from(*head_dim) * self.seen(attention)
            }
            Some(Products::Experts(experts)) => {
                let stacks = [experts.gate, experts.up, experts.down];
                let one: f64 =
                    stacks.iter().map(|&id| elements(self.sizes(id).get(1..).unwrap_or(&[]))).sum();
                2.0 * one * self.used(experts) * self.rows()
            }
            None => 0.0,
        }
    }

    /// Bytes of weights that a run reads; `None` for tables, of which a run reads rows.
    pub(super) fn read_bytes(self) -> Option<u64> {
        if matches!(self.op, Op::Embed { .. } | Op::AddPosition { .. }) {
            return None;
        }
        let part = match self.op.products() {
            Some(Products::Experts(experts)) => self.chosen_part(experts),
            Some(Products::Linear(_) | Products::Attention(_)) | None => 1.0,
        };
        let weights = self.op.weights().into_iter().filter_map(|id| self.plan.weights.get(id));
        let bytes = weights.map(|weight| self.plan.weight_bytes(weight) as f64).sum::<f64>() * part;
        (bytes > 0.0).then_some(bytes as u64)
    }

    /// Tokens that the tokens fed attend to, added up over all of them.
    fn seen(self, attention: &Attention) -> f64 {
        let fed = match self.program.phase {
            Phase::Prefill => self.rows(),
            Phase::Decode => 1.0,
        };
        if fed == 0.0 {
            return 0.0;
        }
        self.rows() / fed * attention.seen(fed, f64::from(self.cached))
    }

    /// Experts of this step that a token chooses, on average.
    fn used(self, experts: &Experts) -> f64 {
        let ids = self.step.reads.get(1).and_then(|&id| self.program.buffers.get(id));
        let used = ids.map_or(1, |buffer| buffer.ty.features(self.program.estimated()));
        let load = experts.part.map_or(1.0, |part| f64::from(part.load));
        f64::from(used) * load
    }

    /// The part of the experts that any token chooses, as if each chose at random.
    fn chosen_part(self, experts: &Experts) -> f64 {
        let held = self.sizes(experts.gate).first().map_or(1.0, |&count| f64::from(count.max(1)));
        Experts::chosen(held, self.used(experts).max(0.0), self.rows()) / held
    }

    /// Rows of its first input.
    fn rows(self) -> f64 {
        let ty = |id: &BufferId| self.program.buffers.get(*id).map(|buffer| &buffer.ty);
        let rows = self.step.reads.first().and_then(ty).and_then(|ty| ty.shape.first());
        rows.map_or(0.0, |dim| f64::from(dim.size(self.program.estimated())))
    }

    fn sizes(&self, weight: WeightId) -> &[u32] {
        self.plan.weights.get(weight).map(|weight| weight.shape.as_slice()).unwrap_or_default()
    }
}

fn elements(sizes: &[u32]) -> f64 {
    sizes.iter().map(|&size| f64::from(size)).product()
}
