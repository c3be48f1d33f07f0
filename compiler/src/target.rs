//! What a compilation aims at: options resolved against a model and a machine.

use anyhow::{Context as _, Result, bail, ensure};
use ir::id::{DeviceId, Table};
use ir::machine::{Device, DeviceKind, Link, Machine};
use ir::model::{Model, ModelCache};
use ir::packing::stored_together;
use ir::plan::Phase;
use ir::tensor::{DType, Extent, Format};

use crate::cost::nanos_at;
use crate::indices::{most_rows, most_tokens};
use crate::options::{DEFAULT_CONTEXT, Objective, Options, Pin, Request};
use crate::place::{PROMPT_TOKENS, Times};

/// Tokens of one cache block: 32 rows of a head are contiguous, and a sequence wastes 16 tokens on average.
pub(crate) const BLOCK_TOKENS: u32 = 32;
/// Rows of logits in one prefill, by which texts are scored: as many as GPUs multiply in one launch.
const GPU_PREFILL_ROWS: u32 = 64;
/// The same on a machine without GPUs: as many as tiles of AMX take at once. Logits count twice, for a run and for the
/// next one.
const CPU_PREFILL_ROWS: u32 = 32;

/// Everything about a compilation but the placement itself.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// The devices that may be used, with the memory that may be filled.
    pub(crate) machine: Machine,
    /// The most tokens of one sequence.
    pub(crate) context: u32,
    /// Sequences at once.
    pub(crate) max_sequences: u32,
    /// The most tokens of one prefill run: no more than a context has, nor than GPUs count the elements of.
    pub(crate) prefill_tokens: u32,
    /// Format of matrices on each device; `None` is as stored.
    pub(crate) formats: Table<DeviceId, Option<Format>>,
    /// Whether a device holds bfloat16 in 12 bits where it can.
    pub(crate) has_bf12: Table<DeviceId, bool>,
    /// Element type of the caches on each device.
    pub(crate) kv_types: Table<DeviceId, DType>,
    /// Blocks of every cache, over all sequences.
    pub(crate) blocks: u32,
    /// The NUMA node that holds tables of tokens, where that is tried; `None` leaves them free.
    pub(crate) table_home: Option<DeviceId>,
    /// The shape that is asked for.
    pub(crate) request: Request,
    /// What runs where it is asked to.
    pub(crate) pins: Vec<Pin>,
    /// What is minimised.
    pub(crate) objective: Objective,
    /// Whether what is skipped for the time it takes is tried as well, because nothing fits otherwise: shares shift where
    /// that makes nothing fit by what is estimated, and many hosts that are too small are searched. More fits, and what
    /// is told to be missing is little.
    pub(crate) is_exhaustive: bool,
    /// Whether a refusal says what to ask for instead, for which searches are made.
    pub(crate) is_told: bool,
}

/// The batch that a program is compiled and priced for.
#[derive(Clone, Debug)]
pub(crate) struct Batch {
    /// Name of the program.
    pub(crate) program: String,
    /// Kind of batch.
    pub(crate) phase: Phase,
    /// The phase whose placed graph it is scheduled from.
    pub(crate) placed_as: Phase,
    /// What a price assumes, as [`ir::plan::Program::estimated()`] says of the program: the most tokens, and the rows of
    /// logits that are wanted.
    pub(crate) extent: Extent,
    /// The most rows of logits.
    pub(crate) max_rows: u32,
    /// The most sequences.
    pub(crate) max_sequences: u32,
    /// Sequences that a price assumes.
    pub(crate) sequences: u32,
    /// Tokens cached of each of them.
    pub(crate) past: u32,
}

impl Batch {
    /// The most that a run takes.
    pub(crate) fn max(&self) -> Extent {
        Extent { rows: self.max_rows, ..self.extent }
    }

    /// The tokens that make runs of its program longer: those that prefill feeds, those cached before decode.
    pub(crate) fn varying_tokens(&self) -> u32 {
        match self.phase {
            Phase::Prefill => self.extent.tokens,
            Phase::Decode => self.past,
        }
    }
}

