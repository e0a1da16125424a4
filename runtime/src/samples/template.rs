//! The verifier's own chat template.
//!
//! Rendered by minijinja under the rules that Hugging Face sets for Jinja2: `trim_blocks`, `lstrip_blocks`, loop controls,
//! Python's methods and printing, `raise_exception`, `strftime_now`, `tojson`, and `{% generation %}` as a plain block.
//! Rendering is a pure function of the conversation and of the date on which the template was loaded.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};
use serde_json::Value as Json;

use super::clock;
use super::conversation::Conversation;
use super::python;
use crate::digest::{Digest, Digester};
use crate::model_files::{
    CHAT_TEMPLATE as TEMPLATE_FILE, ModelFiles, ModelFilesError, TOKENIZER_CONFIG as CONFIG_FILE,
};

/// Special tokens that templates see under these names.
const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Why a chat template cannot be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The model has none.
    #[error(
        "{} has no chat template: no {TEMPLATE_FILE} and no `chat_template` in {CONFIG_FILE}; \
         take an instruction-tuned verifier or put its {TEMPLATE_FILE} there",
        folder.display()
    )]
    Missing {
        /// The model's folder.
        folder: PathBuf,
    },
    /// The GGUF file has none.
    #[error(
        "{} has no chat template: no metadata key `tokenizer.chat_template`; \
         take the GGUF file of an instruction-tuned verifier",
        file.display()
    )]
    MissingInGguf {
        /// The file.
        file: PathBuf,
    },
    /// A file exists but cannot be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// A file is no text.
    #[error("{} is no UTF-8 text; take the file from the verifier's repository again", file.display())]
    Encoding {
        /// The file.
        file: PathBuf,
    },
    /// The configuration is not what it should be.
    #[error("{}: {detail}; take the file from the verifier's repository again", file.display())]
    Config {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The template is no Jinja.
    #[error("{}: the chat template does not parse: {detail}; take the file from the verifier's repository again", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// What is wrong and on which line of the template.
        detail: String,
    },
    /// The template refused a conversation, or does something that is not supported.
    #[error("{detail}")]
    Render {
        /// What the template says.
        detail: String,
    },
}

/// A chat template that is ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, Value>,
    file: PathBuf,
    digest: Digest,
}

impl ChatTemplate {
    /// Loads the template of a model's folder; templates that ask for the date get today's (UTC).
    ///
    /// # Errors
    /// If there is none, or it cannot be read or parsed.
    pub fn load(folder: &Path) -> Result<Self, TemplateError> {
        Self::load_at(folder, clock::now_unix_s())
    }

    /// As [`Self::load`], of files that are open already.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(super) fn of_files(files: &ModelFiles) -> Result<Self, TemplateError> {
        Self::of_files_at(files, clock::now_unix_s())
    }

    /// The same with a given date, in seconds since 1970.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_at(folder: &Path, now_unix_s: u64) -> Result<Self, TemplateError> {
        let files = ModelFiles::open(folder).map_err(ModelFilesError::from)?;
        Self::of_files_at(&files, now_unix_s)
    }

    fn of_files_at(files: &ModelFiles, now_unix_s: u64) -> Result<Self, TemplateError> {
        let config_file = files.place(CONFIG_FILE);
        let config = match read(files, CONFIG_FILE)? {
            Some(text) => serde_json::from_str::<Json>(&text).map_err(|error| TemplateError::Config {
                file: config_file.clone(),
                detail: error.to_string(),
            })?,
            None => Json::Null,
        };
        let template_file = files.place(TEMPLATE_FILE);
        let (file, sources) = match read(files, TEMPLATE_FILE)? {
            Some(text) => (template_file, BTreeMap::from([(DEFAULT.to_owned(), text)])),
            None => {
                let sources = sources_of(&config)
                    .map_err(|detail| TemplateError::Config {
                        file: config_file.clone(),
                        detail,
                    })?
                    .ok_or_else(|| {
                        let path = files.path().to_owned();
                        match files.gguf() {
                            Some(_) => TemplateError::MissingInGguf { file: path },
                            None => TemplateError::Missing { folder: path },
                        }
                    })?;
                (config_file, sources)
            }
        };
        let special_tokens = SPECIAL_TOKENS
            .into_iter()
            .filter_map(|name| Some((name.to_owned(), special_token(config.get(name)?)?)))
            .collect();
        Self::new(file, sources, special_tokens, now_unix_s)
    }

    fn new(
        file: PathBuf,
        sources: BTreeMap<String, String>,
        special_tokens: BTreeMap<String, String>,
        now_unix_s: u64,
    ) -> Result<Self, TemplateError> {
        let mut digester = Digester::new();
        for (name, text) in sources.iter().chain(&special_tokens) {
            digester.part(name.as_bytes()).part(text.as_bytes());
        }
        let mut environment = environment(now_unix_s);
        for (name, source) in sources {
            environment
                .add_template_owned(name, open_generation_blocks(&source))
                .map_err(|error| TemplateError::Syntax {
                    file: file.clone(),
                    detail: one_line(&error),
                })?;
        }
        let special_tokens = special_tokens
            .into_iter()
            .map(|(name, token)| (name, Value::from(token)))
            .collect();
        Ok(Self {
            environment,
            special_tokens,
            file,
            digest: digester.finish(),
        })
    }

    /// The file the template came from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Digest of the template and of the special tokens it can see.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Prepares a conversation for being rendered in several lengths.
    pub fn begin<'a>(&'a self, conversation: &Conversation) -> Rendering<'a> {
        Rendering {
            template: self,
            messages: conversation.messages.iter().map(Value::from_serialize).collect(),
            tools: conversation.tools.as_ref().map(Value::from_serialize),
        }
    }
}

