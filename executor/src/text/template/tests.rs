//! The constructs of published templates, each with what Jinja in Python makes of it.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn tokens() -> Map<String, Json> {
    let Json::Object(tokens) = json!({ "bos_token": "<s>", "eos_token": "</s>" }) else {
        unreachable!("an object is written here")
    };
    tokens
}

fn request(messages: &[Json]) -> ChatRequest {
    ChatRequest {
        messages: messages.to_vec(),
        add_generation_prompt: true,
        ..ChatRequest::default()
    }
}

fn render(template: &str, request: &ChatRequest) -> Result<String> {
    ChatTemplate::compile([(DEFAULT, template)])?.render(request, &tokens())
}

#[track_caller]
fn check(template: &str, request: &ChatRequest, expected: &str) {
    assert_eq!(render(template, request).unwrap(), expected);
}

/// What an expression prints, with `x` given.
#[track_caller]
fn prints(expression: &str, x: Json, expected: &str) {
    let request =
        ChatRequest { variables: [("x".to_owned(), x)].into_iter().collect(), ..request(&[]) };
    check(&format!("{{{{ {expression} }}}}"), &request, expected);
}

const LLAMA3: &str = include_str!("tests/llama3.jinja");

#[test]
fn llama3_with_tools_and_a_date() {
    let mut conversation = request(&[
        message("system", " Be <brief>. "),
        message("user", "How warm is Paris?"),
        json!({ "role": "assistant", "tool_calls": [
            { "function": { "name": "weather", "arguments": { "city": "Orléans", "days": 1 } } },
        ] }),
        message("tool", "21°"),
    ]);
    conversation.variables.insert("date_string".to_owned(), "26 Jul 2024".into());
    conversation.tools =
        Some(vec![json!({ "name": "weather", "parameters": {}, "strict": [true, 1.0] })]);
    let expected = "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n\
        Today Date: 26 Jul 2024\n\n{\n    \"name\": \"weather\",\n    \"parameters\": {},\n    \
        \"strict\": [\n        true,\n        1.0\n    ]\n}\n\nBe <brief>.<|eot_id|>\
        <|start_header_id|>user<|end_header_id|>\n\nHow warm is Paris?<|eot_id|>\
        <|start_header_id|>assistant<|end_header_id|>\n\n\
        {\"name\": \"weather\", \"parameters\": {\"city\": \"Orléans\", \"days\": 1}}<|eot_id|>\
        <|start_header_id|>ipython<|end_header_id|>\n\n\"21°\"<|eot_id|>\
        <|start_header_id|>assistant<|end_header_id|>\n\n";
    check(LLAMA3, &conversation, expected);
    assert!(render(LLAMA3, &request(&[message("user", "x")])).unwrap().contains("Today Date: "));
}

const QWEN: &str = include_str!("tests/qwen.jinja");

#[test]
fn qwen_with_thoughts_and_tool_answers() {
    let mut conversation = request(&[
        message("system", "S"),
        message("user", "Q"),
        message("assistant", "<think>\nold\n</think>\n\nA"),
        message("user", "R"),
        message("assistant", "<think>\nnew\n</think>\n\nB"),
        message("tool", "1"),
        message("tool", "2"),
    ]);
    conversation.tools = Some(vec![json!({ "a": "'<&>'" })]);
    conversation.variables.insert("enable_thinking".to_owned(), false.into());
    let expected = "<|im_start|>system\nS\n\n# Tools\n\n<tools>\n{\"a\": \"'<&>'\"}\n</tools>\n\n\
        {\"name\": <function-name>}<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n\
        <|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nR<|im_end|>\n\
        <|im_start|>assistant\n<think>\nnew\n</think>\n\nB<|im_end|>\n\
        <|im_start|>user\n<tool_response>\n1\n</tool_response>\n\
        <tool_response>\n2\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\n<think>\n\n</think>\n\n";
    check(QWEN, &conversation, expected);
}

const MISTRAL: &str = include_str!("tests/mistral.jinja");