impl Target {
    /// A target with prefill runs of at most so many tokens. Fails on names that the machine lacks and limits that the
    /// model exceeds.
    pub(crate) fn new(
        model: &Model,
        machine: &Machine,
        options: &Options,
        prefill_tokens: u32,
    ) -> Result<Self> {
        let context = options.context.unwrap_or(model.context.min(DEFAULT_CONTEXT));
        ensure!(context > 0, "a context of 0 tokens holds nothing");
        ensure!(
            context <= model.context,
            "the context of {context} tokens is longer than the model's {}",
            model.context
        );
        ensure!(options.max_sequences > 0, "max-sequences is 0");
        ensure!(prefill_tokens > 0, "prefill-tokens is 0");
        ensure!(
            !options.plain_bf16 || options.formats.iter().all(|rule| rule.format != Format::Bf12),
            "--format bf12 allows bfloat16 in 12 bits and --plain-bf16 forbids it: leave one out"
        );
        machine.check().with_context(|| {
            let file = options.machine_file.as_deref();
            file.map_or("the machine".to_owned(), |file| file.display().to_string())
        })?;
        let machine = reduced(machine, options)?;
        let most_sequences = u32::MAX / (context.div_ceil(BLOCK_TOKENS)).max(1);
        ensure!(
            options.max_sequences <= most_sequences,
            "{} sequences of {context} tokens have more cache blocks than are counted: lower --max-sequences to \
             {most_sequences}",
            options.max_sequences
        );
        let has_gpu = machine.has_gpus();
        let most_tokens = if has_gpu { most_tokens(model) } else { u32::MAX };
        let most_sequences = if has_gpu { most_tokens.min(most_rows(model)) } else { u32::MAX };
        ensure!(
            options.max_sequences <= most_sequences,
            "a run of {} sequences has more numbers than GPUs count: lower --max-sequences to {most_sequences}, or \
             leave GPUs out with --without",
            options.max_sequences
        );
        let stored = stored_type(model);
        for rule in &options.formats {
            let mut devices = machine.devices.rows().iter();
            ensure!(
                devices.any(|device| rule.devices.is_match(&device.name)),
                "the format {:?} matches no device: the machine has {}",
                rule.text,
                machine.listed_devices()
            );
        }
        let formats: Table<DeviceId, Option<Format>> = machine
            .devices
            .rows()
            .iter()
            .map(|device| {
                let rules = options.formats.iter().rev();
                rules
                    .filter(|rule| rule.devices.is_match(&device.name))
                    .map(|rule| rule.format)
                    .next()
            })
            .collect();
        let cannot_store = |dtype: DType| {
            let is_stored =
                |cache: &&ModelCache| cache.head_dim.is_multiple_of(stored_together(dtype));
            model.caches.rows().iter().find(|cache| !is_stored(cache))
        };
        let kv_types: Table<DeviceId, DType> = formats
            .rows()
            .iter()
            .zip(machine.devices.rows())
            .map(|(&format, device)| {
                // Kernels of GPUs read no bytes.
                let is_gpu = device.kind.is_gpu();
                let asked = options.kv_type.filter(|&dtype| !is_gpu || dtype != DType::I8);
                asked.unwrap_or_else(|| match kv_type(format, stored) {
                    usual if is_gpu || cannot_store(usual).is_none() => usual,
                    // Any head's.
                    _ => DType::F32,
                })
            })
            .collect();
        for (device, &dtype) in machine.devices.rows().iter().zip(kv_types.rows()) {
            if let Some(cache) = cannot_store(dtype).filter(|_| !device.kind.is_gpu()) {
                bail!(
                    "{} stores no keys of {} features in {dtype}: give another --kv-type, such as f32",
                    device.name,
                    cache.head_dim
                );
            }
        }
        let mut target = Self {
            machine,
            context,
            max_sequences: options.max_sequences,
            prefill_tokens: prefill_tokens.min(context).min(most_tokens),
            formats,
            has_bf12: Table::default(),
            kv_types,
            blocks: 0,
            table_home: None,
            request: options.request.clone(),
            pins: options.pins.clone(),
            objective: options.objective,
            is_exhaustive: false,
            is_told: false,
        };
        let gains = |device: &Device| !options.plain_bf16 && target.gains_by_bf12(device);
        target.has_bf12 = target.machine.devices.rows().iter().map(gains).collect();
        target.blocks = target.blocks_within_budget(model, options.kv_cache_bytes)?;
        Ok(target)
    }

    /// Whether a pin says where a node of that name runs.
    pub(crate) fn is_pinned(&self, name: &str) -> bool {
        self.pins.iter().any(|pin| pin.pattern.is_match(name))
    }

    /// Whether the request names a device: then it is to compute.
    pub(crate) fn is_requested(&self, device: DeviceId) -> bool {
        let is_it = |name: &String| *name == self.machine.devices[device].name;
        match &self.request {
            Request::Any | Request::PipelineRanks(_) | Request::TensorParallelRanks(_) => false,
            Request::Pipeline(names) => names.iter().any(is_it),
            Request::TensorParallel(shares) => shares.iter().any(|(name, _)| is_it(name)),
        }
    }

