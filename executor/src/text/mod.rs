//! Text on its way into the model and out of it: tokens, conversations, and answers that are
//! shown while they grow.

mod parts;
pub mod stream;
pub mod template;
pub mod tokenizer;

pub use parts::NoTokenizer;
pub use stream::TextStream;
pub use template::{ChatRequest, message};
pub use tokenizer::Tokenizer;

#[cfg(test)]
mod tests;