#[test]
fn mistral_with_tools_and_strict_roles() {
    let mut conversation = request(&[
        message("system", "S"),
        message("user", "Q"),
        message("assistant", " A "),
        message("user", "R"),
    ]);
    let function = json!({ "name": "f", "parameters": { "type": "object" }, "return": 1 });
    conversation.tools = Some(vec![json!({ "type": "function", "function": function })]);
    let expected = "<s>[INST] Q[/INST] A</s>[AVAILABLE_TOOLS] [{\"type\": \"function\", \
        \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}}][/AVAILABLE_TOOLS]\
        [INST] S\n\nR[/INST]";
    check(MISTRAL, &conversation, expected);

    let twice = request(&[message("user", "Q"), message("user", "R")]);
    let error = format!("{:#}", render(MISTRAL, &twice).unwrap_err());
    assert_eq!(
        error,
        "the chat template cannot render the conversation: After the optional system message, \
         conversation roles must alternate user/assistant/user/assistant/..."
    );
}

#[test]
fn gemma_folds_the_system_message_into_the_first_turn() {
    let template = include_str!("tests/gemma.jinja");
    let parts = json!([{ "type": "text", "text": " Q " }]);
    let conversation = request(&[
        message("system", "S"),
        json!({ "role": "user", "content": parts }),
        message("assistant", "A\n"),
        message("user", "R"),
    ]);
    let expected = "<s><start_of_turn>user\nS\n\nQ<end_of_turn>\n<start_of_turn>model\nA<end_of_turn>\n\
        <start_of_turn>user\nR<end_of_turn>\n<start_of_turn>model\n";
    check(template, &conversation, expected);
}

#[test]
fn phi3_is_one_line_of_blocks() {
    let template = "{% for message in messages %}{% if message['role'] == 'system' %}\
        {{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}\
        {{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}\
        {{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}\
        {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}";
    let mut conversation = request(&[message("system", "S"), message("user", "Q")]);
    check(template, &conversation, "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n<|assistant|>\n");
    conversation.add_generation_prompt = false;
    check(template, &conversation, "<|system|>\nS<|end|>\n<|user|>\nQ<|end|>\n</s>");
}

#[test]
fn blocks_take_their_lines_away() {
    let template = "a\n  {% if true %}\n  b\n  {% endif %}\nc\n";
    check(template, &request(&[]), "a\n  b\nc");
}

#[test]
fn a_block_does_not_end_where_it_begins() {
    for source in ["{%}", "a{%}b%}", "{% generation{%}"] {
        assert!(render(source, &request(&[])).is_err(), "{source}");
    }
}

#[test]
fn generation_blocks_are_rendered_as_if_they_were_not_there() {
    let template = "{% for m in messages %}\n{% generation %}\n{{ m.content }}\n{%- endgeneration %}\n.\n{% endfor %}\n";
    check(template, &request(&[message("assistant", "A")]), "A.\n");
}

#[test]
fn loops_can_be_left_and_macros_called() {
    let template = "{% macro tag(x) %}<{{ x }}>{% endmacro %}{% for m in messages %}\
        {% if m.content == 'b' %}{% continue %}{% endif %}{% if m.content == 'd' %}{% break %}{% endif %}\
        {{ tag(m.content) }}{% endfor %}";
    let messages = ["a", "b", "c", "d", "e"].map(|content| message("user", content));
    check(template, &request(&messages), "<a><c>");
}