    /// Blocks of every cache for all sequences, or those that the budget of a KV cache leaves.
    fn blocks_within_budget(&self, model: &Model, budget: Option<u64>) -> Result<u32> {
        let per_sequence = self.blocks_per_sequence();
        let all = per_sequence.saturating_mul(self.max_sequences);
        let Some(budget) = budget else { return Ok(all) };
        let block_bytes = self.cache_block_bytes(model);
        let needed = block_bytes * u64::from(per_sequence);
        ensure!(
            budget >= needed,
            "a KV cache of {budget} bytes is {} bytes short of one context of {} tokens, which takes {needed}: raise \
             --kv-cache or lower --context",
            needed - budget,
            self.context
        );
        let blocks = budget.checked_div(block_bytes).unwrap_or(u64::from(all));
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).min(all);
        ensure!(
            blocks >= self.max_sequences,
            "a KV cache of {budget} bytes has {blocks} blocks of {BLOCK_TOKENS} tokens, and each of {} sequences takes \
             one at least: raise --kv-cache or lower --max-sequences to {blocks}",
            self.max_sequences
        );
        Ok(blocks)
    }

    /// Bytes of one block of all caches. Devices may hold keys in different types; this is of the widest.
    pub(crate) fn cache_block_bytes(&self, model: &Model) -> u64 {
        let widest = |head_dim: u32| {
            let types = self.kv_types.rows().iter();
            types.map(|dtype| dtype.head_bytes(head_dim)).max().expect("there are devices")
        };
        let caches = model.caches.rows().iter();
        let row = |cache: &ModelCache| 2 * widest(cache.head_dim) * u64::from(cache.kv_heads);
        caches.map(|cache| row(cache) * u64::from(BLOCK_TOKENS)).sum()
    }

    /// Whether a device may be better off with 12 bits. For a NUMA node this is a question of speed: decoding may take
    /// longer than the bytes that it saves. For latency the decode of one sequence and of the most weigh alike, as in
    /// [`decide`](crate::decide::decide). For throughput requests count or, on a machine with GPUs, which are taken to
    /// compute the prompts, the decode of the most sequences. A GPU may also need the memory, so placements are compared.
    fn gains_by_bf12(&self, device: &Device) -> bool {
        let has_gpu = self.machine.has_gpus();
        let nanos = |format| {
            let rates = device.rates.linear(format)?;
            // Of as many weights as a small model has.
            let nanos = |tokens| nanos_at(1e9, rates.weights_per_sec(tokens)) as u64;
            let (prefill, decode) = (nanos(self.prefill_tokens), nanos(self.max_sequences));
            Some(match self.objective {
                Objective::Throughput if has_gpu => decode,
                Objective::Throughput => {
                    Times { prefill: self.prompt_runs() * prefill, decode }.request(self)
                }
                Objective::Latency => nanos(1).saturating_add(decode),
            })
        };
        match (device.kind.is_gpu(), nanos(Format::Bf12), nanos(Format::Bf16)) {
            (true, narrow, _) => narrow.is_some(),
            (false, Some(narrow), wide) => wide.is_none_or(|wide| narrow < wide),
            (false, None, _) => false,
        }
    }

    /// The same with bfloat16 in 16 bits on GPUs; `None` where no GPU holds it in 12.
    pub(crate) fn with_plain_gpus(&self) -> Option<Self> {
        // Of two refusals that of 12 bits is told.
        let mut plain = Self { is_told: false, ..self.clone() };
        for (id, device) in self.machine.devices.iter() {
            plain.has_bf12[id] &= !device.kind.is_gpu();
        }
        (plain.has_bf12 != self.has_bf12).then_some(plain)
    }

    /// Runs that a prompt of [`PROMPT_TOKENS`], or of the context if that is shorter, takes: placements are judged by it.
    pub(crate) fn prompt_runs(&self) -> u64 {
        u64::from(PROMPT_TOKENS.min(self.context).div_ceil(self.prefill_tokens))
    }

    /// Cache blocks of one sequence of the full context.
    pub(crate) fn blocks_per_sequence(&self) -> u32 {
        self.context.div_ceil(BLOCK_TOKENS)
    }

    /// Bytes of one cache on a device, keys and values of so many key heads of `head_dim` features.
    pub(crate) fn cache_bytes(&self, device: DeviceId, (kv_heads, head_dim): (u32, u32)) -> u64 {
        let row = self.kv_types[device].head_bytes(head_dim) * u64::from(kv_heads);
        2 * row * u64::from(self.blocks) * u64::from(BLOCK_TOKENS)
    }

    /// The batch of prefill programs. More sequences than it takes tokens are fed in several runs.
    pub(crate) fn prefill(&self) -> Batch {
        let (tokens, program) = (self.prefill_tokens, "prefill".into());
        Batch { program, ..self.prompt(tokens, Phase::Prefill) }
    }

    /// The batch of a program for prompts of up to `tokens` tokens, placed as in a phase.
    pub(crate) fn prompt(&self, tokens: u32, placed_as: Phase) -> Batch {
        let has_gpus = self.machine.has_gpus();
        let rows = if has_gpus { GPU_PREFILL_ROWS } else { CPU_PREFILL_ROWS };
        Batch {
            program: format!("prefill{tokens}"),
            phase: Phase::Prefill,
            placed_as,
            extent: Extent { tokens, rows: 1 },
            max_rows: rows.max(self.max_sequences).min(tokens),
            max_sequences: self.max_sequences.min(tokens),
            sequences: 1,
            past: 0,
        }
    }

    /// The batch of a decode program, with half of the context cached, or as much as all sequences can have.
    pub(crate) fn decode(&self, sequences: u32) -> Batch {
        // The token that is fed is cached, too.
        let most = u64::from(self.blocks) * u64::from(BLOCK_TOKENS) / u64::from(sequences.max(1));
        let most = u32::try_from(most.saturating_sub(1)).unwrap_or(u32::MAX);
        Batch {
            program: format!("decode{sequences}"),
            phase: Phase::Decode,
            placed_as: Phase::Decode,
            extent: Extent { tokens: sequences, rows: sequences },
            max_rows: sequences,
            max_sequences: sequences,
            sequences,
            past: most.min(self.context / 2),
        }
    }

    /// Batches of all programs but one for short prompts: prefill, then decode for powers of four, up to the most
    /// sequences.
    pub(crate) fn batches(&self) -> Vec<Batch> {
        let mut batches = vec![self.prefill()];
        let mut sequences = 1;
        while sequences < self.max_sequences {
            batches.push(self.decode(sequences));
            sequences = sequences.saturating_mul(4);
        }
        batches.push(self.decode(self.max_sequences));
        batches
    }

    /// The device of that name; an error lists those that exist.
    pub(crate) fn device(&self, name: &str) -> Result<DeviceId> {
        device(&self.machine, name)
    }

    /// The device's name.
    pub(crate) fn name(&self, device: DeviceId) -> &str {
        &self.machine.devices[device].name
    }
}

