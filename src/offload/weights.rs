//! The weights of one segment: who holds them, and when a backward is done with them.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use tch::Tensor;

use super::berth::{Berth, Write};
use super::carrier::Carrier;
use super::moved::Observer;
use crate::error::Result;
use crate::ffi::hooks::{self, HookGuard};
use crate::ffi::tensor;
use crate::memory::Role;

/// Weights that are in memory while somebody holds them.
#[derive(Debug)]
pub(crate) struct Weights {
    carrier: Arc<Carrier>,
    observer: Observer,
    state: Mutex<State>,
    me: Weak<Weights>,
}

#[derive(Debug)]
struct State {
    berths: Vec<Held>,
    backward: Option<Backward>,
    hooks: HashMap<usize, HookGuard>,
}

#[derive(Debug)]
struct Held {
    berth: Berth,
    holds: usize,
}

/// A backward that is passing through the segment.
#[derive(Debug)]
struct Backward {
    /// Weights whose gradient is not final yet.
    waiting: HashSet<usize>,
    /// Passes whose input has no gradient yet.
    open: usize,
}

/// Keeps weights in memory.
#[derive(Debug)]
#[must_use = "the weights leave when the hold is dropped"]
pub(crate) struct Hold {
    weights: Arc<Weights>,
    which: Range<usize>,
}

/// Whose weight a storage is, and which one.
type Known = HashMap<usize, (Weak<Weights>, usize)>;

/// All offloaded weights of the process, by storage; an entry's storage is alive.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// Holds one parameter, if it is an offloaded weight.
pub(crate) fn hold(parameter: &Tensor) -> Result<Option<Hold>> {
    let known = lock(&KNOWN).get(&tensor::storage_identity(parameter)).cloned();
    let Some((weights, index)) = known else { return Ok(None) };
    weights.upgrade().map(|weights| weights.hold_some(index..index + 1)).transpose()
}

/// Whether a parameter's bytes have a home outside memory.
pub(crate) fn is_offloaded(parameter: &Tensor) -> bool {
    lock(&KNOWN).contains_key(&tensor::storage_identity(parameter))
}

impl Weights {
    /// Gives each parameter a home and sends it there.
    pub(crate) fn new(parameters: &[Tensor], carrier: Arc<Carrier>, observer: Observer) -> Result<Arc<Self>> {
        let berths = parameters
            .iter()
            .map(|parameter| Ok(Held { berth: Berth::new(parameter, &carrier, &observer)?, holds: 0 }))
            .collect::<Result<Vec<_>>>()?;
        let state = Mutex::new(State { berths, backward: None, hooks: HashMap::new() });
        let weights = Arc::new_cyclic(|me| Self { carrier, observer, state, me: me.clone() });
        let mut known = lock(&KNOWN);
        for (index, parameter) in parameters.iter().enumerate() {
            known.insert(tensor::storage_identity(parameter), (Arc::downgrade(&weights), index));
        }
        drop(known);
        weights.hold_all()?.end()?;
        Ok(weights)
    }

    /// Holds the whole segment.
    pub(crate) fn hold_all(&self) -> Result<Hold> {
        let all = 0..lock(&self.state).berths.len();
        self.hold_some(all)
    }

    fn hold_some(&self, which: Range<usize>) -> Result<Hold> {
        self.arrive(&mut lock(&self.state), &which)?;
        Ok(Hold { weights: self.me.upgrade().ok_or_else(gone)?, which })
    }

    fn arrive(&self, state: &mut State, which: &Range<usize>) -> Result<()> {
        let berths = state.berths.get_mut(which.clone()).unwrap_or_default();
        for held in berths.iter() {
            held.berth.announce();
        }
        for held in berths.iter() {
            let _role = Role::Parameters.scope();
            held.berth.arrive(&self.carrier, &self.observer)?;
        }
        for held in berths.iter_mut() {
            held.holds += 1;
        }
        Ok(())
    }

    fn release(&self, which: &Range<usize>) -> Result<()> {
        let mut state = lock(&self.state);
        let mut released = Ok(());
        for held in state.berths.get_mut(which.clone()).unwrap_or_default() {
            held.holds = held.holds.saturating_sub(1);
            if held.holds == 0 {
                let left = held.berth.leave(Write::IfChanged, &self.carrier, &self.observer);
                released = released.and(left);
            }
        }
        released
    }

