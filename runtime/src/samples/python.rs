//! What Python would print: chat templates are written for Jinja2, and their output is part of what a model was trained on.
//!
//! `{{ true }}` is `True`, a list is printed by its `repr`, and `tojson` is `json.dumps` with its blanks after `,` and `:`
//! (Hugging Face overrides Jinja2's HTML-safe one). minijinja prints all three in another way. What is left of the
//! difference: the operator `~` joins anything but texts and whole numbers as minijinja prints it.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use serde_json::Value as Json;

/// `str(value)`; an undefined value is empty, as in Jinja2.
pub(crate) fn python_str(value: &Value) -> String {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => write_repr(&mut out, value),
    }
    out
}

/// Whether Python prints the value in another way than minijinja does.
pub(crate) fn prints_differently(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Bool | ValueKind::None | ValueKind::Seq | ValueKind::Map => true,
        ValueKind::Number => !value.is_integer(),
        _ => false,
    }
}

fn write_repr(out: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&python_float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::String => write_string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &item);
            }
            out.push(']');
        }
        // Namespaces and the like are maps too, but no template prints them.
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &key);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default());
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn write_string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => {
                out.push('\\');
                out.push(quote);
            }
            _ if character.is_control() => {
                let _ = write!(out, "\\x{:02x}", character as u32);
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}

/// `repr` of a float: shortest digits that read back, fixed from 1e-4 to below 1e16.
fn python_float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() {
            "nan"
        } else if number > 0.0 {
            "inf"
        } else {
            "-inf"
        }
        .to_owned();
    }
    let scientific = format!("{number:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number == 0.0 || (-4..16).contains(&exponent) {
        return format!("{number:?}").replace("e16", "");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

/// How `json.dumps` writes.
struct JsonStyle {
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// The filter `tojson` as Hugging Face defines it: `json.dumps` with `ensure_ascii=False` unless told otherwise.
pub(crate) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "an undefined value cannot be written as JSON",
        ));
    }
    let json = serde_json::to_value(value).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("the value cannot be written as JSON: {error}"),
        )
    })?;
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let (item_separator, key_separator) = match separators {
        Some(separators) => <[String; 2]>::try_from(separators)
            .map(|[item, key]| (item, key))
            .map_err(|_| {
                Error::new(
                    ErrorKind::InvalidOperation,
                    "`separators` of tojson must be two strings",
                )
            })?,
        None => (
            if indent.is_some() { "," } else { ", " }.to_owned(),
            ": ".to_owned(),
        ),
    };
    let style = JsonStyle {
        indent,
        item_separator,
        key_separator,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    style.write(&mut out, &json, 0);
    Ok(Value::from(out))
}

impl JsonStyle {
    fn write(&self, out: &mut String, json: &Json, level: usize) {
        match json {
            Json::Null => out.push_str("null"),
            Json::Bool(true) => out.push_str("true"),
            Json::Bool(false) => out.push_str("false"),
            Json::Number(number) => match number.as_f64() {
                Some(float) if number.is_f64() => out.push_str(&python_float(float)),
                _ => out.push_str(&number.to_string()),
            },
            Json::String(text) => self.write_string(out, text),
            Json::Array(items) if items.is_empty() => out.push_str("[]"),
            Json::Array(items) => {
                out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.begin_item(out, index, level + 1);
                    self.write(out, item, level + 1);
                }
                self.break_line(out, level);
                out.push(']');
            }
            Json::Object(fields) if fields.is_empty() => out.push_str("{}"),
            Json::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by_key(|(key, _)| *key);
                }
                out.push('{');
                for (index, (key, value)) in fields.into_iter().enumerate() {
                    self.begin_item(out, index, level + 1);
                    self.write_string(out, key);
                    out.push_str(&self.key_separator);
                    self.write(out, value, level + 1);
                }
                self.break_line(out, level);
                out.push('}');
            }
        }
    }

    fn begin_item(&self, out: &mut String, index: usize, level: usize) {
        if index > 0 {
            out.push_str(&self.item_separator);
        }
        self.break_line(out, level);
    }

    fn break_line(&self, out: &mut String, level: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    fn write_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if character < ' ' || (self.ensure_ascii && !character.is_ascii()) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

/// The filter `join`, which prints what it joins as Python does.
pub(crate) fn join(values: &Value, separator: Option<&str>) -> Result<String, Error> {
    let texts: Vec<String> = values.try_iter()?.map(|value| python_str(&value)).collect();
    Ok(texts.join(separator.unwrap_or_default()))
}

/// The filter `length`; something undefined has none, as in Jinja2.
pub(crate) fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("a {} has no length", value.kind()),
        )),
    }
}

