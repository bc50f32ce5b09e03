//! What libtorch refuses is told once; shared by the training programs.

/// tch's convenient calls panic where libtorch refuses. The stack turns those panics into errors,
/// so the text that a panic prints would come twice.
pub fn leave_to_errors() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>();
        if !text.is_some_and(|text| text.contains("value: Torch(")) {
            usual(panic);
        }
    }));
}
