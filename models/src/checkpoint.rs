//! The files of a checkpoint and where each tensor lies in them.
//!
//! - Tensors are known by name, shape, element type and byte range; their data is not read.
//! - Files are numbered in the order of their names, so the same checkpoint always reads the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use ir::id::{FileId, Table};
use ir::model::{CheckpointFile, Model};
use memmap2::{Advice, Mmap};

use crate::header::{self, Object};

/// The tensors of one checkpoint, over one file or several.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    /// The safetensors file, or the index that names several.
    entrance: PathBuf,
    files: Table<FileId, CheckpointFile>,
    tensors: BTreeMap<String, StoredTensor>,
    /// Tensors that the index has in a file which lacks them, and that file.
    lost: BTreeMap<String, String>,
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// The file it is in.
    pub file: FileId,
    /// What that file's header says of it.
    pub entry: header::Entry,
}

impl Checkpoint {
    /// Reads the headers of the checkpoint at `path`: a safetensors file, an index, or a folder with either.
    ///
    /// # Errors
    ///
    /// When a file is missing or unreadable, or when the index or a header is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        // Symbolic links stay as they are: a hub cache links readable names to files named by their hash.
        let path =
            std::path::absolute(path).with_context(|| format!("reading {}", path.display()))?;
        let name = path.display();
        ensure_link_leads_somewhere(&path)?;
        let kind = std::fs::metadata(&path).map_err(|error| {
            if error.kind() == ErrorKind::NotFound {
                // Other programs take a name of the hub here.
                anyhow!(
                    "{name}: there is no such file or folder; checkpoints are not downloaded: name one on this machine"
                )
            } else {
                anyhow!(error).context(format!("reading {name}"))
            }
        })?;
        let entrance = if kind.is_dir() { entrance(&path)? } else { path };
        let folder = entrance.parent().unwrap_or(Path::new("/")).to_path_buf();
        let mut checkpoint = Self {
            folder,
            entrance,
            files: Table::default(),
            tensors: BTreeMap::new(),
            lost: BTreeMap::new(),
        };
        if checkpoint.entrance.extension().is_some_and(|extension| extension == "json") {
            checkpoint.read_index()?;
        } else {
            let file = checkpoint.entrance.clone();
            let (id, entries) = checkpoint.read_file(file)?;
            checkpoint.tensors = entries
                .into_iter()
                .map(|(name, entry)| (name, StoredTensor { file: id, entry }))
                .collect();
        }
        Ok(checkpoint)
    }

    /// The folder with configuration and tokenizer.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The files that tensors lie in.
    pub fn files(&self) -> &Table<FileId, CheckpointFile> {
        &self.files
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name)
    }

    /// The tensor of that name; an error that says where it was sought when there is none.
    pub fn tensor(&self, name: &str) -> Result<&StoredTensor> {
        self.get(name).ok_or_else(|| self.missing(name))
    }

    /// Names of tensors that no weight of a model comes from, but for those that checkpoints hold for no use: tables
    /// that follow from the configuration, and the copy of a table that serves as the head, too.
    pub fn unused<'a>(&'a self, model: &Model) -> impl Iterator<Item = &'a str> {
        const IDLE: [&str; 6] = [
            "rotary_emb.inv_freq",
            "lm_head.weight",
            ".attn.bias",
            ".attention.bias",
            ".masked_bias",
            "position_ids",
        ];
        let sources = model.weights.rows().iter().flat_map(|weight| &weight.sources);
        let starts: BTreeSet<(FileId, u64)> =
            sources.map(|source| (source.file, source.offset)).collect();
        let is_used = move |tensor: &StoredTensor| {
            let (offset, bytes) = (tensor.entry.offset, tensor.entry.bytes);
            let inside = (tensor.file, offset)..(tensor.file, offset + bytes);
            starts.range(inside).next().is_some()
        };
        let idle = |name: &str| IDLE.iter().any(|end| name.ends_with(end));
        let unused = self.tensors.iter().filter(move |(name, tensor)| {
            !idle(name) && tensor.entry.bytes > 0 && !is_used(tensor)
        });
        unused.map(|(name, _)| name.as_str())
    }

    /// Whether two tensors hold the same bytes, all of which are read.
    pub fn same_contents(&self, left: &StoredTensor, right: &StoredTensor) -> Result<bool> {
        if left.entry.dtype != right.entry.dtype || left.entry.shape != right.entry.shape {
            return Ok(false);
        }
        let map = |tensor: &StoredTensor| {
            let (_, file) = map(&self.files[tensor.file].path)?;
            file.advise(Advice::Sequential).context("reading two tensors that may be one")?;
            anyhow::Ok(file)
        };
        let (left_file, right_file) = (map(left)?, map(right)?);
        // The headers were read from files of the same size, but these may have shrunk since.
        let bytes = |file: &Mmap, tensor: &StoredTensor| -> Option<Range<usize>> {
            let (from, to) = (tensor.entry.offset, tensor.entry.offset + tensor.entry.bytes);
            (to <= file.len() as u64).then_some(from as usize..to as usize)
        };
        let ranges = bytes(&left_file, left).zip(bytes(&right_file, right));
        let (left, right) = ranges.context("the checkpoint changed while it was read")?;
        Ok(left_file[left] == right_file[right])
    }

    fn missing(&self, name: &str) -> anyhow::Error {
        let count = self.files.len();
        let entrance = self.entrance.display();
        let index = self.folder.join(INDEX);
        let is_shard = index.exists() && self.entrance != index;
        if let Some(shard) = self.lost.get(name) {
            anyhow!("{entrance}: tensor {name:?} is said to be in {shard}, which lacks it")
        } else if let Some((packed, method)) = self.packed(name) {
            anyhow!(
                "{entrance}: tensor {name:?} is missing, but {packed:?} is there: the weights are quantised by \
                 {method}, and only F32, F16 and BF16 are supported; take the unquantised checkpoint with --format q8 or q4"
            )
        } else if count == 1 && is_shard {
            anyhow!(
                "{entrance}: tensor {name:?} is missing from this shard; take {INDEX} or the folder"
            )
        } else if count == 1 {
            anyhow!("{entrance}: tensor {name:?} is missing")
        } else {
            anyhow!("{entrance}: tensor {name:?} is missing from its {count} files")
        }
    }

    /// The tensor that holds a weight in quantised checkpoints of the two kinds that may not say so in `config.json`,
    /// and which kind it is.
    fn packed(&self, name: &str) -> Option<(String, &'static str)> {
        let layer = name.strip_suffix(".weight")?;
        let columns = |name: &str| self.get(name)?.entry.shape.last().copied();
        let packed = format!("{layer}.qweight");
        let outputs = columns(&packed)?;
        // Scales are one for each output. GPTQ packs several inputs into an element, AWQ several outputs.
        let method = match columns(&format!("{layer}.scales")) {
            Some(scales) if scales == outputs => "GPTQ",
            Some(_) => "AWQ",
            None => "GPTQ or AWQ",
        };
        Some((packed, method))
    }

    fn read_index(&mut self) -> Result<()> {
        let index = self.entrance.display().to_string();
        let text = std::fs::read(&self.entrance).with_context(|| format!("reading {index}"))?;
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: Object<String>,
        }
        let map = match serde_json::from_slice::<Index>(&text) {
            Ok(parsed) => parsed.weight_map.0,
            Err(error) => bail!("{index}: malformed index: {error}"),
        };
        ensure!(!map.is_empty(), "{index}: the index names no tensor");
        let mut shards = BTreeMap::new();
        for shard in map.values().collect::<BTreeSet<_>>() {
            let inside =
                Path::new(shard).components().all(|part| matches!(part, Component::Normal(_)));
            ensure!(inside && !shard.is_empty(), "{index}: {shard:?} is not a file of this folder");
            let path = self.folder.join(shard);
            let read = self.read_file(path).with_context(|| format!("a shard of {index}"))?;
            shards.insert(shard.clone(), read);
        }
        for (name, shard) in map {
            let (file, entries) = &shards[&shard];
            match entries.get(&name) {
                Some(entry) => {
                    let tensor = StoredTensor { file: *file, entry: entry.clone() };
                    self.tensors.insert(name, tensor);
                }
                // It matters only if it is needed, which the copy of a tied table is not.
                None => {
                    self.lost.insert(name, shard);
                }
            }
        }
        Ok(())
    }

    fn read_file(&mut self, path: PathBuf) -> Result<(FileId, BTreeMap<String, header::Entry>)> {
        let (file, contents) = map(&path)?;
        let entries = header::read(&contents).with_context(|| path.display().to_string())?;
        let bytes = contents.len() as u64;
        let fingerprint = ir::fingerprint_of_file(bytes, |at, piece| file.read_exact_at(piece, at))
            .with_context(|| format!("reading {}", path.display()))?;
        Ok((self.files.push(CheckpointFile { path, bytes, fingerprint }), entries))
    }
}

