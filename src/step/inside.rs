use std::cell::Cell;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Marks this thread as inside a driver's phase, where a module that cannot return an error
/// may unwind with it.
#[derive(Debug)]
pub(crate) struct InsideStep {
    _this_thread: std::marker::PhantomData<*const ()>,
}

impl InsideStep {
    pub(crate) fn enter() -> Self {
        DEPTH.set(DEPTH.get() + 1);
        Self { _this_thread: std::marker::PhantomData }
    }
}

impl Drop for InsideStep {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// Whether a driver on this thread turns an unwinding [`Error`](crate::Error) back into one.
pub(crate) fn is_inside() -> bool {
    DEPTH.get() > 0
}

/// For a module, which cannot return an error: inside a phase the error itself unwinds and is
/// caught there, elsewhere it is a panic with its text.
pub(crate) fn unwind(error: crate::Error) -> ! {
    if is_inside() {
        std::panic::resume_unwind(Box::new(error));
    }
    panic!("{error}")
}