#[test]
fn values_print_as_in_python() {
    prints("x", json!(true), "True");
    prints("x", json!(null), "None");
    prints("y", json!(null), "");
    prints(
        "x",
        json!([1, 2.5, "a'b", null, { "k": "v\n" }]),
        r#"[1, 2.5, "a'b", None, {'k': 'v\n'}]"#,
    );
    prints("x", json!(1e20), "1e+20");
    prints("x", json!(1e-7), "1e-07");
    prints("x", json!(3.0), "3.0");
    prints("x|string + '.'", json!(false), "False.");
    prints(
        "x|tojson",
        json!({ "b": [], "a": "<é\u{1}\"\\'>" }),
        r#"{"b": [], "a": "<é\u0001\"\\'>"}"#,
    );
    prints(
        "x|tojson(sort_keys=true, separators=(',', ':'))",
        json!({ "b": {}, "a": 1 }),
        r#"{"a":1,"b":{}}"#,
    );
    prints("x|tojson(ensure_ascii=true)", json!("é🙂"), r#""\u00e9\ud83d\ude42""#);
    prints("x|tojson(indent=2)", json!({ "a": [] }), "{\n  \"a\": []\n}");
    prints("x.title() ~ x.strip('a') ~ x.replace('b', 'd')", json!("ab"), "Abbad");
    prints("x.get('k', 'none') ~ (x.items()|list|length)", json!({ "a": 1 }), "none1");
}

/// What an expression without variables prints, and that it is refused where `expected` is `None`.
#[track_caller]
fn evaluates(expression: &str, expected: Option<&str>) {
    let rendered = render(&format!("{{{{ {expression} }}}}"), &request(&[])).ok();
    assert_eq!(rendered.as_deref(), expected, "{expression}");
}

#[test]
fn tools_that_are_absent_are_not_iterable() {
    // From the template of Qwen3-Coder.
    let template = "{%- if tools is iterable and tools | length > 0 %}T{% else %}N{% endif %}";
    let mut conversation = request(&[]);
    check(template, &conversation, "N");
    conversation.tools = Some(Vec::new());
    check(template, &conversation, "N");
    conversation.tools = Some(vec![json!({})]);
    check(template, &conversation, "T");
}

#[test]
fn kinds_of_values_are_those_of_python() {
    let check = |test: &str, holds: &[&str], fails: &[&str]| {
        for (values, expected) in [(holds, "True"), (fails, "False")] {
            for value in values {
                evaluates(&format!("{value} is {test}"), Some(expected));
            }
        }
    };
    let values =
        ["'a'", "{}", "[]", "(1, 2)", "y", "[1, 2][1:]", "range(3)", "([1] + [2])", "'a'.split()"];
    check("iterable", &values, &["none", "5", "true", "range"]);
    check("iterable", &["['a']|map('upper')", "{}.keys()"], &[]);
    check("sequence", &values, &["none", "5", "true", "range"]);
    check("callable", &["range", "raise_exception", "y"], &["'a'", "{}", "[]", "none"]);
    evaluates("y|length ~ y|count ~ 'ab'|length", Some("002"));
    evaluates("none|length", None);
}

#[test]
fn filters_do_what_they_do_in_python() {
    evaluates("''|default('z') ~ y|d('z')", Some("z"));
    evaluates("''|default('z', true) ~ ''|default('z', boolean=true)", Some("zz"));
    evaluates("y|default(default_value='z') ~ 'a'|default('z', boolean=true)", Some("za"));
    evaluates("none|default('z')", Some("None"));
    evaluates("y|default(none)", Some("None"));
    evaluates("['a', none]|map('default', 'z', true)|list", Some("['a', 'z']"));
    evaluates("y|default('z', wrong=true)", None);
    evaluates("'x'|int ~ ' 12 '|int ~ '12.7'|int ~ []|int ~ none|int", Some("0121200"));
    evaluates("'x'|int(3) ~ 'x'|int(default=3) ~ 'ff'|int(base=16)", Some("33255"));
    evaluates("['1', 'x']|map('int')|list", Some("[1, 0]"));
    evaluates("[' 1.5 '|float, 'x'|float, 'x'|float(2.5)]", Some("[1.5, 0.0, 2.5]"));
    evaluates("'aaa'|replace('a', 'b', 2) ~ 'aaa'|replace('a', 'b', count=1)", Some("bbabaa"));
    evaluates("'aaa'|replace('a', 'b') ~ true|replace('T', 't')", Some("bbbtrue"));
}

#[test]
fn texts_have_the_methods_of_python() {
    evaluates("'a-b'.removeprefix('a-') ~ 'a-b'.removesuffix('-b')", Some("ba"));
    evaluates("'a-b'.removeprefix('q') ~ 'a-b'.removesuffix('q')", Some("a-ba-b"));
    evaluates("'a-b-c'.partition('-')", Some("('a', '-', 'b-c')"));
    evaluates("'a-b-c'.rpartition('-')", Some("('a-b', '-', 'c')"));
    evaluates("'a'.partition('q')", Some("('a', '', '')"));
    evaluates("'a'.rpartition('q')", Some("('', '', 'a')"));
    evaluates("'a-b-c'.rsplit('-', 1)", Some("['a-b', 'c']"));
    evaluates("'a-b-c'.rsplit('-', maxsplit=1)[0]", Some("a-b"));
    evaluates("'a-b-c'.rsplit('-')", Some("['a', 'b', 'c']"));
    evaluates("' a b  c '.rsplit()", Some("['a', 'b', 'c']"));
    evaluates("' a b  c '.rsplit(none, 1)", Some("[' a b', 'c']"));
    evaluates("'a-b-c'.split('-', maxsplit=1)", Some("['a', 'b-c']"));
    evaluates("'a-b'.split(sep='-') ~ ' a b  c '.split()", Some("['a', 'b']['a', 'b', 'c']"));
    evaluates("' a b  c '.split(none, 1)", Some("['a', 'b  c ']"));
    evaluates("'aéb-b'.index('b') ~ 'aéb-b'.rindex('b')", Some("24"));
    evaluates("'a'.index('q')", None);
    evaluates("'a-b-c'.ljust(7, '.') ~ 'é'.rjust(3)", Some("a-b-c..  é"));
    evaluates("'abcde'.center(8, '*') ~ 'ab'.center(5, '*')", Some("*abcde****ab*"));
    evaluates("'-7'.zfill(4) ~ 'ab'.zfill(4) ~ 'abc'.zfill(2)", Some("-00700ababc"));
    evaluates("'a'.ljust(10 ** 18)", None);
}

#[test]
fn lists_and_mappings_have_the_methods_of_python() {
    evaluates("{'a': 1}.copy() ~ [1].copy()", Some("{'a': 1}[1]"));
    evaluates("[1, 2].index(2)", Some("1"));
    evaluates("[1, 2].index(3)", None);
}

#[test]
fn all_line_ends_are_line_feeds() {
    let template = "a\r\n{% if true %}\r\nb\rc{% endif %}\r\n{{ 'd\r\ne' }}\r\n";
    check(template, &request(&[]), "a\nb\ncd\ne");
}

#[test]
fn the_time_is_written_as_c_does() {
    let request = request(&[]);
    let year = render("{{ strftime_now('%Y') }}", &request).unwrap();
    assert!((2024..3000).contains(&year.parse::<i32>().unwrap()), "{year}");
    check("{{ strftime_now('%%') }}", &request, "%");
}

#[test]
fn templates_may_have_names() {
    let folder = tempfile::tempdir().unwrap();
    let load = |config: Json| {
        ChatTemplate::load(folder.path(), config.as_object().unwrap()).map(Option::unwrap)
    };
    let named = json!({ "chat_template": [
        { "name": "default", "template": "plain" },
        { "name": "tool_use", "template": "tools" },
    ] });
    let template = load(named.clone()).unwrap();
    let mut conversation = request(&[]);
    assert_eq!(template.render(&conversation, &tokens()).unwrap(), "plain");
    conversation.tools = Some(Vec::new());
    assert_eq!(template.render(&conversation, &tokens()).unwrap(), "tools");

    let broken = load(json!({ "chat_template": "{% if %}" })).unwrap_err();
    assert!(format!("{broken:#}").starts_with("malformed chat template in "), "{broken:#}");

    std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(load(named).unwrap().render(&conversation, &tokens()).unwrap(), "file");
}

proptest! {
    #[test]
    fn no_message_makes_a_template_panic(
        role in "user|assistant|system|tool|[a-z<|>{%}]{0,4}",
        content in "(\\PC|[\n{}%|<>'\"\\\\]){0,40}",
        shape in 0..4,
        template in prop::sample::select(vec![LLAMA3, QWEN, MISTRAL]),
    ) {
        let content = match shape {
            0 => json!(content),
            1 => json!([{ "type": "text", "text": content }]),
            2 => json!(null),
            _ => json!({ content: 1.5 }),
        };
        let messages = [json!({ "role": role, "content": content }), message("user", "x")];
        if let Err(error) = render(template, &request(&messages)) {
            prop_assert!(!format!("{error:#}").contains('\n'), "{error:#}");
        }
    }

    #[test]
    fn no_source_makes_the_compiler_panic(source in "([{}%#a-z .'|\n-]|\\{% | %\\}|generation){0,40}") {
        let _ = render(&source, &request(&[message("user", "x")]));
    }

    #[test]
    fn tojson_is_json(text in "\\PC*", control in 0_u8..128) {
        let value = json!({ "a": [text, char::from(control).to_string(), -1, 0.1, true, null] });
        let variables = [("x".to_owned(), value.clone())].into_iter().collect();
        let rendered = render("{{ x|tojson }}", &ChatRequest { variables, ..request(&[]) }).unwrap();
        prop_assert_eq!(serde_json::from_str::<Json>(&rendered).unwrap(), value);
    }
}