fn device(machine: &Machine, name: &str) -> Result<DeviceId> {
    machine.device(name).with_context(|| {
        format!("unknown device {name:?}: the machine has {}", machine.listed_devices())
    })
}

/// The machine less what the options take away.
fn reduced(machine: &Machine, options: &Options) -> Result<Machine> {
    ensure!(
        options.gpu_memory_bytes.is_none() || machine.has_gpus(),
        "--gpu-memory limits GPUs, and the machine has none: leave it out"
    );
    let without: Vec<DeviceId> =
        options.without.iter().map(|name| device(machine, name)).collect::<Result<_>>()?;
    let (host, collectives) = (machine.host.clone(), machine.collectives.clone());
    let mut reduced = Machine { host, collectives, ..Machine::default() };
    let mut renamed: Table<DeviceId, Option<DeviceId>> = Table::default();
    for (id, device) in machine.devices.iter() {
        if without.contains(&id) {
            renamed.push(None);
            continue;
        }
        let mut device = device.clone();
        if let (DeviceKind::Gpu { .. }, Some(limit)) = (&device.kind, options.gpu_memory_bytes) {
            device.memory_bytes = device.memory_bytes.min(limit);
        }
        renamed.push(Some(reduced.devices.push(device)));
    }
    ensure!(
        !reduced.devices.is_empty(),
        "no device is left to run on: --without names all of them, leave one in"
    );
    for link in &machine.links {
        if let (Some(from), Some(to)) = (renamed[link.from], renamed[link.to]) {
            reduced.links.push(Link { from, to, ..link.clone() });
        }
    }
    Ok(reduced)
}

/// The element type that most of the checkpoint's matrix bytes have.
fn stored_type(model: &Model) -> DType {
    let elements = |dtype: DType| -> u64 {
        let weights = model.weights.rows().iter().filter(|weight| weight.stored == dtype);
        weights
            .map(|weight| weight.shape.iter().map(|&size| u64::from(size)).product::<u64>())
            .sum()
    };
    [DType::F32, DType::F16, DType::Bf16]
        .into_iter()
        .max_by_key(|&dtype| elements(dtype))
        .expect("the list is not empty")
}

/// Caches are as exact as the weights beside them.
fn kv_type(format: Option<Format>, stored: DType) -> DType {
    match (format.unwrap_or(Format::from(stored)), stored) {
        (Format::F32, _) => DType::F32,
        (Format::F16, _) => DType::F16,
        (Format::Bf16 | Format::Bf12, _) | (Format::Q8 | Format::Q4, DType::Bf16) => DType::Bf16,
        (Format::Q8 | Format::Q4, DType::F32 | DType::F16 | DType::I32 | DType::U8 | DType::I8) => {
            DType::F16
        }
    }
}
