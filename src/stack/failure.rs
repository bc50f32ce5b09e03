//! What a failure leaves: the way back to the micro-batch's or the window's start.

use super::window::Failed;
use super::{Health, Stack};
use crate::error::{Error, Result};
use crate::step::{Failure, Recovery, Scene, Split, Strategy};

impl Stack {
    /// Puts back what a failed micro-batch of `step` or `step_with` changed.
    pub(super) fn settle(&mut self, failed: Failed) -> Error {
        let Some(open) = &self.open else { return failed.error };
        let micro = open.done();
        if failed.in_backward && self.finals.changed() {
            return self.abandon(failed.error);
        }
        let recovered = self.recover(&failed, micro, None);
        let stays = !failed.in_backward || recovered.contains(&Recovery::MicroBatch);
        let put_back = match (stays, micro) {
            (_, 0) => self.back_to_window_start(),
            (true, _) => {
                self.clock.broke(micro);
                self.micro_start.go_back(&self.model.buffers)
            }
            (false, _) => self.back_to_window_start(),
        };
        match put_back {
            Err(error) => self.poison(error),
            Ok(()) if stays || micro == 0 => failed.error,
            Ok(()) => Error::WindowLost { micro, source: Box::new(failed.error) },
        }
    }

    /// Goes back to the window's start after a failure in `step_batch`.
    pub(super) fn settle_split(&mut self, failed: Failed, rows: i64, split: Split) -> (Error, Recovery) {
        let Some(open) = &self.open else { return (failed.error, Recovery::Window) };
        let micro = open.done();
        if self.finals.changed() {
            return (self.abandon(failed.error), Recovery::Window);
        }
        let recovered = self.recover(&failed, micro, Some((rows, split)));
        let retry = recovered.contains(&Recovery::Retry);
        let recovery = if retry { Recovery::Retry } else { Recovery::Window };
        match self.back_to_window_start() {
            Ok(()) => (failed.error, recovery),
            Err(error) => (self.poison(error), Recovery::Window),
        }
    }

    fn recover(&mut self, failed: &Failed, micro: usize, split: Option<(i64, Split)>) -> Vec<Recovery> {
        let Failed { error, in_backward } = failed;
        let parameters = &self.model.parameters;
        let (rows, split) = split.unzip();
        let failure = Failure { error, micro, rows, split, in_backward: *in_backward, parameters };
        self.strategies.iter_mut().map(|strategy| strategy.recover(&failure)).collect()
    }

    /// Lets strategies say more of an error that will be returned.
    pub(super) fn explained(&mut self, error: Error) -> Error {
        if matches!(error, Error::Poisoned { .. }) {
            return error;
        }
        let names: Vec<String> = self.strategies.iter().map(|strategy| strategy.name()).collect();
        let mut told = error;
        for index in 0..self.strategies.len() {
            let (before, rest) = self.strategies.split_at_mut(index);
            let Some((one, after)) = rest.split_first_mut() else { break };
            let beside: Vec<&dyn Strategy> = before.iter().chain(&*after).map(AsRef::as_ref).collect();
            let mut scene = Scene {
                optimizer: self.optimizer.as_mut(),
                parameters: &self.model.parameters,
                buffers: &self.model.buffers,
                strategies: &names,
                beside: &beside,
            };
            told = one.explain(told, &mut scene);
        }
        told
    }

    pub(super) fn back_to_window_start(&mut self) -> Result<()> {
        self.clock.broke(0);
        self.drop_window();
        self.window_start.go_back(&self.model.buffers)
    }

    /// Frees what the open window holds; its data is not consumed then.
    pub(super) fn drop_window(&mut self) {
        if let Some(open) = self.open.take() {
            self.consumed = open.consumed_before;
        }
        self.zero_grad();
        self.strategies.iter_mut().for_each(|strategy| strategy.window_dropped());
    }

    /// Drops a window in which parameters or their state changed: there is no way back.
    pub(super) fn abandon(&mut self, error: Error) -> Error {
        self.clock.broke(0);
        self.drop_window();
        self.poison(error)
    }

    pub(super) fn poison(&mut self, error: Error) -> Error {
        self.health = Health::Poisoned;
        match error {
            Error::Poisoned { .. } => error,
            error => Error::Poisoned { source: Box::new(error) },
        }
    }

    pub(super) fn check_health(&self) -> Result<()> {
        match self.health {
            Health::Sound => Ok(()),
            Health::Poisoned => Err(Error::CallOrder {
                call: "a training step",
                state: "after an update failed half-way".to_owned(),
                remedy: "load a snapshot: into this Stack, or into a new one",
            }),
        }
    }
}
