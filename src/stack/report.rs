use std::fmt::{Display, Formatter, Result};

use super::Stack;
use crate::optim::bytes_of;
use crate::step::{Exactness, ModelSize, WindowRule};

impl Stack {
    /// Sizes of the model, as cost formulas take them.
    pub fn model_size(&self) -> ModelSize {
        let trained = self.model.parameters.iter().filter(|parameter| parameter.tensor.requires_grad());
        let mut size = ModelSize::default();
        for parameter in trained {
            size.parameters += parameter.tensor.numel() as u64;
            size.parameter_bytes += bytes_of(&parameter.tensor);
        }
        size.buffer_bytes = self.model.buffers.iter().map(|buffer| bytes_of(&buffer.tensor)).sum();
        size
    }

    /// What the whole stack keeps of exactness: the weakest promise in it.
    pub fn exactness(&self) -> Exactness {
        let window = self.strategies().find_map(|strategy| strategy.longest_window());
        let optimizer = self.optimizer.exactness(window.unwrap_or(WindowRule::Micros(1)));
        self.strategies().map(|strategy| strategy.exactness()).fold(optimizer, Exactness::and)
    }
}

/// The stack in the order it acts, with the exactness and the price of each part.
impl Display for Stack {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let size = self.model_size();
        writeln!(
            f,
            "{} parameters, {} MB of weights and {}, on {:?}; exactness: {}",
            size.parameters,
            megabytes(Some(size.parameter_bytes)),
            if self.optimizer.gradients().changes_in_backward() {
                "gradients that go in backward"
            } else {
                "as much of gradients"
            },
            self.model.device,
            self.exactness()
        )?;
        writeln!(f, "{:<40} {:<16} {:>10}  formula; time", "strategy", "exactness", "MB")?;
        for strategy in self.strategies() {
            let cost = strategy.cost(&size);
            writeln!(
                f,
                "{:<40} {:<16} {:>10}  {}; {}",
                strategy.name(),
                strategy.exactness().to_string(),
                megabytes(cost.bytes),
                cost.bytes_formula,
                cost.time
            )?;
        }
        write!(
            f,
            "{:<40} {:<16} {:>10}  state",
            self.optimizer.name(),
            "",
            megabytes(self.optimizer.has_state().then_some(self.state_bytes))
        )
    }
}

fn megabytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "by batch".to_owned(), |bytes| format!("{:.1}", bytes as f64 / 1e6))
}
