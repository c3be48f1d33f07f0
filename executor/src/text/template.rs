//! A conversation as one prompt, rendered by the checkpoint's chat template as transformers
//! renders it: Jinja in Python.
//!
//! What differs between Jinja in Python and minijinja is made up for here: methods of Python
//! values, how values print, filters and tests, `raise_exception`, `strftime_now`, line ends and
//! the `generation` block. Not made up for are the operators `%` on texts and `+` before a number.

mod filters;
mod methods;
mod python;

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value as Json, json};

/// A conversation to be rendered.
#[derive(Clone, Debug, Default)]
pub struct ChatRequest {
    /// Objects with `role` and `content`, and whatever else the template reads.
    pub messages: Vec<Json>,
    /// Functions the model may call, as JSON schemas.
    pub tools: Option<Vec<Json>>,
    /// Whether the prompt ends where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Map<String, Json>,
}

impl ChatRequest {
    /// A conversation that the assistant is to continue.
    #[must_use]
    pub fn to_answer(messages: Vec<Json>) -> Self {
        Self { messages, add_generation_prompt: true, ..Self::default() }
    }
}

/// A message of a conversation; `role` is mostly `system`, `user` or `assistant`.
#[must_use]
pub fn message(role: &str, content: &str) -> Json {
    json!({ "role": role, "content": content })
}

/// A checkpoint's chat templates, compiled.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
}

const DEFAULT: &str = "default";
const WITH_TOOLS: &str = "tool_use";

impl ChatTemplate {
    /// Reads `chat_template.jinja`, else the `chat_template` of `tokenizer_config.json`, else
    /// that of `chat_template.json`.
    pub(super) fn load(folder: &Path, config: &Map<String, Json>) -> Result<Option<Self>> {
        let file = folder.join("chat_template.jinja");
        if file.is_file() {
            let source = std::fs::read_to_string(&file)
                .with_context(|| format!("cannot read chat template {}", file.display()))?;
            return Self::compile([(DEFAULT, source.as_str())])
                .with_context(|| format!("malformed chat template {}", file.display()))
                .map(Some);
        }
        let inside = folder.join("tokenizer_config.json");
        let older = folder.join("chat_template.json");
        let outside = super::tokenizer::read_object(&older)?;
        let found = [(inside, config), (older, &outside)]
            .into_iter()
            .find_map(|(path, file)| Some((path, file.get("chat_template")?)));
        let Some((path, template)) = found else { return Ok(None) };
        let name =
            |entry: &'_ Json, key: &str| entry.get(key).and_then(Json::as_str).map(str::to_owned);
        let compiled = match template {
            Json::Null => return Ok(None),
            Json::String(source) => Self::compile([(DEFAULT, source.as_str())]),
            Json::Array(entries) => entries
                .iter()
                .map(|entry| Some((name(entry, "name")?, name(entry, "template")?)))
                .collect::<Option<Vec<_>>>()
                .context("an entry of the list lacks its name or its template")
                .and_then(|named| {
                    Self::compile(
                        named.iter().map(|(name, source)| (name.as_str(), source.as_str())),
                    )
                }),
            Json::Object(named) => Self::compile(
                named.iter().filter_map(|(name, source)| Some((name.as_str(), source.as_str()?))),
            ),
            Json::Bool(_) | Json::Number(_) => Err(anyhow!("it is neither text nor a list")),
        };
        compiled.with_context(|| format!("malformed chat template in {}", path.display())).map(Some)
    }

    /// Compiles templates by name.
    fn compile<'a>(templates: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()
                .expect("the default delimiters are valid"),
        );
        environment.set_unknown_method_callback(methods::call);
        environment.set_formatter(|output, _, value| {
            output.write_str(&python::text(value)).map_err(Error::from)
        });
        filters::add(&mut environment);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", python::strftime_now);
        for (name, source) in templates {
            let source = without_generation_blocks(&with_plain_line_ends(source));
            environment.add_template_owned(name.to_owned(), source)?;
        }
        Ok(Self { environment })
    }

    /// Renders a conversation; `special_tokens` become variables of the template.
    ///
    /// # Errors
    ///
    /// When the template refuses the conversation, in its words.
    pub(super) fn render(
        &self,
        request: &ChatRequest,
        special_tokens: &Map<String, Json>,
    ) -> Result<String> {
        let with_tools = request.tools.as_ref().map(|_| WITH_TOOLS);
        let template = with_tools
            .into_iter()
            .chain([DEFAULT])
            .find_map(|name| self.environment.get_template(name).ok());
        let Some(template) = template else {
            bail!("the tokenizer has several chat templates, none of which is the default");
        };
        let list = |items: &[Json]| items.iter().map(python::value).collect::<Vec<_>>();
        let own = [
            ("messages", Value::from(list(&request.messages))),
            ("tools", request.tools.as_deref().map_or(Value::from(()), |tools| list(tools).into())),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(request.add_generation_prompt)),
        ];
        let given = special_tokens
            .iter()
            .chain(&request.variables)
            .map(|(name, item)| (name.as_str(), python::value(item)));
        template
            .render(Value::from_pairs(own.into_iter().chain(given)))
            .map_err(|error| refusal(&error))
            .context("the chat template cannot render the conversation")
    }
}

fn refusal(error: &Error) -> anyhow::Error {
    match (error.kind(), error.detail(), error.line()) {
        (ErrorKind::InvalidOperation, Some(detail), _) => anyhow!("{detail}"),
        (_, _, Some(line)) => anyhow!("line {line}: {error}"),
        _ => anyhow!("{error}"),
    }
}

/// The source with every line ended by a line feed alone, in texts between quotes too.
fn with_plain_line_ends(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

/// The source with its `generation` blocks, which only mark what the assistant said, turned
/// into blocks that are always rendered, so that the rules of white space still see a block.
fn without_generation_blocks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let first = start + 2;
        let Some(end) = rest[first..].find("%}").map(|length| first + length) else { break };
        let inside = &rest[first..end];
        let signs =
            |character: char| character == '-' || character == '+' || character.is_whitespace();
        let replaced = match inside.trim_matches(signs) {
            word @ "generation" => inside.replace(word, "if true"),
            word @ "endgeneration" => inside.replace(word, "endif"),
            _ => inside.to_owned(),
        };
        text.push_str(&rest[..first]);
        text.push_str(&replaced);
        text.push_str("%}");
        rest = &rest[end + 2..];
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests;
