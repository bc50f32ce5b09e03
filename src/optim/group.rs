use tch::{Tensor, nn::VarStore};

use crate::error::{Error, Result};
use crate::ffi;
use crate::state::Named;

/// What a group's parameters share.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GroupOptions {
    /// Learning rate; `None` takes the optimizer's.
    pub lr: Option<f64>,
    /// Weight decay; `None` takes the optimizer's.
    pub weight_decay: Option<f64>,
}

impl GroupOptions {
    /// Sets the learning rate.
    pub fn lr(mut self, lr: f64) -> Self {
        self.lr = Some(lr);
        self
    }

    /// Sets the weight decay.
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }
}

/// Parameters that share a learning rate and a weight decay.
#[derive(Debug)]
pub struct ParamGroup {
    /// The learning rate of the next update; schedules set it.
    pub lr: f64,
    /// Weight decay, in the sense of the optimizer.
    pub weight_decay: f64,
    initial_lr: f64,
    parameters: Vec<Named>,
}

impl ParamGroup {
    /// A group.
    ///
    /// # Errors
    /// A rate or a decay that is negative or not finite.
    pub fn new(parameters: Vec<Named>, lr: f64, weight_decay: f64) -> Result<Self> {
        for (setting, value) in [("lr", lr), ("weight_decay", weight_decay)] {
            if !value.is_finite() || value < 0.0 {
                return Err(Error::config(setting, format!("must be finite and not negative, not {value}")));
            }
        }
        Ok(Self { lr, weight_decay, initial_lr: lr, parameters })
    }

    /// The learning rate the group was made with: what schedules multiply.
    pub fn initial_lr(&self) -> f64 {
        self.initial_lr
    }

    /// The parameters, frozen ones too.
    pub fn parameters(&self) -> &[Named] {
        &self.parameters
    }

    /// Exchanges the tensor of one parameter, for strategies that train a copy.
    pub fn replace(&mut self, index: usize, tensor: &Tensor) {
        if let Some(parameter) = self.parameters.get_mut(index) {
            parameter.tensor = tensor.shallow_clone();
        }
    }
}

/// Where an optimizer finds its parameters: a `VarStore` (names and creation order), named
/// tensors, or bare tensors (named `0`, `1`, …). A tensor met twice is taken once.
pub trait Parameters {
    /// The parameters, each tensor once, frozen ones too.
    fn named(&self) -> Vec<Named>;

    /// The further names of tensors met more than once, each with the name that
    /// [`Parameters::named`] gives.
    fn aliases(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

impl Parameters for VarStore {
    fn named(&self) -> Vec<Named> {
        // tch lists a tied tensor under each of its names, in random order: the first one counts.
        let mut names = std::collections::HashMap::<usize, String>::new();
        for (name, tensor) in self.variables() {
            let known = names.entry(ffi::tensor::identity(&tensor)).or_insert_with(|| name.clone());
            if name < *known {
                *known = name;
            }
        }
        let named = self.trainable_variables().into_iter().enumerate().map(|(index, tensor)| {
            let name = names.get(&ffi::tensor::identity(&tensor)).cloned();
            Named { name: name.unwrap_or_else(|| index.to_string()), tensor }
        });
        once(named)
    }

    /// Buffers' names too.
    fn aliases(&self) -> Vec<(String, String)> {
        let mut all: Vec<Named> =
            self.variables().into_iter().map(|(name, tensor)| Named { name, tensor }).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        again(&all)
    }
}

impl Parameters for [Named] {
    fn named(&self) -> Vec<Named> {
        once(self.iter().cloned())
    }

    fn aliases(&self) -> Vec<(String, String)> {
        again(self)
    }
}

impl Parameters for [Tensor] {
    fn named(&self) -> Vec<Named> {
        once(self.iter().enumerate().map(|(index, tensor)| Named::new(index.to_string(), tensor)))
    }
}

impl Parameters for Vec<Named> {
    fn named(&self) -> Vec<Named> {
        self.as_slice().named()
    }

    fn aliases(&self) -> Vec<(String, String)> {
        self.as_slice().aliases()
    }
}

impl Parameters for Vec<Tensor> {
    fn named(&self) -> Vec<Named> {
        self.as_slice().named()
    }
}

fn once(named: impl Iterator<Item = Named>) -> Vec<Named> {
    let mut seen = std::collections::HashSet::new();
    named.filter(|parameter| seen.insert(ffi::tensor::identity(&parameter.tensor))).collect()
}

/// The names under which a tensor is met again, each with its first.
fn again(named: &[Named]) -> Vec<(String, String)> {
    let mut first = std::collections::HashMap::new();
    let mut aliases = Vec::new();
    for Named { name, tensor } in named {
        let known = first.entry(ffi::tensor::identity(tensor)).or_insert(name);
        if *known != name {
            aliases.push((name.clone(), known.to_string()));
        }
    }
    aliases
}
