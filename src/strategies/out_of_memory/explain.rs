//! What to say when one row does not fit.

use tch::Device;

use crate::error::Error;
use crate::memory::{Advice, EVENTS, Peak, Recording, Role};
use crate::optim::Optimizer;
use crate::state::Named;
use crate::step::{Recovery, Scene};

use super::helps::helps;

/// One row failed; it runs once more while this watches.
#[derive(Debug)]
pub(super) struct Stuck {
    recording: Option<Recording>,
}

impl Stuck {
    /// Begins to watch, where there is something to see.
    pub(super) fn begin(device: Device) -> (Self, Recovery) {
        let recording = if device == Device::Cpu { Recording::within(EVENTS).ok() } else { None };
        let recovery = if recording.is_some() { Recovery::Retry } else { Recovery::Window };
        (Self { recording }, recovery)
    }

    /// Labels gradients before the driver drops them.
    pub(super) fn label_gradients(&mut self, parameters: &[Named]) {
        if let Some(recording) = &mut self.recording {
            recording.label_gradients(parameters.iter().map(|one| &one.tensor));
        }
    }

    pub(super) fn explain(mut self, source: Error, scene: &mut Scene<'_>) -> Error {
        let peak = self.peak(scene);
        let missing = missing(&source);
        let helps = helps(peak.as_ref(), scene);
        let advice = Box::new(Advice::new(peak.as_ref(), missing, helps));
        Error::DoesNotFit { advice, source: Box::new(source) }
    }

    fn peak(&mut self, scene: &mut Scene<'_>) -> Option<Peak> {
        let recording = self.recording.as_mut()?;
        recording.label(Role::Parameters, scene.parameters.iter().map(|one| &one.tensor));
        recording.label(Role::Buffers, scene.buffers.iter().map(|one| &one.tensor));
        for (group, index) in places(scene.optimizer) {
            let state = scene.optimizer.state_of(group, index);
            recording.label(Role::OptimizerState, state.into_iter().map(|tensor| &*tensor));
        }
        let timeline = recording.timeline().ok()?;
        // Where the events up to the failure are lost, it shows what came after.
        let seen = timeline.lost() == 0 || !timeline.refusals().is_empty();
        seen.then(|| timeline.peak())
    }
}

pub(super) fn places(optimizer: &dyn Optimizer) -> Vec<(usize, usize)> {
    let groups = optimizer.groups().iter().enumerate();
    groups.flat_map(|(group, held)| (0..held.parameters().len()).map(move |index| (group, index))).collect()
}

/// Bytes over the limit, where the error tells.
pub(super) fn missing(error: &Error) -> Option<u64> {
    match error {
        Error::OutOfMemory { requested: Some(requested), live: Some(live), limit: Some(limit), .. } => {
            Some((requested + live).saturating_sub(*limit))
        }
        _ => None,
    }
}
