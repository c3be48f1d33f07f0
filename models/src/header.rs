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

/// What a file of llama.cpp is, and what to do about it.
pub(crate) const GGUF: &str =
    "a GGUF file, which is made from a checkpoint; take the checkpoint itself";

/// What files begin with that are taken for safetensors, and what they are.
const FOREIGN: [(&[u8], &str); 6] = [
    (b"GGUF", GGUF),
    (b"version https://git-lfs", "a pointer of Git LFS; `git lfs pull` brings the file"),
    (b"PK\x03\x04", "a PyTorch file; save the model with safe_serialization=True"),
    (b"<!DOCTYPE", "a page of a web site, probably of a failed download"),
    (b"(\n  version:", "a plan, a trace or a file of counted experts; take the checkpoint itself"),
    (b"(\n  host:", "a machine, which belongs behind --machine; take a checkpoint"),
];

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
    if let Some((_, what)) = FOREIGN.iter().find(|(start, _)| contents.starts_with(start)) {
        bail!("this is {what}, where safetensors is read");
    }
    let length = u64::from_le_bytes(*length);
    ensure!(
        length <= MAX_HEADER_BYTES,
        "this is no safetensors file: its first eight bytes would make a header of {length} bytes, and \
         {MAX_HEADER_BYTES} are allowed"
    );
    ensure!(
        length <= rest.len() as u64,
        "the header claims {length} bytes, but only {} follow: the file is truncated or no safetensors file",
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file with this header and that many bytes of data.
    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &vec![0; data_bytes]].concat()
    }

    fn error(header: &str, data_bytes: usize) -> String {
        format!("{:#}", read(&file(header, data_bytes)).unwrap_err())
    }

    const TWO: &str = r#"{"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;

    #[test]
    fn a_sound_header_gives_positions_in_the_file() {
        let entries = read(&file(TWO, 32)).unwrap();
        let b = Entry {
            dtype: "BF16".into(),
            shape: vec![4],
            offset: 8 + TWO.len() as u64 + 24,
            bytes: 8,
        };
        assert_eq!(entries["b"], b);
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn empty_tensors_and_scalars_are_sound() {
        let header = r#"{"none":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},
            "one":{"dtype":"F64","shape":[],"data_offsets":[0,8]}}"#;
        assert_eq!(read(&file(header, 8)).unwrap().len(), 2);
    }

    #[test]
    fn ranges_cover_the_data_exactly() {
        assert_eq!(error(TWO, 40), "8 bytes after the last tensor belong to no tensor");
        assert_eq!(
            error(TWO, 31),
            "tensor \"b\" has the byte range 24..32, but only 31 bytes of data follow the header"
        );
        assert_eq!(
            error(&TWO.replace("[24,32]", "[20,28]"), 28),
            "the data of tensors \"a\" and \"b\" overlap"
        );
        assert_eq!(
            error(&TWO.replace("[24,32]", "[25,33]"), 33),
            "1 bytes between \"a\" and tensor \"b\" belong to no tensor"
        );
        assert_eq!(
            error(&TWO.replace("[24,32]", "[32,24]"), 32),
            "tensor \"b\" has the byte range 32..24, which ends before it begins"
        );
    }

    #[test]
    fn a_range_is_as_long_as_shape_and_type_ask_for() {
        assert_eq!(
            error(&TWO.replace("BF16", "F32"), 32),
            "tensor \"b\" has 8 bytes, which is not what F32[4] takes"
        );
        assert_eq!(
            error(&TWO.replace("[2,3]", "[4294967296,4294967296,4294967296]"), 32),
            "tensor \"a\" has 24 bytes, which is not what F32[4294967296, 4294967296, 4294967296] takes"
        );
    }

    #[test]
    fn other_files_are_told_by_what_they_are() {
        for (start, name) in [
            ("GGUF\u{3}", "GGUF"),
            ("version https://git-lfs.github.com/spec/v1", "Git LFS"),
            ("(\n  version: 7,", "a plan"),
            ("(\n  host: (", "a machine"),
        ] {
            let error = read(format!("{start:64}").as_bytes()).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains("safetensors"), "{error}");
        }
    }

    #[test]
    fn a_name_that_is_there_twice_is_refused() {
        assert_eq!(
            error(&TWO.replace("\"b\"", "\"a\""), 32),
            "malformed header: tensor \"a\" is there twice at line 3 column 64"
        );
    }

    #[test]
    fn a_malformed_entry_is_named() {
        assert_eq!(
            error(&TWO.replace("[2,3]", "[2,-3]"), 32),
            "malformed header: tensor \"a\": invalid value: integer `-3`, expected u64 at line 2 column 40"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(50_000))]

        /// Whatever single bytes say, the answer is tensors inside the file or an error of one line.
        #[test]
        fn a_mutated_header_never_panics(
            changes in prop::collection::vec((0..240usize, any::<u8>()), 1..6),
            length in 0..300usize,
        ) {
            let mut contents = file(TWO, 32);
            for (position, byte) in changes {
                if let Some(old) = contents.get_mut(position) {
                    *old = byte;
                }
            }
            contents.truncate(length.max(8));
            match read(&contents) {
                Ok(entries) => for entry in entries.values() {
                    prop_assert!(entry.offset + entry.bytes <= contents.len() as u64);
                },
                Err(error) => {
                    let line = format!("{error:#}");
                    prop_assert!(!line.contains('\n'));
                }
            }
        }

        /// The same for numbers that are chosen to be awkward.
        #[test]
        fn awkward_numbers_never_panic(
            numbers in prop::collection::vec(
                prop_oneof![0..40u64, Just(u64::MAX), Just(u64::MAX / 8), Just(1 << 32), Just(1 << 61)],
                7,
            ),
            data_bytes in 0..40usize,
        ) {
            let [a, b, c, d, e, f, g] = numbers[..] else { unreachable!() };
            let header = format!(
                r#"{{"a":{{"dtype":"F32","shape":[{a},{b}],"data_offsets":[{c},{d}]}},
                    "b":{{"dtype":"U8","shape":[{e}],"data_offsets":[{f},{g}]}}}}"#
            );
            if let Ok(entries) = read(&file(&header, data_bytes)) {
                let total: u64 = entries.values().map(|entry| entry.bytes).sum();
                prop_assert_eq!(total, data_bytes as u64);
            }
        }
    }
}