/// A conversation that is being rendered.
#[derive(Debug)]
pub struct Rendering<'a> {
    template: &'a ChatTemplate,
    messages: Vec<Value>,
    tools: Option<Value>,
}

impl Rendering<'_> {
    /// Renders the first `count` messages, with the beginning of an answer behind them if `add_generation_prompt`.
    ///
    /// # Errors
    /// What the template raises.
    pub fn render(&self, count: usize, add_generation_prompt: bool) -> Result<String, TemplateError> {
        let environment = &self.template.environment;
        let mut context = self.template.special_tokens.clone();
        // A slice is cheap: values are shared, not copied.
        let messages = self.messages[..count.min(self.messages.len())].to_vec();
        context.insert("messages".to_owned(), Value::from(messages));
        context.insert(
            "add_generation_prompt".to_owned(),
            Value::from(add_generation_prompt),
        );
        // Templates ask `tools is not none`, so absent ones must be none and not undefined.
        context.insert(
            "tools".to_owned(),
            self.tools.clone().unwrap_or_else(|| Value::from(())),
        );
        context.insert("documents".to_owned(), Value::from(()));
        let with_tools = self
            .tools
            .as_ref()
            .and_then(|_| environment.get_template(TOOL_USE).ok());
        with_tools
            .map_or_else(|| environment.get_template(DEFAULT), Ok)
            .and_then(|template| template.render(context))
            .map_err(|error| TemplateError::Render {
                detail: one_line(&error),
            })
    }
}

/// Reads a file that may be absent.
fn read(files: &ModelFiles, name: &str) -> Result<Option<String>, TemplateError> {
    let text = files.read(name)?.map(String::from_utf8).transpose();
    text.map_err(|_| TemplateError::Encoding {
        file: files.place(name),
    })
}

/// The named templates in `chat_template`, or `None` if there are none at all.
fn sources_of(config: &Json) -> Result<Option<BTreeMap<String, String>>, String> {
    let sources = match config.get("chat_template") {
        None | Some(Json::Null) => return Ok(None),
        Some(Json::String(text)) => return Ok(Some(BTreeMap::from([(DEFAULT.to_owned(), text.clone())]))),
        Some(Json::Array(list)) => list
            .iter()
            .map(|entry| {
                Some((
                    entry.get("name")?.as_str()?.to_owned(),
                    entry.get("template")?.as_str()?.to_owned(),
                ))
            })
            .collect::<Option<BTreeMap<_, _>>>()
            .ok_or("`chat_template` must be a list of objects with `name` and `template`")?,
        Some(_) => return Err("`chat_template` is neither a text nor a list of named templates".to_owned()),
    };
    if !sources.contains_key(DEFAULT) {
        let names: Vec<_> = sources.keys().map(String::as_str).collect();
        return Err(format!(
            "`chat_template` has no template named `default` (only: {})",
            names.join(", ")
        ));
    }
    Ok(Some(sources))
}

/// A special token, written as a text or as an object with its `content`.
fn special_token(token: &Json) -> Option<String> {
    token
        .as_str()
        .or_else(|| token.get("content")?.as_str())
        .map(str::to_owned)
}

