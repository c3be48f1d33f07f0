//! The header of one safetensors file: names, element types, shapes and byte ranges.
//!
//! A header that is accepted covers the file exactly: ranges neither overlap nor leave a gap nor reach
//! beyond the end, and each is as long as its shape and element type ask for. The bytes are not trusted.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use anyhow::{Result, bail, ensure};
use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

/// Longest header accepted: the limit of the reference implementation.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The stored element type as the file spells it: `F32`, `BF16`, …
    pub dtype: String,
    /// Outermost axis first; empty for a scalar.
    pub shape: Vec<u64>,
    /// Position in the file of its first byte.
    pub offset: u64,
    /// Length of its data.
    pub bytes: u64,
}

/// Reads the header of a file with these contents, which may be mapped: only the header is touched.
///
/// # Errors
///
/// Says what is wrong, and with which tensor; the file's name is for the caller to add.
pub fn read(contents: &[u8]) -> Result<BTreeMap<String, Entry>> {
    let file_bytes = contents.len() as u64;
    let Some((length, rest)) = contents.split_first_chunk::<8>() else {
        bail!("{file_bytes} bytes are too short for a safetensors header");
    };
    let length = u64::from_le_bytes(*length);
    ensure!(
        length <= MAX_HEADER_BYTES,
        "the header claims {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
    );
    ensure!(
        length <= rest.len() as u64,
        "the header claims {length} bytes, but only {} follow: the file is truncated or not safetensors",
        rest.len()
    );
    let (header, data) = rest.split_at(length as usize);
    let header: Object<RawEntry> = match serde_json::from_slice(header) {
        Ok(header) => header,
        Err(error) => bail!("malformed header: {error}"),
    };
    let start = 8 + length;
    let mut entries = BTreeMap::new();
    for (name, raw) in header.0 {
        let entry = checked(&name, raw, start, data.len() as u64)?;
        entries.insert(name, entry);
    }
    covers_exactly(&entries, start, file_bytes)?;
    Ok(entries)
}

/// Bits of one element, for the element types that the format knows.
fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => 8,
        "F8_E5M2FNUZ" | "F8_E4M3FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

fn checked(name: &str, raw: RawEntry, start: u64, data_bytes: u64) -> Result<Entry> {
    let [from, to] = raw.data_offsets;
    ensure!(
        from <= to,
        "tensor {name:?} has the byte range {from}..{to}, which ends before it begins"
    );
    ensure!(
        to <= data_bytes,
        "tensor {name:?} has the byte range {from}..{to}, but only {data_bytes} bytes of data follow the header"
    );
    let bytes = to - from;
    // An element type this program doesn't know matters only once such a tensor is needed.
    if let Some(bits) = element_bits(&raw.dtype) {
        let needed = raw.shape.iter().try_fold(bits, |product, &size| product.checked_mul(size));
        ensure!(
            needed == bytes.checked_mul(8),
            "tensor {name:?} has {bytes} bytes, which is not what {}{:?} takes",
            raw.dtype,
            raw.shape
        );
    }
    Ok(Entry { dtype: raw.dtype, shape: raw.shape, offset: start + from, bytes })
}

/// Each byte after the header belongs to one tensor.
fn covers_exactly(entries: &BTreeMap<String, Entry>, start: u64, file_bytes: u64) -> Result<()> {
    let mut ranges: Vec<(u64, u64, &str)> =
        entries.iter().map(|(name, entry)| (entry.offset, entry.bytes, name.as_str())).collect();
    ranges.sort_unstable();
    let mut position = start;
    let mut previous = "the header";
    for (offset, bytes, name) in ranges {
        ensure!(offset >= position, "the data of tensors {previous:?} and {name:?} overlap");
        ensure!(
            offset == position,
            "{} bytes between {previous:?} and tensor {name:?} belong to no tensor",
            offset - position
        );
        position = offset + bytes;
        previous = name;
    }
    ensure!(
        position == file_bytes,
        "{} bytes after the last tensor belong to no tensor",
        file_bytes - position
    );
    Ok(())
}

/// What the header says of one tensor; byte ranges count from the end of the header.
#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// A JSON object that refuses a key that is there twice, and leaves out `__metadata__`.
pub(crate) struct Object<T>(pub(crate) BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData))
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = Object<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<T>, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map
                .next_value()
                .map_err(|error| A::Error::custom(format_args!("tensor {name:?}: {error}")))?;
            if entries.contains_key(&name) {
                return Err(A::Error::custom(format_args!("tensor {name:?} is there twice")));
            }
            entries.insert(name, value);
        }
        Ok(Object(entries))
    }
}
