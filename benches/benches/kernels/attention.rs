//! Attention over caches of every type: one token after a long context, which memory bounds, and a prompt.

use anyhow::Result;
use executor::calibrate::work::{Heads, Layer};
use executor::kernels::cpu::arithmetic::Arithmetic;
use executor::kernels::cpu::cache::Element;

use crate::{Amount, Bench};

const PAST: usize = 4095;
const PROMPT: usize = 512;
/// With wide heads; together beyond the caches in every type.
const LAYERS: usize = 16;

pub(crate) fn measure(bench: &mut Bench) -> Result<()> {
    let elements = [Element::F32, Element::F16, Element::Bf16, Element::Int8];
    let heads = [Heads::WIDE, Heads::NARROW].into_iter();
    for (heads, element) in heads.flat_map(|heads| elements.map(|element| (heads, element))) {
        let Heads { queries, keys, elements } = heads;
        let shape = format!("{queries} heads of {elements} on {keys}, {element:?}");
        let count = LAYERS * Heads::WIDE.token_bytes(element) / heads.token_bytes(element);
        let layer = |_| Layer::new(&bench.team, heads, element, PAST + 1, 1);
        let mut layers = (0..count).map(layer).collect::<Result<Vec<_>>>()?;
        let amount = Amount::Bytes(layers.iter().map(Layer::bytes).sum::<usize>() as u64);
        let name = format!("attention of one token after {PAST}, {shape}");
        bench.measure(&name, amount, |team, isa| {
            let mut layers = layers.iter_mut();
            layers.try_for_each(|layer| layer.attend(team, isa, 1, PAST)).expect("it has room");
        })?;
        let mut layer = Layer::new(&bench.team, heads, element, PROMPT, PROMPT)?;
        let arithmetic = Arithmetic::of_attention(bench.isa, element);
        let amount = Amount::Operations(heads.prompt_flops(PROMPT) as u64, arithmetic);
        bench.measure(&format!("attention of {PROMPT} tokens, {shape}"), amount, |team, isa| {
            layer.attend(team, isa, PROMPT, 0).expect("it has room");
        })?;
    }
    Ok(())
}
