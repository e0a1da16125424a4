//! The layers of a configuration (cluster file, environment, `--set`), each value with the place it came from.
//!
//! A value of the wrong type or range is reported and left out, so that the checks that follow still see the rest.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use config::{Map, Source, Value, ValueKind};
use toml_edit::{Array, Document, InlineTable, Item, TableLike, Value as Toml};

use super::keys::{self, Kind};
use super::problem::{Place, Problem};

/// Environment variables that start so are read: `EAGLET__SECTION__KEY`.
pub(crate) const VARIABLE_PREFIX: &str = "EAGLET__";

/// Values of one layer by path; later layers win.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer(Map<String, Value>);

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, config::ConfigError> {
        Ok(self.0.clone())
    }
}

/// All layers that were read, and what was wrong with them.
pub(crate) struct Layers {
    file: String,
    /// Lowest first.
    pub(crate) layers: Vec<Layer>,
    /// Place of each path; a list also has one per element, as in `samples.files[1]`.
    places: BTreeMap<String, Place>,
    /// Paths whose value was left out.
    rejected: BTreeSet<String>,
    /// Length of each list of tables so far.
    lengths: BTreeMap<&'static str, usize>,
    /// What is wrong.
    pub(crate) problems: Vec<Problem>,
}

/// Turns the span of a value into its place.
enum Locator<'a> {
    Text { name: &'a str, text: &'a str },
    Fixed(Place),
}

impl Locator<'_> {
    fn place(&self, span: Option<Range<usize>>) -> Place {
        match self {
            Self::Fixed(place) => place.clone(),
            Self::Text { name, text } => {
                let line = span.and_then(|span| text.get(..span.start)).map_or(0, |before| {
                    1 + before.bytes().filter(|&byte| byte == b'\n').count()
                });
                Place::File {
                    name: (*name).to_owned(),
                    line,
                }
            }
        }
    }
}

impl Layers {
    pub(crate) fn new(file: &str) -> Self {
        Self {
            file: file.to_owned(),
            layers: Vec::new(),
            places: BTreeMap::new(),
            rejected: BTreeSet::new(),
            lengths: BTreeMap::new(),
            problems: Vec::new(),
        }
    }

    /// The place of a path, else of what it is part of, else the file.
    pub(crate) fn place(&self, path: &str) -> Place {
        let mut path = path;
        loop {
            if let Some(place) = self.places.get(path) {
                return place.clone();
            }
            match path.rfind(['.', '[']) {
                Some(end) => path = &path[..end],
                None => {
                    return Place::File {
                        name: self.file.clone(),
                        line: 0,
                    };
                }
            }
        }
    }

