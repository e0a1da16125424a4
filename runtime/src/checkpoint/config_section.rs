//! Reading one object of a `config.json`, with errors that name the key by its full path.

use serde_json::{Map, Value};

/// A key of a `config.json` and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {problem}")]
pub struct ConfigError {
    /// The key, by its path: `transformer_layer_config.hidden_size`.
    pub key: String,
    /// What is wrong and what to do.
    pub problem: String,
}

/// An object of a `config.json`. Keys nobody asks for are ignored.
pub(super) struct Section<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Section<'a> {
    /// The whole file.
    pub(super) fn root(value: &'a Value) -> Result<Self, ConfigError> {
        match value.as_object() {
            Some(map) => Ok(Self {
                path: String::new(),
                map,
            }),
            None => Err(ConfigError {
                key: "{}".to_owned(),
                problem: "is needed: the file holds no object".to_owned(),
            }),
        }
    }

    /// An error at a key of this object.
    pub(super) fn error(&self, key: &str, problem: impl Into<String>) -> ConfigError {
        let key = if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        };
        ConfigError {
            key,
            problem: problem.into(),
        }
    }

    /// Whether the key is there and not null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        key: &str,
        kind: &str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => {
                // A long value would bury the message.
                let text: String = value.to_string().chars().take(60).collect();
                Err(self.error(key, format!("must be {kind}, but is {text}")))
            }
        }
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| self.error(key, "is missing"))
    }

    pub(super) fn optional_section(&self, key: &str) -> Result<Option<Section<'a>>, ConfigError> {
        let path = self.error(key, "").key;
        Ok(self
            .typed(key, "an object", Value::as_object)?
            .map(|map| Section { path, map }))
    }

    pub(super) fn section(&self, key: &str) -> Result<Section<'a>, ConfigError> {
        self.required(key, self.optional_section(key)?)
    }

    pub(super) fn optional_str(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.typed(key, "a text", Value::as_str)
    }

    pub(super) fn str(&self, key: &str) -> Result<&'a str, ConfigError> {
        self.required(key, self.optional_str(key)?)
    }

    pub(super) fn optional_bool(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub(super) fn optional_f64(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub(super) fn f64(&self, key: &str) -> Result<f64, ConfigError> {
        self.required(key, self.optional_f64(key)?)
    }

    /// A size: a whole number from 1 to 2^31, so that products of two fit anywhere.
    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        let size = |value: &Value| {
            let number = value.as_u64().filter(|number| (1..=1 << 31).contains(number))?;
            usize::try_from(number).ok()
        };
        self.typed(key, "a whole number from 1 to 2^31", size)
    }

    pub(super) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.required(key, self.optional_size(key)?)
    }

    pub(super) fn optional_id(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        self.typed(key, "an id of 32 bits", |value| {
            u32::try_from(value.as_u64()?).ok()
        })
    }

    /// One id or a list of ids.
    pub(super) fn ids(&self, key: &str) -> Result<Vec<u32>, ConfigError> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let ids = self.typed(key, "an id of 32 bits or a list of them", |value| {
            match value.as_array() {
                Some(list) => list.iter().map(id).collect(),
                None => Some(vec![id(value)?]),
            }
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// A list of texts; none if missing.
    pub(super) fn texts(&self, key: &str) -> Result<Vec<String>, ConfigError> {
        let texts = self.typed(key, "a list of texts", |value| {
            value
                .as_array()?
                .iter()
                .map(|text| text.as_str().map(str::to_owned))
                .collect::<Option<Vec<_>>>()
        })?;
        Ok(texts.unwrap_or_default())
    }

    /// The first object of a list.
    pub(super) fn first_of(&self, key: &str) -> Result<Section<'a>, ConfigError> {
        let path = format!("{}[0]", self.error(key, "").key);
        let map = self.typed(key, "a list that starts with an object", |value| {
            value.as_array()?.first()?.as_object()
        })?;
        Ok(Section {
            path,
            map: self.required(key, map)?,
        })
    }
}
