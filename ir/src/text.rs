//! The text form of graphs and plans: what `--print-after`, snapshots and people read.

use std::fmt;

use crate::dag::list;
use crate::graph::{Placed, Work};
use crate::id::{DeviceId, WeightId};
use crate::layout::{Layout, Move, Share};
use crate::op::{Activation, ExpertPart, Norm, NormKind, Op, Then};
use crate::plan::{Action, Plan, Queue, Step};

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Op::Embed { table, scale } if *scale == 1.0 => write!(f, "embed {table}"),
            Op::Embed { table, scale } => write!(f, "embed {table} scale={scale}"),
            Op::AddPosition { table, offset } => write!(f, "add_position {table} offset={offset}"),
            Op::Norm(norm) => write!(f, "{norm}"),
            Op::Linear(linear) => {
                write!(f, "linear {}", list(&linear.weights))?;
                if linear.biases.iter().any(Option::is_some) {
                    let biases = linear
                        .biases
                        .iter()
                        .map(|bias| bias.as_ref().map_or("-".into(), WeightId::to_string));
                    write!(f, " bias={}", biases.collect::<Vec<_>>().join(","))?;
                }
                if let Some(norm) = &linear.norm {
                    write!(f, " of {norm}")?;
                }
                match linear.then {
                    Then::Nothing => (),
                    Then::Activate(activation) => write!(f, " then {activation}")?,
                    Then::Gate(activation) => write!(f, " then gate {activation}")?,
                }
                if linear.residual { f.write_str(" plus residual") } else { Ok(()) }
            }
            Op::Attention(attention) => {
                write!(
                    f,
                    "attention {} heads={}/{}x{} group={}",
                    attention.cache,
                    attention.heads,
                    attention.kv_heads,
                    attention.head_dim,
                    attention.group
                )?;
                if attention.first_head > 0 {
                    write!(f, " first={}", attention.first_head)?;
                }
                write!(f, " scale={}", attention.scale)?;
                if let Some(window) = attention.window {
                    write!(f, " window={window}")?;
                }
                if let Some(cap) = attention.soft_cap {
                    write!(f, " cap={cap}")?;
                }
                if let Some(norm) = &attention.q_norm {
                    write!(f, " q={norm}")?;
                }
                if let Some(norm) = &attention.k_norm {
                    write!(f, " k={norm}")?;
                }
                attention.rope.map_or(Ok(()), |rope| write!(f, " rope={rope}"))
            }
            Op::Activate(activation) => write!(f, "activate {activation}"),
            Op::Gate(activation) => write!(f, "gate {activation}"),
            Op::Add => f.write_str("add"),
            Op::SigmoidGate => f.write_str("sigmoid_gate"),
            Op::Route { used, renormalise } => {
                write!(f, "route used={used}{}", if *renormalise { " renormalised" } else { "" })
            }
            Op::Experts(experts) => {
                write!(
                    f,
                    "experts {}, {}, {} {}",
                    experts.gate, experts.up, experts.down, experts.activation
                )?;
                experts.part.map_or(Ok(()), |ExpertPart { first, load }| {
                    write!(f, " first={first} load={load}")
                })
            }
            Op::SelectRows => f.write_str("select_rows"),
            Op::SoftCap { cap } => write!(f, "soft_cap cap={cap}"),
        }
    }
}

/// `rms_norm(w1 eps=0.00001 offset=1)`.
impl fmt::Display for Norm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            NormKind::Rms => "rms_norm(",
            NormKind::Layer => "layer_norm(",
        })?;
        if let Some(scale) = self.scale {
            write!(f, "{scale} ")?;
        }
        if let Some(bias) = self.bias {
            write!(f, "bias={bias} ")?;
        }
        write!(f, "eps={}", self.epsilon)?;
        if self.scale_offset != 0.0 {
            write!(f, " offset={}", self.scale_offset)?;
        }
        f.write_str(")")
    }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Activation::Relu => "relu",
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
            Activation::GeluTanh => "gelu_tanh",
        })
    }
}