fn environment(now_unix_s: u64) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(python::python_method);
    environment.set_formatter(|out, state, value| {
        if python::prints_differently(value) {
            out.write_str(&python::python_str(value)).map_err(Error::from)
        } else {
            minijinja::escape_formatter(out, state, value)
        }
    });
    environment.add_filter("tojson", python::tojson);
    environment.add_filter("string", |value: &Value| python::python_str(value));
    environment.add_filter("upper", |value: &Value| python::python_str(value).to_uppercase());
    environment.add_filter("lower", |value: &Value| python::python_str(value).to_lowercase());
    environment.add_filter("join", python::join);
    environment.add_filter("length", python::length);
    environment.add_filter("count", python::length);
    environment.add_test("iterable", python::is_iterable);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: String| {
        clock::strftime(&format, now_unix_s).ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now cannot format `{format}`"),
            )
        })
    });
    environment
}

/// Turns `{% generation %}`, a tag of Hugging Face's own that marks answers, into a block that does nothing.
fn open_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        let sign = usize::from(tag.starts_with(['-', '+']));
        let body = tag[sign..].trim_start();
        let skipped = tag.len() - body.len();
        let word_length = body
            .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .unwrap_or(body.len());
        let closes = body[word_length..]
            .trim_start()
            .trim_start_matches(['-', '+'])
            .starts_with("%}");
        let replacement = match &body[..word_length] {
            "generation" if closes => Some("if true"),
            "endgeneration" if closes => Some("endif"),
            _ => None,
        };
        out.push_str(&tag[..skipped]);
        match replacement {
            Some(word) => {
                out.push_str(word);
                rest = &body[word_length..];
            }
            None => rest = body,
        }
    }
    out.push_str(rest);
    out
}

