//! Attention over caches of every type: one token after a long context, which memory bounds, and a prompt.

use anyhow::Result;
use executor::kernels::cpu::attention::{Attention, Sequence, attention};
use executor::kernels::cpu::cache::{Cache, CacheShape, Element};
use executor::kernels::cpu::isa::Isa;
use executor::memory::Region;
use executor::team::Team;

use crate::limits::Arithmetic;
use crate::{Amount, Bench, made_up};

/// Those of an 8 B model.
const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const HEAD_DIM: usize = 128;
const BLOCK_TOKENS: usize = 32;
const PAST: usize = 4095;
const PROMPT: usize = 512;
/// Together beyond the caches in every type.
const LAYERS: usize = 16;

pub(crate) fn measure(bench: &mut Bench) -> Result<()> {
    for element in [Element::F32, Element::F16, Element::Bf16, Element::Int8] {
        let mut layers =
            (0..LAYERS).map(|_| Layer::new(element, PAST + 1)).collect::<Result<Vec<_>>>()?;
        let scales = if element == Element::Int8 { 4 } else { 0 };
        let row = 2 * KV_HEADS * (HEAD_DIM * element.bytes() + scales);
        let amount = Amount::Bytes((LAYERS * (PAST + 1) * row) as u64);
        let name = format!("attention of one token after {PAST}, {element:?}");
        bench.measure(&name, amount, |team, isa| {
            layers.iter_mut().for_each(|layer| layer.attend(team, isa, 1, PAST));
        });
        let mut layer = Layer::new(element, PROMPT)?;
        // A multiplication and an addition for each score and each value, for the triangle that is seen.
        let operations = (4 * HEADS * HEAD_DIM * (PROMPT * (PROMPT + 1) / 2)) as u64;
        let arithmetic = match element {
            Element::F32 | Element::F16 => Arithmetic::F32,
            Element::Bf16 => Arithmetic::Bf16,
            Element::Int8 => Arithmetic::Int8,
        };
        let name = format!("attention of {PROMPT} tokens, {element:?}");
        bench.measure(&name, Amount::Operations(operations, arithmetic), |team, isa| {
            layer.attend(team, isa, PROMPT, 0);
        });
    }
    Ok(())
}

/// One layer's cache for one sequence, and activations to feed it.
struct Layer {
    shape: CacheShape,
    keys: Region,
    values: Region,
    blocks: Vec<u32>,
    activations: Vec<f32>,
    out: Vec<f32>,
}

impl Layer {
    fn new(element: Element, tokens: usize) -> Result<Self> {
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let shape = CacheShape {
            element,
            blocks,
            kv_heads: KV_HEADS,
            block_tokens: BLOCK_TOKENS,
            head_dim: HEAD_DIM,
        };
        let region = || -> Result<Region> {
            let mut region = Region::new(shape.region_bytes().next_multiple_of(8))?;
            region.as_mut_slice::<u64>().fill(0);
            Ok(region)
        };
        Ok(Self {
            shape,
            keys: region()?,
            values: region()?,
            blocks: (0..blocks as u32).collect(),
            activations: (0..tokens * HEADS * HEAD_DIM).map(made_up).collect(),
            out: vec![0.0; tokens * HEADS * HEAD_DIM],
        })
    }

    fn attend(&mut self, team: &Team, isa: Isa, tokens: usize, past: usize) {
        let (q, kv) = (tokens * HEADS * HEAD_DIM, tokens * KV_HEADS * HEAD_DIM);
        let sequences = [Sequence { first_token: 0, tokens, past, blocks: &self.blocks }];
        let work = Attention {
            q: &self.activations[..q],
            k: &self.activations[..kv],
            v: &self.activations[..kv],
            sequences: &sequences,
            heads: HEADS,
            group: HEADS / KV_HEADS,
            first_head: 0,
            scale: 1.0 / (HEAD_DIM as f32).sqrt(),
            window: None,
            soft_cap: None,
            q_norm: None,
            k_norm: None,
            rope: None,
        };
        let (keys, values) = (self.keys.as_mut_slice(), self.values.as_mut_slice());
        let mut cache = Cache::new(self.shape, keys, values).expect("regions are large enough");
        attention(team, isa, &work, &mut cache, &mut self.out[..q]);
    }
}
