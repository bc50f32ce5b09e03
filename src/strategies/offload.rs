use crate::error::Result;
use crate::offload::ActivationOffload;
use crate::state::Named;
use crate::step::{Cost, Mode, ModelSize, NextForward, Place, Preparation, RowBytes, Strategy};

impl Strategy for ActivationOffload {
    fn name(&self) -> String {
        self.described()
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn place(&self) -> Place {
        Place::Saved
    }

    fn cost(&self, _model: &ModelSize) -> Cost {
        Cost::new(
            "− saved activations + those of one operator + prefetch × the largest storage",
            None,
            "saved activations copied out and back, once each",
        )
    }

    /// Small storages stay.
    fn row_bytes(&self) -> RowBytes {
        if self.moves_all() { RowBytes::Line } else { RowBytes::Threshold }
    }

    fn prepare(&mut self, preparation: &mut Preparation<'_>) -> Result<()> {
        let known: Vec<Named> =
            preparation.parameters.iter().chain(preparation.buffers.iter()).cloned().collect();
        self.start(preparation.device, &known)
    }

    fn forward(&mut self, mode: &mut Mode, next: NextForward<'_>) -> Result<()> {
        match mode {
            Mode::Train(_) => self.while_saving(|| next(mode)),
            Mode::Evaluate => next(mode),
        }
    }
}
