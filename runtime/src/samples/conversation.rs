//! A conversation: who said what, and the tools that were offered.
//!
//! Both customs are read: `conversations` with `from`/`value` and `messages` with `role`/`content`. What a template sees
//! follows what a server does to a request, so that training renders a conversation as serving will: text parts are joined
//! by newlines, a missing content beside tool calls is empty, and tool arguments given as JSON text become objects.

use serde::Serialize;
use serde_json::{Map, Value};

use super::quarantine::Reason;

/// Who speaks, by the name that chat templates know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ChatRole {
    /// The operator's instructions.
    System,
    /// The operator's instructions, in templates that tell them from the system's.
    Developer,
    /// The person.
    User,
    /// The verifier; its words are what is trained.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl ChatRole {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "system" => Self::System,
            "developer" => Self::Developer,
            "user" | "human" => Self::User,
            "assistant" | "gpt" | "chatgpt" | "model" => Self::Assistant,
            "tool" | "function" | "observation" => Self::Tool,
            _ => return None,
        })
    }
}

/// One message, serialised under the names that chat templates look up; absent fields are left out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Message {
    /// Who speaks.
    pub role: ChatRole,
    /// The text.
    pub content: String,
    /// The thoughts before the text, for templates that call them so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same thoughts under their other name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// The tools called, a list as the template expects it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// Which call a tool's result belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the speaker or of the tool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of text only.
    pub fn new(role: ChatRole, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning_content: None,
            thinking: None,
            tool_calls: None,
            tool_call_id: None,
            name: None,
        }
    }
}

/// A conversation with at least one answer to an earlier message.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Its name in the file.
    pub id: Option<String>,
    /// What was said, in order.
    pub messages: Vec<Message>,
    /// The tools offered to the assistant: a list of JSON schemas.
    pub tools: Option<Value>,
}

impl Conversation {
    /// The `id` of a row, whether or not the rest of it is usable.
    pub(crate) fn id_of(row: &Value) -> Option<String> {
        match row.get("id")? {
            Value::String(id) => Some(id.clone()),
            Value::Number(id) => Some(id.to_string()),
            _ => None,
        }
    }

    /// Reads the conversation out of a row.
    ///
    /// # Errors
    /// With the reason for its quarantine if the row has another shape, an unknown role, or no answer.
    pub fn from_json(mut row: Value) -> Result<Self, Reason> {
        let id = Self::id_of(&row);
        let Value::Object(fields) = &mut row else {
            return Err(shape(format!("the row is {}, not an object", kind(&row))));
        };
        let key = ["conversations", "messages"]
            .into_iter()
            .find(|key| fields.contains_key(*key));
        let Some(key) = key else {
            return Err(shape(
                "the row has neither `conversations` nor `messages`".to_owned(),
            ));
        };
        let list = match fields.remove(key) {
            Some(Value::Array(list)) => list,
            other => {
                let found = other.as_ref().map_or("missing", kind);
                return Err(shape(format!("`{key}` is {found}, not a list of messages")));
            }
        };
        if list.is_empty() {
            return Err(Reason::Empty);
        }
        let messages = list
            .into_iter()
            .enumerate()
            .map(|(index, message)| message_from_json(index + 1, message))
            .collect::<Result<Vec<_>, _>>()?;
        if !messages
            .iter()
            .skip(1)
            .any(|message| message.role == ChatRole::Assistant)
        {
            return Err(Reason::NoAnswer);
        }
        let tools = tools_from_json(fields.remove("tools"))?;
        Ok(Self { id, messages, tools })
    }
}

fn shape(detail: String) -> Reason {
    Reason::Shape { detail }
}