/// An error of minijinja on one line.
fn one_line(error: &Error) -> String {
    let detail = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    let detail = detail.split_whitespace().collect::<Vec<_>>().join(" ");
    match error.line() {
        Some(line) => format!("{detail} (line {line} of the template)"),
        None => detail,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const CHATML: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}\
                          {% if add_generation_prompt %}<assistant>{% endif %}";

    fn conversation(row: Json) -> Conversation {
        Conversation::from_json(row).expect("well formed")
    }

    fn two_turns() -> Conversation {
        conversation(json!({"messages": [
            {"role": "user", "content": "  a <b>  "}, {"role": "assistant", "content": "c"}]}))
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("temporary folder");
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).expect("writable");
        }
        folder
    }

    fn render(source: &str, conversation: &Conversation) -> Result<String, String> {
        let folder = folder(&[(TEMPLATE_FILE, source)]);
        let template =
            ChatTemplate::load_at(folder.path(), 951_782_400).map_err(|error| error.to_string())?;
        template
            .begin(conversation)
            .render(usize::MAX, true)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_file_comes_before_the_configuration() {
        let config = json!({"chat_template": "config", "bos_token": {"content": "<s>"}, "eos_token": null})
            .to_string();
        let both = folder(&[
            (TEMPLATE_FILE, "{{ bos_token }}file{{ eos_token }}"),
            (CONFIG_FILE, &config),
        ]);
        let template = ChatTemplate::load(both.path()).expect("loads");
        assert_eq!(
            template.begin(&two_turns()).render(2, false).expect("renders"),
            "<s>file"
        );
        let one = folder(&[(CONFIG_FILE, &config)]);
        let other = ChatTemplate::load(one.path()).expect("loads");
        assert_eq!(
            other.begin(&two_turns()).render(2, false).expect("renders"),
            "config"
        );
        assert_ne!(template.digest(), other.digest());
        assert_eq!(
            other.digest(),
            ChatTemplate::load(one.path()).expect("loads").digest()
        );
    }

    #[test]
    fn of_named_templates_the_default_is_taken_and_tool_use_with_tools() {
        let config = json!({"chat_template": [
            {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]});
        let folder = folder(&[(CONFIG_FILE, &config.to_string())]);
        let template = ChatTemplate::load(folder.path()).expect("loads");
        let mut conversation = two_turns();
        assert_eq!(
            template.begin(&conversation).render(2, false).expect("renders"),
            "plain"
        );
        conversation.tools = Some(json!([{"type": "function"}]));
        assert_eq!(
            template.begin(&conversation).render(2, false).expect("renders"),
            "tools"
        );
    }

    #[test]
    fn what_is_missing_or_broken_is_named_with_a_remedy() {
        let load = |files: &[(&str, &str)]| {
            let folder = folder(files);
            let error = ChatTemplate::load(folder.path()).expect_err("broken").to_string();
            error.replace(&folder.path().display().to_string(), "MODEL")
        };
        assert_eq!(
            load(&[(CONFIG_FILE, "{}")]),
            "MODEL has no chat template: no chat_template.jinja and no `chat_template` in tokenizer_config.json; \
             take an instruction-tuned verifier or put its chat_template.jinja there"
        );
        assert!(load(&[]).starts_with("MODEL has no chat template"));
        assert!(load(&[(CONFIG_FILE, "{")]).starts_with("MODEL/tokenizer_config.json: EOF"));
        assert_eq!(
            load(&[(
                CONFIG_FILE,
                r#"{"chat_template": [{"name": "rag", "template": "x"}]}"#
            )]),
            "MODEL/tokenizer_config.json: `chat_template` has no template named `default` (only: rag); \
             take the file from the verifier's repository again"
        );
        let syntax = load(&[(TEMPLATE_FILE, "a\n{% if %}")]);
        assert!(
            syntax.starts_with("MODEL/chat_template.jinja: the chat template does not parse: "),
            "{syntax}"
        );
        assert!(syntax.contains("(line 2 of the template)"), "{syntax}");
        assert!(!syntax.contains('\n'), "{syntax}");
    }

    #[test]
    fn blocks_are_trimmed_as_hugging_face_does() {
        let source =
            "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\n";
        assert_eq!(render(source, &two_turns()).expect("renders"), "  a <b>  \nc\n");
        assert_eq!(
            render(CHATML, &two_turns()).expect("renders"),
            "<user>  a <b>  \n<assistant>c\n<assistant>"
        );
    }

    #[test]
    fn python_is_spoken() {
        let row = json!({"messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes", "tool_calls": [
                {"function": {"name": "f", "arguments": "{\"b\": 1.0, \"a\": [\"x\"]}"}}]}],
            "tools": [{"z": 1, "a": {"k": "<é>"}}]});
        for (source, expected) in [
            ("{{ tools | tojson }}", r#"[{"z": 1, "a": {"k": "<é>"}}]"#),
            (
                "{{ messages[1].tool_calls[0].function.arguments | tojson(indent=1) }}",
                "{\n \"b\": 1.0,\n \"a\": [\n  \"x\"\n ]\n}",
            ),
            (
                "{{ true }}{{ none }}{{ 1.0 }}{{ messages[0] }}",
                "TrueNone1.0{'role': 'user', 'content': 'q'}",
            ),
            ("{{ (true | string) + '!' }}", "True!"),
            (
                "{{ messages[1].content.split('</think>')[-1].lstrip('\\n') }}",
                "yes",
            ),
            (
                "{{ messages[1]['content'].split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') }}",
                "hm",
            ),
            (
                "{{ messages[::-1][0].role }}{{ messages[1:] | length }}",
                "assistant1",
            ),
            (
                "{{ messages[0].get('x', 'none') }}{{ messages[0].get('x') is none }}",
                "noneTrue",
            ),
            (
                "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
                "role=user;content=q;",
            ),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "2",
            ),
            (
                "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
                "user",
            ),
            (
                "{% macro f(x, y=2) %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}",
                "12",
            ),
            ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2000"),
            (
                "{{ tools is not none }}{{ documents is none }}{{ nothing is defined }}{{ nothing }}",
                "TrueTrueFalse",
            ),
            (
                "{{ 'tool_calls' in messages[0] }}{{ messages[1].tool_calls is defined }}",
                "FalseTrue",
            ),
            (
                "{%- generation -%} x {%- endgeneration -%}|{% generation %}y{% endgeneration %}",
                "x|y",
            ),
            (
                "{{ 'abc'.removeprefix('a').removesuffix('c') }}{{ 'a=b'.partition('=')[2] }}",
                "bb",
            ),
            (
                "{{ messages[0].content is string and messages is iterable and messages[0] is mapping }}",
                "True",
            ),
            (
                "{{ tools is iterable }}{{ nothing | length }}{{ none is iterable }}",
                "True0False",
            ),
            (
                "{{ ['a', none] | upper }}{{ [1.0, true] | join('-') }}",
                "['A', NONE]1.0-True",
            ),
            (
                "{{ messages | map(attribute='role') | join(',') }}{{ 'x' if false }}",
                "user,assistant",
            ),
            (
                "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
                "1",
            ),
            (
                "{{ 'ab'[0] }}{{ 'abc'[1:] }}{{ 'A b' | lower | trim }}{{ 'a' ~ 1 }}",
                "abca ba1",
            ),
        ] {
            assert_eq!(
                render(source, &conversation(row.clone())).as_deref(),
                Ok(expected),
                "{source}"
            );
        }
    }

    #[test]
    fn what_a_template_raises_is_one_line() {
        let raised = render("a\n{{ raise_exception('no system\nrole') }}", &two_turns());
        assert_eq!(
            raised.expect_err("raises"),
            "no system role (line 2 of the template)"
        );
        let unknown = render("{{ no_such_function() }}", &two_turns()).expect_err("unknown");
        assert!(unknown.contains("no_such_function"), "{unknown}");
    }
}
