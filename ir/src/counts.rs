//! How often a mixture's experts were chosen: what `hybrid-exec --count-experts` writes and `hybridc compile` reads.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::ron_text::{self, Version};

/// Raised whenever a field changes meaning.
pub const VERSION: u32 = 1;

/// Choices of the routers of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertCounts {
    /// [`VERSION`] of the executor that wrote it.
    pub version: u32,
    /// The model's name.
    pub model: String,
    /// For each router, by the name of its node, how often each expert was chosen, in the checkpoint's order.
    pub routers: BTreeMap<String, Vec<u64>>,
}

impl ExpertCounts {
    /// Adds a token's choice of an expert of `experts`; ids beyond them count for nothing.
    pub fn add(&mut self, router: &str, experts: usize, chosen: impl IntoIterator<Item = usize>) {
        // A name is copied once.
        if !self.routers.contains_key(router) {
            self.routers.insert(router.to_owned(), vec![0; experts]);
        }
        let Some(counts) = self.routers.get_mut(router) else { return };
        for expert in chosen {
            if let Some(count) = counts.get_mut(expert) {
                *count += 1;
            }
        }
    }

    /// Reads counts of this version.
    pub fn from_ron(text: &str) -> Result<Self> {
        ron_text::read(
            text,
            &Version {
                number: VERSION,
                subject: "the counts have",
                otherwise: "not counts of experts",
                remedy: "count again",
            },
            |counts: &Self| counts.version,
        )
    }

    /// Writes counts; the same counts give the same bytes.
    pub fn to_ron(&self) -> Result<String> {
        ron_text::write(self, 2)
    }
}