/// A JSON type with its article.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn message_from_json(number: usize, message: Value) -> Result<Message, Reason> {
    let mut fields = match message {
        Value::Object(fields) => fields,
        other => {
            return Err(shape(format!(
                "message {number} is {}, not an object",
                kind(&other)
            )));
        }
    };
    let role = match fields.remove("from").or_else(|| fields.remove("role")) {
        Some(Value::String(name)) => ChatRole::parse(&name).ok_or(Reason::UnknownRole {
            message: number,
            role: name,
        })?,
        Some(other) => return Err(shape(format!("the role of message {number} is {}", kind(&other)))),
        None => return Err(shape(format!("message {number} has neither `from` nor `role`"))),
    };
    let tool_calls = tool_calls_from_json(number, fields.remove("tool_calls"))?;
    let reasoning = ["reasoning_content", "thinking", "reasoning"]
        .into_iter()
        .find_map(|key| text_field(&mut fields, key));
    let content = match fields.remove("value").or_else(|| fields.remove("content")) {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => join_parts(number, parts)?,
        None | Some(Value::Null) if tool_calls.is_some() || reasoning.is_some() => String::new(),
        None | Some(Value::Null) => return Err(shape(format!("message {number} has no content"))),
        Some(other) => {
            return Err(shape(format!(
                "the content of message {number} is {}",
                kind(&other)
            )));
        }
    };
    Ok(Message {
        role,
        content,
        reasoning_content: reasoning.clone(),
        thinking: reasoning,
        tool_calls,
        tool_call_id: text_field(&mut fields, "tool_call_id"),
        name: text_field(&mut fields, "name"),
    })
}

/// A field that holds some text; anything else counts as absent.
fn text_field(fields: &mut Map<String, Value>, key: &str) -> Option<String> {
    match fields.remove(key) {
        Some(Value::String(text)) if !text.is_empty() => Some(text),
        _ => None,
    }
}

fn join_parts(number: usize, parts: Vec<Value>) -> Result<String, Reason> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        match part {
            Value::String(text) => texts.push(text),
            Value::Object(mut part) => {
                let kind = part
                    .get("type")
                    .and_then(Value::as_str)
                    .unwrap_or("text")
                    .to_owned();
                match (kind.as_str(), part.remove("text")) {
                    ("text" | "input_text" | "output_text", Some(Value::String(text))) => texts.push(text),
                    _ => {
                        return Err(shape(format!(
                            "message {number} has a content part of type `{kind}`; only text is trained"
                        )));
                    }
                }
            }
            other => {
                return Err(shape(format!(
                    "message {number} has a content part that is {}",
                    kind(&other)
                )));
            }
        }
    }
    Ok(texts.join("\n"))
}

fn tool_calls_from_json(number: usize, calls: Option<Value>) -> Result<Option<Value>, Reason> {
    let mut calls = match calls {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(calls)) if calls.is_empty() => return Ok(None),
        Some(Value::Array(calls)) => calls,
        Some(other) => {
            return Err(shape(format!(
                "`tool_calls` of message {number} is {}, not a list",
                kind(&other)
            )));
        }
    };
    for call in &mut calls {
        let Value::Object(fields) = call else {
            return Err(shape(format!(
                "message {number} has a tool call that is {}",
                kind(call)
            )));
        };
        open_arguments(fields);
        if let Some(Value::Object(function)) = fields.get_mut("function") {
            open_arguments(function);
        }
    }
    Ok(Some(Value::Array(calls)))
}

/// Templates expect `arguments` as an object; the wire format of the OpenAI API has it as JSON text.
fn open_arguments(fields: &mut Map<String, Value>) {
    let Some(arguments) = fields.get_mut("arguments") else {
        return;
    };
    if let Value::String(text) = arguments
        && let Ok(opened @ Value::Object(_)) = serde_json::from_str(text)
    {
        *arguments = opened;
    }
}