    /// Brings the weights back in time for the backward of `output`, computed from `input`.
    pub(crate) fn watch(&self, input: &Tensor, output: &Tensor) -> Result<()> {
        if !output.requires_grad() || output.is_leaf() {
            return Ok(());
        }
        self.hook_leaves()?;
        let counted = input.requires_grad() && !input.is_leaf();
        let weights = self.me.clone();
        hooks::before_backward(output, move || {
            weights.upgrade().map_or(Ok(()), |weights| weights.backward_begins(counted))
        })?;
        if counted {
            let weights = self.me.clone();
            hooks::before_backward(input, move || {
                weights.upgrade().map_or(Ok(()), |weights| {
                    weights.backward_moves(|backward| {
                        backward.open = backward.open.saturating_sub(1);
                    })
                })
            })?;
        }
        Ok(())
    }

    /// Hears of the final gradient of every weight that has one by now.
    fn hook_leaves(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let State { berths, hooks, .. } = &mut *state;
        for held in berths.iter().filter(|held| held.berth.tensor().requires_grad()) {
            let key = tensor::identity(held.berth.tensor());
            if let std::collections::hash_map::Entry::Vacant(free) = hooks.entry(key) {
                let weights = self.me.clone();
                free.insert(hooks::on_gradient(held.berth.tensor(), move || {
                    weights.upgrade().map_or(Ok(()), |weights| {
                        weights.backward_moves(|backward| {
                            backward.waiting.remove(&key);
                        })
                    })
                })?);
            }
        }
        Ok(())
    }

    fn backward_begins(&self, counted: bool) -> Result<()> {
        let mut state = lock(&self.state);
        let trained =
            state.berths.iter().map(|held| held.berth.tensor()).filter(|weight| weight.requires_grad());
        let waiting = trained.map(tensor::identity).collect();
        let mut backward = match state.backward.take() {
            Some(backward) => backward,
            None => {
                let all = 0..state.berths.len();
                self.arrive(&mut state, &all)?;
                Backward { waiting: HashSet::new(), open: 0 }
            }
        };
        backward.waiting = waiting;
        backward.open += usize::from(counted);
        state.backward = Some(backward);
        drop(state);
        let weights = self.me.clone();
        // A weight that takes no part in this backward never has a final gradient.
        hooks::after_backward(move || weights.upgrade().map_or(Ok(()), |weights| weights.backward_ends()))
    }

    fn backward_moves(&self, change: impl FnOnce(&mut Backward)) -> Result<()> {
        let mut state = lock(&self.state);
        let Some(backward) = &mut state.backward else { return Ok(()) };
        change(backward);
        if !backward.waiting.is_empty() || backward.open > 0 {
            return Ok(());
        }
        drop(state);
        self.backward_ends()
    }

    fn backward_ends(&self) -> Result<()> {
        let mut state = lock(&self.state);
        let all = 0..state.berths.len();
        let held = state.backward.take().is_some();
        drop(state);
        if held { self.release(&all) } else { Ok(()) }
    }
}

impl Hold {
    /// Lets the weights go.
    ///
    /// # Errors
    /// Changed ones could not be written home; they stay in memory.
    pub(crate) fn end(mut self) -> Result<()> {
        let which = std::mem::take(&mut self.which);
        self.weights.release(&which)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Err(error) = self.weights.release(&self.which) {
            tracing::error!(%error, "offloaded weights stay in memory");
        }
    }
}

impl Drop for Weights {
    /// The tensors outlive the offload: their bytes come back for good.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let mut known = lock(&KNOWN);
        for held in &state.berths {
            let key = tensor::storage_identity(held.berth.tensor());
            if known.get(&key).is_some_and(|(weights, _)| weights.strong_count() == 0) {
                known.remove(&key);
            }
            if let Err(error) = held.berth.arrive(&self.carrier, &self.observer) {
                tracing::error!(%error, "the bytes of an offloaded weight are lost");
            }
        }
    }
}

fn gone() -> crate::Error {
    crate::Error::Torch("the offload of these weights is gone".to_owned())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
