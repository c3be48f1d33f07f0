//! Memory that finding the most likely tokens of a run takes on the GPU that has its logits.
//!
//! Lists of the most likely tokens among some are merged, several at a time, until each row has one.

use super::{aligned, product};

/// Tokens of a list: as many as samplers keep at most, with some to spare.
pub const LISTED_TOKENS: u32 = 128;
/// 32-bit words of a list: logits in falling order, then ids as floats, then what all tokens that it stands for weigh,
/// then nothing, up to a multiple of 16 bytes.
pub const LIST_WORDS: u32 = 2 * LISTED_TOKENS + 4;
/// Logits that one list is made of at first.
pub const LISTED_LOGITS: u32 = 4096;
/// Lists that are merged into one: they have as many tokens.
pub const MERGED_LISTS: u32 = LISTED_LOGITS / LISTED_TOKENS;
/// Logits of the longest row that is sent whole: a list would be a quarter of it.
const LONGEST_WHOLE: u32 = 1024;

/// Whether a row is long enough for a list to be worth making.
pub fn is_listed(vocabulary: u32) -> bool {
    vocabulary > LONGEST_WHOLE
}

/// Lists of a row after each launch; the last is 1.
pub fn levels(vocabulary: u32) -> Vec<u32> {
    let mut lists = vocabulary.div_ceil(LISTED_LOGITS).max(1);
    let mut levels = vec![lists];
    while lists > 1 {
        lists = lists.div_ceil(MERGED_LISTS);
        levels.push(lists);
    }
    levels
}

/// Bytes of the lists that one launch leaves.
pub fn level_bytes(rows: u32, lists: u32) -> u64 {
    aligned(product(&[rows, lists, LIST_WORDS], 4))
}

/// Bytes of all lists; they follow one another in the order of launches.
pub fn bytes(rows: u32, vocabulary: u32) -> u64 {
    if !is_listed(vocabulary) {
        return 0;
    }
    let levels = levels(vocabulary).into_iter();
    levels.map(|lists| level_bytes(rows, lists)).fold(0, u64::saturating_add)
}