/// The file that says which shard a tensor is in.
const INDEX: &str = "model.safetensors.index.json";
/// How files of weights end, in this format and in others.
const WEIGHT_ENDINGS: [&str; 5] = [".safetensors", ".gguf", ".bin", ".pth", ".pt"];

/// The file of a folder to begin with.
fn entrance(folder: &Path) -> Result<PathBuf> {
    for name in ["model.safetensors", INDEX] {
        let path = folder.join(name);
        ensure_link_leads_somewhere(&path)?;
        if path.exists() {
            return Ok(path);
        }
    }
    let mut others: Vec<String> = std::fs::read_dir(folder)
        .with_context(|| format!("reading {}", folder.display()))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending)))
        .collect();
    others.sort();
    let found = match others.as_slice() {
        [] => String::new(),
        [only] => format!(", but {only}"),
        [first, ..] => format!(", but {first} and {} more", others.len() - 1),
    };
    let are_gguf = others.iter().all(|name| name.ends_with(".gguf"));
    let what = match others.len() {
        1 if are_gguf => format!(", {}", header::GGUF),
        2.. if are_gguf => format!(", each {}", header::GGUF),
        _ => String::new(),
    };
    bail!(
        "{}: holds neither model.safetensors nor model.safetensors.index.json{found}{what}",
        folder.display()
    )
}

/// A cache of the hub that was copied in part has links to files that were not.
fn ensure_link_leads_somewhere(path: &Path) -> Result<()> {
    if let (Ok(target), Err(error)) = (std::fs::read_link(path), std::fs::metadata(path)) {
        let target = target.display();
        return Err(anyhow!(error).context(format!(
            "{}: a link to {target}, which cannot be read; copy what it leads to as well",
            path.display()
        )));
    }
    Ok(())
}

fn map(path: &Path) -> Result<(File, Mmap)> {
    let reading = || format!("reading {}", path.display());
    ensure_link_leads_somewhere(path)?;
    // To open a pipe would wait for whoever writes to it.
    let kind = std::fs::metadata(path).with_context(reading)?;
    ensure!(kind.is_file(), "{}: not a file", path.display());
    let file = File::open(path).with_context(reading)?;
    #[expect(unsafe_code, reason = "a checkpoint can exceed memory, so it is mapped and not read")]
    // SAFETY: the map is read-only and private to this module. Another process that shortens the file
    // meanwhile ends this one with SIGBUS, which no reader of mapped files can rule out.
    let contents = unsafe { Mmap::map(&file) };
    Ok((file, contents.with_context(reading)?))
}
