//! Writes GGUF files (version 3).

use super::quantise::Storage;

/// Alignment of the data.
const ALIGNMENT: usize = 32;

/// A file about to be written.
#[derive(Clone, Default)]
pub(crate) struct Writer {
    metadata: Vec<(String, Vec<u8>)>,
    tensors: Vec<Tensor>,
}

#[derive(Clone)]
struct Tensor {
    name: String,
    shape: Vec<usize>,
    number: u32,
    bytes: Vec<u8>,
}

/// Length and bytes.
fn text(value: &str) -> Vec<u8> {
    [&(value.len() as u64).to_le_bytes(), value.as_bytes()].concat()
}

impl Writer {
    /// A file of this architecture.
    pub(crate) fn new(architecture: &str) -> Self {
        let mut writer = Self::default();
        writer.text("general.architecture", architecture);
        writer
    }

    /// Adds a metadata entry: the number of its type and its value's bytes.
    pub(crate) fn entry(&mut self, key: &str, number: u32, value: &[u8]) {
        let entry = [&number.to_le_bytes(), value].concat();
        self.metadata.push((key.to_owned(), entry));
    }

    pub(crate) fn text(&mut self, key: &str, value: &str) {
        self.entry(key, 8, &text(value));
    }

    pub(crate) fn u32(&mut self, key: &str, value: usize) {
        self.entry(key, 4, &(value as u32).to_le_bytes());
    }

    pub(crate) fn f32(&mut self, key: &str, value: f64) {
        self.entry(key, 6, &(value as f32).to_le_bytes());
    }

    pub(crate) fn flag(&mut self, key: &str, value: bool) {
        self.entry(key, 7, &[value.into()]);
    }

    fn array(&mut self, key: &str, number: u32, elements: &[Vec<u8>]) {
        let count = elements.len() as u64;
        let value = [
            &number.to_le_bytes()[..],
            &count.to_le_bytes(),
            &elements.concat(),
        ]
        .concat();
        self.entry(key, 9, &value);
    }

    pub(crate) fn texts(&mut self, key: &str, values: &[impl AsRef<str>]) {
        let elements: Vec<_> = values.iter().map(|value| text(value.as_ref())).collect();
        self.array(key, 8, &elements);
    }

    pub(crate) fn i32s(&mut self, key: &str, values: &[i32]) {
        let elements: Vec<_> = values.iter().map(|value| value.to_le_bytes().to_vec()).collect();
        self.array(key, 5, &elements);
    }

    pub(crate) fn f32s(&mut self, key: &str, values: &[f32]) {
        let elements: Vec<_> = values.iter().map(|value| value.to_le_bytes().to_vec()).collect();
        self.array(key, 6, &elements);
    }

    pub(crate) fn flags(&mut self, key: &str, values: &[bool]) {
        let elements: Vec<_> = values.iter().map(|&value| vec![value.into()]).collect();
        self.array(key, 7, &elements);
    }

    /// Adds a tensor, shape outermost first, stored as `storage` or as the nearest that its rows can be stored as.
    pub(crate) fn tensor(&mut self, name: &str, shape: &[usize], values: &[f32], storage: Storage) {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let storage = storage.for_rows_of(shape.last().copied().unwrap_or(1));
        self.stored(name, shape, storage.number(), storage.store(values));
    }

    /// Adds a tensor as it is.
    pub(crate) fn stored(&mut self, name: &str, shape: &[usize], number: u32, bytes: Vec<u8>) {
        self.tensors.push(Tensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
            number,
            bytes,
        });
    }

    /// The header, up to the data, with these offsets of tensors.
    fn header(&self, offsets: &[u64]) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, entry) in &self.metadata {
            out.extend(text(key));
            out.extend(entry);
        }
        for (tensor, offset) in self.tensors.iter().zip(offsets) {
            out.extend(text(&tensor.name));
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            for &dimension in tensor.shape.iter().rev() {
                out.extend((dimension as u64).to_le_bytes());
            }
            out.extend(tensor.number.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out
    }

    /// The file.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut offsets = Vec::new();
        let mut data = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(ALIGNMENT), 0);
            offsets.push(data.len() as u64);
            data.extend(&tensor.bytes);
        }
        let mut out = self.header(&offsets);
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(data);
        out
    }

    /// The file, with offsets that are said and not kept.
    pub(crate) fn bytes_with_offsets(&self, offsets: &[u64]) -> Vec<u8> {
        let honest = self.bytes();
        let header = self.header(offsets);
        [&header, &honest[header.len()..]].concat()
    }
}
