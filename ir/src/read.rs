//! Reads back the text form of graphs, so that a pass can be tested text in, text out.
//!
//! - What [`crate::text`] prints is read as the graph it came from, but for causes, which the text leaves out.
//! - Values may carry any numbers, as long as each is made before it is read; printing numbers them anew.
//! - Empty lines and lines that start with `;` are skipped.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context as _, Error, Result, bail, ensure};

use crate::dag::Dag;
use crate::graph::Placed;
use crate::id::{Few, ValueId};
use crate::op::Op;
use crate::tensor::{DType, Dim, Shape, TensorType};

mod line;
mod op;
mod placed;

use line::Line;

/// What a node does, in text.
trait ReadWork: Sized {
    /// Reads what stands between `=` and the inputs.
    fn read(line: &mut Line<'_>) -> Result<Self>;
    /// Fills in what the text leaves out where it follows from the number of inputs.
    fn complete(&mut self, inputs: usize) -> Result<()>;
}

impl ReadWork for Op {
    fn read(line: &mut Line<'_>) -> Result<Self> {
        op::read(line)
    }
    fn complete(&mut self, _: usize) -> Result<()> {
        Ok(())
    }
}

impl ReadWork for Placed {
    fn read(line: &mut Line<'_>) -> Result<Self> {
        placed::read(line)
    }
    fn complete(&mut self, inputs: usize) -> Result<()> {
        if self.needs.is_empty() {
            self.needs = vec![self.layouts[0].clone(); inputs];
        }
        ensure!(self.needs.len() == inputs, "{} needs for {inputs} inputs", self.needs.len());
        Ok(())
    }
}

impl FromStr for Dag<Op> {
    type Err = Error;

    /// Fails with line and column of what is not a layer graph.
    fn from_str(text: &str) -> Result<Self> {
        Reader::default().read(text)
    }
}

impl FromStr for Dag<Placed> {
    type Err = Error;

    /// Fails with line and column of what is not a placed graph.
    fn from_str(text: &str) -> Result<Self> {
        Reader::default().read(text)
    }
}

/// A graph as far as it is read.
struct Reader<W> {
    graph: Dag<W>,
    /// The values by the numbers they have in the text.
    values: BTreeMap<u32, ValueId>,
    is_complete: bool,
}

impl<W: ReadWork> Reader<W> {
    fn read(mut self, text: &str) -> Result<Dag<W>> {
        for (index, text) in text.lines().enumerate() {
            if text.trim().is_empty() || text.starts_with(';') {
                continue;
            }
            let mut line = Line::new(text);
            self.read_line(&mut line)
                .with_context(|| format!("line {}, column {}", index + 1, line.column()))?;
        }
        ensure!(self.is_complete, "the graph ends without a return");
        Ok(self.graph)
    }

    fn read_line(&mut self, line: &mut Line<'_>) -> Result<()> {
        ensure!(!self.is_complete, "a line after the return");
        if line.eat("return ") {
            let outputs: Few<ValueId> = line.list(|line| self.value(line))?;
            for output in outputs {
                self.graph.return_value(output);
            }
            self.is_complete = true;
            return line.end();
        }
        let outputs: Vec<_> = line.list(|line| {
            let number = line.id("v")?;
            line.expect(": ")?;
            Ok((number, tensor_type(line)?))
        })?;
        line.expect(" = ")?;
        let mut work = W::read(line)?;
        line.expect(" (")?;
        let mut inputs = Vec::new();
        if !line.eat(")") {
            inputs = line.list(|line| self.value(line))?;
            line.expect(")")?;
        }
        work.complete(inputs.len())?;
        line.expect("  ; ")?;
        let (numbers, types): (Vec<u32>, Vec<TensorType>) = outputs.into_iter().unzip();
        let made = self.graph.push(line.rest(), work, &inputs, &types)?;
        for (number, value) in numbers.into_iter().zip(made) {
            ensure!(self.values.insert(number, value).is_none(), "v{number} is made twice");
        }
        Ok(())
    }

    fn value(&self, line: &mut Line<'_>) -> Result<ValueId> {
        let number = line.id("v")?;
        self.values.get(&number).copied().with_context(|| format!("no line before makes v{number}"))
    }
}

impl<W> Default for Reader<W> {
    fn default() -> Self {
        Self { graph: Dag::default(), values: BTreeMap::new(), is_complete: false }
    }
}

/// `f32[tokens, 64]`.
fn tensor_type(line: &mut Line<'_>) -> Result<TensorType> {
    let dtype = match line.word() {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::Bf16,
        "i32" => DType::I32,
        "u8" => DType::U8,
        "i8" => DType::I8,
        word => bail!("unknown element type {word:?}"),
    };
    line.expect("[")?;
    let mut shape = Shape::new();
    if !line.eat("]") {
        shape = line.list(|line| {
            Ok(match line.word() {
                "tokens" => Dim::Tokens,
                "rows" => Dim::Rows,
                size => Dim::Fixed(size.parse().with_context(|| format!("no axis: {size:?}"))?),
            })
        })?;
        line.expect("]")?;
    }
    Ok(TensorType { dtype, shape })
}
