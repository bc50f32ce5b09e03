//! Where each tensor will lie, known before the first byte is written.

use std::collections::{BTreeMap, HashSet};

use serde_json::json;
use tch::Tensor;

use super::manifest::{self, Scalar, TensorEntry};
use crate::data::dtype;
use crate::error::{Error, Result};
use crate::state::{Sink, Value, strides_of};

/// Parameters and buffers under their plain names: what PyTorch calls a state dict.
pub(super) const MODEL: &str = "model.safetensors";
/// The optimizer's state.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
/// Everything else.
pub(super) const TRAINING: &str = "training.safetensors";

/// Prefixes of a state's names, the file that they go to, and whether the prefix stays.
const FILES: &[(&str, &str)] = &[("parameters.", MODEL), ("buffers.", MODEL), ("optimizer.", OPTIMIZER)];

/// Takes names, shapes and scalars.
#[derive(Default)]
pub(super) struct Description {
    tensors: Vec<Described>,
    pub(super) scalars: BTreeMap<String, Scalar>,
}

struct Described {
    name: String,
    dtype: &'static str,
    size: Vec<i64>,
    strides: Option<Vec<i64>>,
    element: usize,
    bytes: u64,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    /// Index of the file.
    pub(super) file: usize,
    /// From the file's start.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// One file: its header, its length and, in the order in which they lie, its tensors.
pub(super) struct Planned {
    pub(super) name: &'static str,
    pub(super) header: Vec<u8>,
    pub(super) bytes: u64,
    pub(super) order: Vec<String>,
}

/// All files.
pub(super) struct Layout {
    pub(super) files: Vec<Planned>,
    pub(super) spots: BTreeMap<String, Spot>,
    /// With checksums of 0 until they are written.
    pub(super) entries: BTreeMap<String, TensorEntry>,
}

impl Sink for Description {
    fn scalar(&mut self, name: &str, value: Value) -> Result<()> {
        if let Some(scalar) = Scalar::of(&value) {
            self.scalars.insert(name.to_owned(), scalar);
        }
        Ok(())
    }

    fn tensor(&mut self, name: &str, tensor: &Tensor) -> Result<()> {
        let kind = tensor.f_kind()?;
        let element = kind.elt_size_in_bytes();
        self.tensors.push(Described {
            name: name.to_owned(),
            dtype: dtype::name_of(kind, name)?,
            size: tensor.size(),
            strides: strides_of(tensor),
            element,
            bytes: (tensor.numel() * element) as u64,
        });
        Ok(())
    }
}

impl Description {
    /// Lays the files out: larger elements first, so that each is aligned, and otherwise in
    /// the order of the visit, so that writing is sequential.
    pub(super) fn layout(mut self, aliases: &[(String, String)]) -> Result<Layout> {
        self.tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.element));
        let mut layout = Layout { files: Vec::new(), spots: BTreeMap::new(), entries: BTreeMap::new() };
        for name in [MODEL, OPTIMIZER, TRAINING] {
            let aliases = if name == MODEL { aliases } else { &[] };
            layout.add(name, &self.tensors, aliases)?;
        }
        Ok(layout)
    }
}

impl Layout {
    fn add(&mut self, file: &'static str, tensors: &[Described], aliases: &[(String, String)]) -> Result<()> {
        let mut header = BTreeMap::new();
        let mut metadata: BTreeMap<&str, &str> =
            aliases.iter().map(|(alias, name)| (alias.as_str(), name.as_str())).collect();
        metadata.insert("format", "pt");
        header.insert("__metadata__".to_owned(), json!(metadata));
        let mut taken: HashSet<String> = HashSet::from(["__metadata__".to_owned()]);
        let (mut end, mut order, index) = (0, Vec::new(), self.files.len());
        for tensor in tensors {
            let (belongs, mut key) = place(&tensor.name);
            if belongs != file {
                continue;
            }
            if !taken.insert(key.to_owned()) {
                key = &tensor.name;
                taken.insert(key.to_owned());
            }
            let offsets = (end, end + tensor.bytes);
            header.insert(
                key.to_owned(),
                json!({ "dtype": tensor.dtype, "shape": tensor.size, "data_offsets": offsets }),
            );
            self.spots.insert(tensor.name.clone(), Spot { file: index, offset: end, bytes: tensor.bytes });
            self.entries.insert(tensor.name.clone(), tensor.entry(file, key));
            order.push(tensor.name.clone());
            end = offsets.1;
        }
        let header = framed(&header)?;
        let start = header.len() as u64;
        for name in &order {
            if let Some(spot) = self.spots.get_mut(name) {
                spot.offset += start;
            }
        }
        self.files.push(Planned { name: file, header, bytes: start + end, order });
        Ok(())
    }
}

impl Described {
    fn entry(&self, file: &str, key: &str) -> TensorEntry {
        let unsigned = |numbers: &[i64]| numbers.iter().map(|number| number.unsigned_abs()).collect();
        TensorEntry {
            file: file.to_owned(),
            key: key.to_owned(),
            dtype: self.dtype.to_owned(),
            shape: unsigned(&self.size),
            strides: self.strides.as_deref().map(unsigned),
            crc32: 0,
        }
    }
}

/// The file that a tensor goes to, and its name there.
fn place(name: &str) -> (&'static str, &str) {
    let found = FILES.iter().find_map(|(prefix, file)| Some((*file, name.strip_prefix(prefix)?)));
    found.unwrap_or((TRAINING, name))
}

/// A header as it stands in the file: its length, and spaces up to a multiple of 8.
fn framed(header: &BTreeMap<String, serde_json::Value>) -> Result<Vec<u8>> {
    let mut json = serde_json::to_vec(header).map_err(|error| Error::Torch(error.to_string()))?;
    manifest::check_length("a file's header", json.len().next_multiple_of(8) as u64)?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut framed = (json.len() as u64).to_le_bytes().to_vec();
    framed.extend(json);
    Ok(framed)
}