/// The test `iterable`: to minijinja `none` is iterable, to Python it is not, and templates ask this of absent tools.
pub(crate) fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Methods of Python's strings that `minijinja-contrib` lacks; the others are passed on to it.
pub(crate) fn python_method(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let (Some(text), [argument]) = (value.as_str(), arguments) else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments);
    };
    match (method, argument.as_str()) {
        ("removeprefix", Some(prefix)) => Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text))),
        ("removesuffix", Some(suffix)) => Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text))),
        ("partition", Some(separator)) if !separator.is_empty() => {
            let (before, between, after) = match text.split_once(separator) {
                Some((before, after)) => (before, separator, after),
                None => (text, "", ""),
            };
            Ok([before, between, after].into_iter().map(Value::from).collect())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Every expected text below is what CPython 3.11 prints.
    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (number, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (-2.5, "-2.5"),
            (1e22, "1e+22"),
            (5e-324, "5e-324"),
            (f64::MAX, "1.7976931348623157e+308"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(python_float(number), expected);
        }
    }

    #[test]
    fn values_are_printed_by_their_repr() {
        let json = serde_json::json!({"a": true, "b": null, "c": [1, 2.0, "x'y", "q\"", "\n"]});
        let value = Value::from_serialize(json);
        assert_eq!(
            python_str(&value),
            r#"{'a': True, 'b': None, 'c': [1, 2.0, "x'y", 'q"', '\n']}"#
        );
        assert_eq!(python_str(&Value::UNDEFINED), "");
        assert_eq!(python_str(&Value::from("it's")), "it's");
    }

    #[test]
    fn json_is_written_as_json_dumps_writes_it() {
        let json = serde_json::json!({"z": [1, {"b": null}], "c": [], "d": {}, "e": "é\"\n\u{1}\u{7f}😀<&>"});
        let value = Value::from_serialize(&json);
        let filter = |options: &[(&str, Value)]| {
            let options = options
                .iter()
                .map(|(key, value)| (*key, value.clone()))
                .collect::<Kwargs>();
            tojson(&value, options).expect("writable").to_string()
        };
        assert_eq!(
            filter(&[]),
            "{\"z\": [1, {\"b\": null}], \"c\": [], \"d\": {}, \"e\": \"é\\\"\\n\\u0001\u{7f}😀<&>\"}"
        );
        assert_eq!(
            filter(&[("indent", Value::from(2))]),
            "{\n  \"z\": [\n    1,\n    {\n      \"b\": null\n    }\n  ],\n  \"c\": [],\n  \"d\": {},\n  \
             \"e\": \"é\\\"\\n\\u0001\u{7f}😀<&>\"\n}"
        );
        assert_eq!(
            filter(&[
                ("ensure_ascii", Value::from(true)),
                ("sort_keys", Value::from(true)),
                ("separators", Value::from(vec![",", ":"])),
            ]),
            "{\"c\":[],\"d\":{},\"e\":\"\\u00e9\\\"\\n\\u0001\u{7f}\\ud83d\\ude00<&>\",\"z\":[1,{\"b\":null}]}"
        );
        assert!(tojson(&Value::UNDEFINED, std::iter::empty::<(&str, Value)>().collect()).is_err());
    }
}
