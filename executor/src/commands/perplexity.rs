//! `perplexity`: how well a plan predicts a list of token ids.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use executor::generation::GenerationOverrides;

use super::answer::print;
use super::session::Session;
use super::{PerplexityArguments, check_writable, npy};

pub(super) fn run(arguments: PerplexityArguments) -> Result<()> {
    check_writable(&arguments.logits)?;
    let ids = read_ids(&arguments.ids_file)?;
    let mut session =
        Session::open(&arguments.plan, &arguments.run, &GenerationOverrides::default(), false)?;
    let scored = session.engine.perplexity(&ids)?;
    session.write_records(None, None)?;
    if let Some(path) = &arguments.logits {
        command_line::write(path, &npy::encode(&scored.last_logits))?;
    }
    let result =
        json!({"tokens": scored.tokens, "nll": scored.nll, "perplexity": scored.perplexity()});
    print(&format!("{result}\n"))
}

/// Token ids from a JSON list, or from an object's `ids`.
fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let name = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("reading {name}"))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("{name} is not JSON"))?;
    let list = match &value {
        Value::Array(list) => list,
        Value::Object(object) => match object.get("ids") {
            Some(Value::Array(list)) => list,
            _ => bail!("{name} has no list of token ids under \"ids\""),
        },
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            bail!("{name} is neither a list of token ids nor an object with \"ids\"")
        }
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    list.iter()
        .map(|value| id(value).with_context(|| format!("{name}: {value} is no token id")))
        .collect()
}