fn tools_from_json(tools: Option<Value>) -> Result<Option<Value>, Reason> {
    let tools = match tools {
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text)
            .map_err(|error| shape(format!("`tools` is text that is no JSON: {error}")))?,
        None | Some(Value::Null) => return Ok(None),
        Some(other) => other,
    };
    match tools {
        Value::Null => Ok(None),
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(list) => Ok(Some(Value::Array(list))),
        other => Err(shape(format!("`tools` is {}, not a list", kind(&other)))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(row: Value) -> Result<Conversation, Reason> {
        Conversation::from_json(row)
    }

    #[test]
    fn both_customs_mean_the_same() {
        let sharegpt = json!({"id": 7, "conversations": [
            {"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]});
        let openai = json!({"id": "7", "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "b"}]});
        let one = read(sharegpt).expect("well formed");
        assert_eq!(one, read(openai).expect("well formed"));
        assert_eq!(one.id.as_deref(), Some("7"));
        assert_eq!(one.messages[1], Message::new(ChatRole::User, "a"));
    }

    #[test]
    fn parts_are_joined_by_newlines_and_images_are_refused() {
        let parts = |part: Value| {
            json!({"messages": [
            {"role": "user", "content": ["x", {"type": "text", "text": "y"}, part]},
            {"role": "assistant", "content": "b"}]})
        };
        assert_eq!(
            read(parts(json!({"text": "z"}))).expect("text only").messages[0].content,
            "x\ny\nz"
        );
        let refused =
            read(parts(json!({"type": "image_url", "image_url": {"url": "u"}}))).expect_err("image");
        assert_eq!(
            refused.to_string(),
            "message 1 has a content part of type `image_url`; only text is trained"
        );
    }

    #[test]
    fn tool_calls_keep_their_json_and_open_their_arguments() {
        let row = json!({"messages": [
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{\"z\": 1, \"a\": 2}"}}]},
            {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "w"},
            {"role": "assistant", "content": "sunny", "reasoning_content": "hm"}],
            "tools": "[{\"type\": \"function\"}]"});
        let conversation = read(row).expect("well formed");
        let call = &conversation.messages[1].tool_calls.as_ref().expect("calls")[0];
        assert_eq!(call["function"]["arguments"].to_string(), r#"{"z":1,"a":2}"#);
        assert_eq!(conversation.messages[1].content, "");
        assert_eq!(conversation.messages[2].tool_call_id.as_deref(), Some("c1"));
        assert_eq!(conversation.messages[3].thinking.as_deref(), Some("hm"));
        assert_eq!(conversation.tools, Some(json!([{"type": "function"}])));
    }

    #[test]
    fn every_wrong_shape_has_its_reason() {
        let answer = json!({"role": "assistant", "content": "b"});
        let cases = [
            (json!([1]), "the row is a list, not an object"),
            (
                json!({"text": "x"}),
                "the row has neither `conversations` nor `messages`",
            ),
            (
                json!({"messages": "x"}),
                "`messages` is a string, not a list of messages",
            ),
            (json!({"messages": []}), "the conversation has no messages"),
            (json!({"messages": [3]}), "message 1 is a number, not an object"),
            (
                json!({"messages": [{"content": "x"}]}),
                "message 1 has neither `from` nor `role`",
            ),
            (
                json!({"messages": [{"role": 1, "content": "x"}]}),
                "the role of message 1 is a number",
            ),
            (
                json!({"messages": [{"role": "user"}, answer]}),
                "message 1 has no content",
            ),
            (
                json!({"messages": [{"role": "user", "content": 4}]}),
                "the content of message 1 is a number",
            ),
            (
                json!({"messages": [answer]}),
                "no message is an assistant's answer to an earlier message",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x"}]}),
                "no message is an assistant's answer to an earlier message",
            ),
            (
                json!({"messages": [{"role": "owl", "content": "x"}]}),
                "message 1 has the unknown role `owl`; use system, user, assistant or tool",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x"}, answer], "tools": "{"}),
                "`tools` is text that is no JSON: EOF while parsing an object at line 1 column 1",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x", "tool_calls": 3}, answer]}),
                "`tool_calls` of message 1 is a number, not a list",
            ),
        ];
        for (row, expected) in cases {
            let shown = row.to_string();
            assert_eq!(read(row).expect_err(&shown).to_string(), expected, "{shown}");
        }
    }
}
