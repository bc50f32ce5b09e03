use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tch::{Device, Kind, Tensor, nn::VarStore};

use super::tensors::{Spot, Tensors};
use crate::error::{Error, Result};
use crate::stack::Stack;
use crate::state::{Named, State, Value};

/// A model's tensors from a file: of a snapshot, or any `.safetensors` that PyTorch wrote.
///
/// Strict by default: every tensor of the target is in the file, every tensor of the file in
/// the target, shapes and dtypes are equal, or nothing is loaded.
///
/// ```
/// use memfit::snapshot::Weights;
/// use memfit::tch::{nn, Device};
///
/// let folder = tempfile::tempdir().unwrap();
/// let file = folder.path().join("model.safetensors");
/// let vs = nn::VarStore::new(Device::Cpu);
/// let w = vs.root().ones("w", &[2]);
/// vs.save(&file)?;
/// memfit::tch::no_grad(|| w.shallow_clone().zero_());
/// Weights::open(&file)?.load_into(&vs)?;
/// assert_eq!(w.double_value(&[1]), 1.0);
/// # Ok::<(), memfit::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is loaded until load_into()"]
pub struct Weights {
    file: Tensors,
    /// Further names of tied tensors.
    aliases: BTreeMap<String, String>,
    dtypes: Dtypes,
    names: Names,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dtypes {
    Equal,
    Cast,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    Equal,
    Common,
}

/// Where weights are loaded: a `VarStore`, a [`Stack`], or named tensors.
///
/// Once a stack is built, load into the stack: copies of the weights, as those of
/// [`MasterWeights`](crate::strategies::MasterWeights), then follow. A `VarStore` is for the
/// time before `build()`, or without a stack.
pub trait Target {
    /// The tensors, buffers too; a tied one may stand under each of its names.
    fn tensors(&self) -> Vec<Named>;

    /// Called with the tensors that were written.
    ///
    /// # Errors
    /// Any; the tensors are loaded.
    fn loaded(&self, loaded: &[Named]) -> Result<()> {
        let _ = loaded;
        Ok(())
    }
}

impl Target for VarStore {
    fn tensors(&self) -> Vec<Named> {
        self.variables().into_iter().map(|(name, tensor)| Named { name, tensor }).collect()
    }
}

impl Target for Stack {
    fn tensors(&self) -> Vec<Named> {
        self.parameters().iter().chain(self.buffers()).cloned().collect()
    }

    fn loaded(&self, loaded: &[Named]) -> Result<()> {
        self.weights_loaded(loaded)
    }
}

impl Target for [Named] {
    fn tensors(&self) -> Vec<Named> {
        self.to_vec()
    }
}

impl Target for Vec<Named> {
    fn tensors(&self) -> Vec<Named> {
        self.clone()
    }
}

impl Weights {
    /// Opens a `.safetensors` file.
    ///
    /// # Errors
    /// [`Error::Snapshot`] where the file is not what its header says; [`Error::Io`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::of(Tensors::open(path.as_ref())?))
    }

    pub(super) fn of(file: Tensors) -> Self {
        let named = file.metadata().iter().filter(|(_, name)| file.spots().contains_key(*name));
        let aliases = named.map(|(alias, name)| (alias.clone(), name.clone())).collect();
        Self { file, aliases, dtypes: Dtypes::Equal, names: Names::Equal }
    }

    /// Casts between real dtypes where they differ; a target keeps its own.
    pub fn casting(mut self) -> Self {
        self.dtypes = Dtypes::Cast;
        self
    }

    /// Loads what both sides have, and leaves the rest.
    pub fn partial(mut self) -> Self {
        self.names = Names::Common;
        self
    }

    /// The names in the file, tied ones once.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file.spots().keys().map(String::as_str)
    }

    /// Loads, one tensor at a time; frozen targets too.
    ///
    /// # Errors
    /// [`Error::State`] lists everything that does not fit, a target without tensors or, for a
    /// partial load, without any common one included; nothing was changed then.
    /// [`Error::Io`] in the middle leaves some tensors loaded.
    pub fn load_into<T: Target + ?Sized>(&self, target: &T) -> Result<()> {
        let (mut due, mut problems) = (Vec::new(), Vec::new());
        let mut used = BTreeSet::new();
        let tensors = target.tensors();
        if tensors.is_empty() {
            problems.push("the target has no tensors".to_owned());
        }
        for Named { name, tensor } in &tensors {
            let key = if self.file.spots().contains_key(name) { Some(name) } else { self.aliases.get(name) };
            match key.and_then(|key| Some((key, self.file.spots().get(key)?))) {
                None if self.names == Names::Equal => problems.push(format!("`{name}` is missing")),
                None => {}
                Some((key, spot)) => {
                    problems.extend(self.misfit(name, spot, tensor));
                    used.insert(key.as_str());
                    due.push((key, Named::new(name.clone(), tensor)));
                }
            }
        }
        if self.names == Names::Equal {
            let unknown = self.names().filter(|name| !used.contains(name));
            problems.extend(unknown.map(|name| format!("`{name}` is unknown")));
        } else if due.is_empty() && problems.is_empty() {
            problems.push(format!("no tensor has a name that is in {}", self.file.path().display()));
        }
        problems.extend(self.file.false_bools(|key| used.contains(key))?);
        if !problems.is_empty() {
            return Err(Error::State { problems });
        }
        for (key, Named { tensor, .. }) in &due {
            let held = crate::offload::hold(tensor)?;
            self.file.read(key, tensor)?;
            held.map_or(Ok(()), crate::offload::Hold::end)?;
        }
        crate::ffi::autocast::clear_cache();
        let loaded: Vec<Named> = due.into_iter().map(|(_, named)| named).collect();
        target.loaded(&loaded)
    }

    fn misfit(&self, name: &str, spot: &Spot, tensor: &Tensor) -> Option<String> {
        let (size, kind) = (tensor.size(), tensor.kind());
        if spot.size != size {
            return Some(format!("`{name}` has shape {:?}, wanted {size:?}", spot.size));
        }
        if spot.kind == kind || (self.dtypes == Dtypes::Cast && is_real(kind) && is_real(spot.kind)) {
            return None;
        }
        let remedy = if is_real(kind) && is_real(spot.kind) { "; casting() casts it" } else { "" };
        Some(format!("`{name}` has dtype {:?}, wanted {kind:?}{remedy}", spot.kind))
    }
}

/// Reads a `.safetensors` file as a state of tensors, on the host. One without dimensions that
/// is Int64 becomes a whole number: that is how PyTorch's side writes counts.
///
/// # Errors
/// As [`Weights::open`].
pub fn read_tensors(path: impl AsRef<Path>) -> Result<State> {
    let file = Tensors::open(path.as_ref())?;
    let mut state = State::default();
    for (name, spot) in file.spots() {
        let tensor = Tensor::f_empty(&spot.size, (spot.kind, Device::Cpu))?;
        file.read(name, &tensor)?;
        let count = spot.kind == Kind::Int64 && spot.size.is_empty();
        let value = if count { Value::Int(tensor.f_int64_value(&[])?) } else { Value::Tensor(tensor) };
        state.insert(name.clone(), value);
    }
    Ok(state)
}

fn is_real(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double)
}