/// `@d0`, `@d0+d1`, `@d0+d1/1:96+64`, `@d0+d1/sum`.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices: Vec<String> = self.devices.iter().map(DeviceId::to_string).collect();
        let devices = devices.join("+");
        match &self.share {
            Share::Whole => write!(f, "@{devices}"),
            Share::Split { axis, parts } => {
                let parts: Vec<String> = parts.iter().map(u32::to_string).collect();
                write!(f, "@{devices}/{axis}:{}", parts.join("+"))
            }
            Share::Partial => write!(f, "@{devices}/sum"),
        }
    }
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Move::Transfer { from, to } => write!(f, "transfer {from} -> {to}"),
            Move::Broadcast { from } => write!(f, "broadcast {from}"),
            Move::AllReduce => f.write_str("all_reduce"),
            Move::AllGather { axis } => write!(f, "all_gather axis={axis}"),
            Move::ReduceScatter { axis } => write!(f, "reduce_scatter axis={axis}"),
            Move::Slice { axis } => write!(f, "slice axis={axis}"),
        }
    }
}

/// `@d0+d1/sum linear w3 needs @d0+d1/1:96+64`. Needs are left out where they are the first output's layout.
impl fmt::Display for Placed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", list(&self.layouts))?;
        match &self.work {
            Work::Compute(op) => write!(f, "{op}")?,
            Work::Move(movement) => write!(f, "{movement}")?,
        }
        if !self.inner.is_empty() {
            let inner: Vec<String> = self.inner.iter().map(u32::to_string).collect();
            write!(f, " inner={}", inner.join("+"))?;
        }
        if let Some(home) = self.home {
            write!(f, " home={home}")?;
        }
        if self.needs.iter().any(|need| *need != self.layouts[0]) {
            write!(f, " needs {}", list(&self.needs))?;
        }
        Ok(())
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan {}", self.model.name)?;
        for (id, weight) in self.weights.iter() {
            let shape: Vec<String> = weight.shape.iter().map(u32::to_string).collect();
            let device = &self.machine.devices[weight.device].name;
            writeln!(
                f,
                "  {id} {} {}[{}] on {device}",
                weight.name,
                weight.format,
                shape.join(", ")
            )?;
        }
        for program in &self.programs {
            writeln!(
                f,
                "program {} tokens={} rows={}",
                program.name, program.max.tokens, program.max.rows
            )?;
            for lane in &program.lanes {
                writeln!(f, "  lane {} {:?}", self.machine.devices[lane.device].name, lane.queue)?;
                for &id in &lane.steps {
                    writeln!(f, "    {id} {}", program.steps[id])?;
                }
            }
            writeln!(f, "  return {}", program.output)?;
        }
        Ok(())
    }
}

/// `compute`, `copy`.
impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Queue::Compute => "compute",
            Queue::Copy => "copy",
        })
    }
}

/// `b1 = rms_norm(w1 eps=0.00001) (b0) after s3 free b0  ; layers.0.norm ~4us`.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.action {
            Action::Run(op) => write!(f, "{} = {op} ({})", list(&self.writes), list(&self.reads))?,
            Action::Move { movement, algorithm, .. } => {
                write!(f, "{} = {movement} ({})", list(&self.writes), list(&self.reads))?;
                if !algorithm.is_direct() {
                    write!(f, " by the library")?;
                }
            }
            Action::Fetch { weight, offset } => {
                write!(f, "{} = fetch {weight} at={offset}", list(&self.writes))?;
            }
        }
        if !self.waits.is_empty() {
            write!(f, " after {}", list(&self.waits))?;
        }
        if !self.frees.is_empty() {
            write!(f, " free {}", list(&self.frees))?;
        }
        write!(f, "  ; {} ~{}us", self.name, self.estimate_nanos.div_ceil(1000))
    }
}
