use tch::Tensor;

/// Parameters that look frozen for a while.
pub(super) struct Hidden(Vec<Tensor>);

impl Hidden {
    pub(super) fn new(parameters: Vec<Tensor>) -> Self {
        for parameter in &parameters {
            let _ = parameter.f_set_requires_grad(false);
        }
        Self(parameters)
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        for parameter in &self.0 {
            let _ = parameter.f_set_requires_grad(true);
        }
    }
}