    /// Whether the value at a path, or what it is part of, was left out.
    pub(crate) fn is_rejected(&self, path: &str) -> bool {
        self.rejected.iter().any(|rejected| {
            path.strip_prefix(rejected.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        })
    }

    /// Number of tables in a list, such as `[[ranks]]`.
    pub(crate) fn length(&self, list: &str) -> usize {
        self.lengths.get(list).copied().unwrap_or(0)
    }

    /// Whether a value under a path was left out.
    pub(crate) fn has_rejected_under(&self, path: &str) -> bool {
        self.rejected.iter().any(|rejected| {
            rejected
                .strip_prefix(path)
                .is_some_and(|rest| rest.starts_with(['.', '[']))
        })
    }

    /// Counts everything as left out.
    pub(crate) fn reject_all(&mut self) {
        self.rejected
            .extend(keys::sections().into_iter().map(str::to_owned));
    }

    /// Counts the value at a path as left out.
    pub(crate) fn reject(&mut self, path: &str) {
        self.rejected.insert(path.to_owned());
    }

    /// Whether some layer gave a value for a path.
    pub(crate) fn is_set(&self, path: &str) -> bool {
        self.places.contains_key(path)
    }

    pub(crate) fn problem(&mut self, place: Place, message: impl Into<String>) {
        self.problems.push(Problem {
            place,
            message: message.into(),
        });
    }

    /// Reads the cluster file.
    pub(crate) fn read_file(&mut self, text: &str) {
        let name = self.file.clone();
        let locator = Locator::Text { name: &name, text };
        let document = match Document::parse(text) {
            Ok(document) => document,
            Err(error) => {
                let message = error.message().trim().replace('\n', "; ");
                self.reject_all();
                return self.problem(
                    locator.place(error.span()),
                    format!("is no valid TOML: {message}"),
                );
            }
        };
        let mut layer = Layer::default();
        for (name, item) in document.iter() {
            let span = document
                .key(name)
                .and_then(toml_edit::Key::span)
                .or_else(|| item.span());
            let place = locator.place(span);
            if !keys::sections().contains(&name) {
                let hint = keys::nearest_word(name, &keys::sections());
                let hint = hint
                    .map(|near| format!("; did you mean {}?", header(near)))
                    .unwrap_or_default();
                self.problem(place, format!("[{name}] is no section{hint}"));
            } else if let Some(list) = keys::list_named(name) {
                self.places.insert(name.to_owned(), place.clone());
                self.read_list(&mut layer, list, item, &locator, place);
            } else if let Some(table) = item.as_table_like() {
                self.places.insert(name.to_owned(), place);
                self.read_table(&mut layer.0, name, name, table, &locator);
            } else {
                self.rejected.insert(name.to_owned());
                self.problem(place, format!("{name} must be a section, written [{name}]"));
            }
        }
        self.layers.push(layer);
    }

    /// Reads the keys of a section, or of one table of a list; `path` is where they go, `schema` where they are described.
    fn read_table(
        &mut self,
        out: &mut Map<String, Value>,
        path: &str,
        schema: &str,
        table: &dyn TableLike,
        locator: &Locator<'_>,
    ) {
        for (name, item) in table.iter() {
            let span = table
                .key(name)
                .and_then(toml_edit::Key::span)
                .or_else(|| item.span());
            let place = locator.place(span);
            let path = format!("{path}.{name}");
            match (keys::find(&format!("{schema}.{name}")), item.as_value()) {
                (Some(key), Some(toml)) => {
                    if let Some(value) = self.convert(&path, key.kind, toml, place, locator) {
                        out.insert(path, value);
                    }
                }
                (Some(_), None) => {
                    self.rejected.insert(path.clone());
                    self.problem(place, format!("{path} is a key, not a section"));
                }
                (None, _) => self.unknown(&path, &format!("{schema}.{name}"), place),
            }
        }
    }

    fn convert(
        &mut self,
        path: &str,
        kind: Kind,
        toml: &Toml,
        place: Place,
        locator: &Locator<'_>,
    ) -> Option<Value> {
        self.places
            .retain(|known, _| !known.starts_with(&format!("{path}[")));
        if let Some(array) = toml.as_array() {
            for (index, item) in array.iter().enumerate() {
                self.places
                    .insert(format!("{path}[{index}]"), locator.place(item.span()));
            }
        }
        self.places.insert(path.to_owned(), place.clone());
        match kind.convert(path, toml) {
            Ok(value) => Some(value),
            Err(message) => {
                self.rejected.insert(path.to_owned());
                self.problem(place, message);
                None
            }
        }
    }

    /// Reads all tables of a list in a layer; they replace those of the layers below.
    fn read_list(
        &mut self,
        layer: &mut Layer,
        list: &'static str,
        item: &Item,
        locator: &Locator<'_>,
        place: Place,
    ) {
        let tables: Option<Vec<&dyn TableLike>> = match item {
            Item::ArrayOfTables(tables) => Some(tables.iter().map(|table| table as &dyn TableLike).collect()),
            Item::Value(Toml::Array(array)) => array
                .iter()
                .map(|value| {
                    value
                        .as_inline_table()
                        .map(|table: &InlineTable| table as &dyn TableLike)
                })
                .collect(),
            _ => None,
        };
        let Some(tables) = tables else {
            self.rejected.insert(list.to_owned());
            return self.problem(
                place,
                format!("{list} must be a list, each one written under [[{list}]]"),
            );
        };
        let spans: Vec<_> = match item {
            Item::ArrayOfTables(tables) => tables.iter().map(toml_edit::Table::span).collect(),
            Item::Value(Toml::Array(array)) => array.iter().map(Toml::span).collect(),
            _ => Vec::new(),
        };
        let elements = format!("{list}[");
        self.places.retain(|known, _| !known.starts_with(&elements));
        self.lengths.insert(list, tables.len());
        let mut read = Vec::new();
        for (index, (table, span)) in tables.into_iter().zip(spans).enumerate() {
            let path = format!("{list}[{index}]");
            let mut values = Map::new();
            self.places.insert(path.clone(), locator.place(span));
            self.read_table(&mut values, &path, list, table, locator);
            // Inside the list an element's keys stand without its path.
            let values = values
                .into_iter()
                .map(|(key, value)| (key[path.len() + 1..].to_owned(), value));
            read.push(Value::new(None, ValueKind::Table(values.collect())));
        }
        layer
            .0
            .insert(list.to_owned(), Value::new(None, ValueKind::Array(read)));
    }

    /// Reads `EAGLET__SECTION__KEY`; other variables are passed over.
    pub(crate) fn read_variable(&mut self, name: &str, value: &str) {
        if let Some(path) = name.strip_prefix(VARIABLE_PREFIX) {
            let path = path.to_lowercase().replace("__", ".");
            self.read_override(&path, value, Place::Variable(name.to_owned()));
        }
    }

    /// Reads `section.key=value`.
    pub(crate) fn read_flag(&mut self, text: &str) {
        let place = Place::Flag(text.to_owned());
        match text.split_once('=') {
            Some((path, value)) => self.read_override(path.trim(), value.trim(), place),
            None => self.problem(place, "must be written section.key=value"),
        }
    }

    fn read_override(&mut self, path: &str, value: &str, place: Place) {
        let mut layer = Layer::default();
        let locator = Locator::Fixed(place.clone());
        if let Some(list) = keys::list_named(path) {
            let item = parse(value).map_or(Item::None, Item::Value);
            self.places.insert(path.to_owned(), place.clone());
            self.read_list(&mut layer, list, &item, &locator, place);
            return self.layers.push(layer);
        }
        let of_list = keys::LISTS.into_iter().find(|list| path.starts_with(list));
        let (path, schema) = match of_list.map(|list| (list, element(list, path))) {
            Some((list, Some((index, name)))) if index < self.length(list) => {
                (format!("{list}[{index}].{name}"), format!("{list}.{name}"))
            }
            Some((list, Some((index, _)))) => {
                let length = self.length(list);
                return self.problem(
                    place,
                    format!("there is no {list}[{index}]; the cluster has {length} {list}"),
                );
            }
            Some((list, None)) => {
                let (one, key) = keys::example(list);
                return self.problem(
                    place,
                    format!("{path} names no {one}; write {list}[0].{key}, for example"),
                );
            }
            None => (path.to_owned(), path.to_owned()),
        };
        let Some(key) = keys::find(&schema) else {
            return self.unknown(&path, &schema, place);
        };
        let toml = bare(key.kind, value);
        if let Some(value) = self.convert(&path, key.kind, &toml, place, &locator) {
            layer.0.insert(path, value);
        }
        self.layers.push(layer);
    }

    fn unknown(&mut self, path: &str, schema: &str, place: Place) {
        if keys::sections().contains(&path) {
            return self.problem(place, format!("{path} is a section; name one of its keys"));
        }
        if let Some(remedy) = keys::remedy_for_gone(schema) {
            return self.problem(place, format!("{path} is no key any more; {remedy}"));
        }
        let hint = keys::nearest_key(schema)
            .map(|near| format!("; did you mean {near}?"))
            .unwrap_or_default();
        self.problem(place, format!("{path} is no key{hint}"));
    }
}

/// How a section is written.
fn header(section: &str) -> String {
    if keys::list_named(section).is_some() {
        format!("[[{section}]]")
    } else {
        format!("[{section}]")
    }
}

/// Index and key of a path into a list, like `ranks[1].threads`.
fn element<'a>(list: &str, path: &'a str) -> Option<(usize, &'a str)> {
    let (index, name) = path.strip_prefix(list)?.strip_prefix('[')?.split_once("].")?;
    Some((index.parse().ok()?, name))
}

/// A text as a single TOML value.
fn parse(text: &str) -> Option<Toml> {
    text.parse::<Toml>().ok()
}

/// A value from outside a file: TOML, but texts need no quotes and a list of one no brackets.
fn bare(kind: Kind, text: &str) -> Toml {
    let quoted = || Toml::from(text);
    match kind {
        kind if kind.is_text() => parse(text).filter(Toml::is_str).unwrap_or_else(quoted),
        Kind::Texts | Kind::Integers(..) if !text.starts_with('[') => {
            let mut array = Array::new();
            array.push(if matches!(kind, Kind::Texts) {
                bare(Kind::Text, text)
            } else {
                parse(text).unwrap_or_else(quoted)
            });
            Toml::Array(array)
        }
        _ => parse(text).unwrap_or_else(quoted),
    }
}
