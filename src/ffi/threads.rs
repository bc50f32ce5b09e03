//! libtorch's threads.

unsafe extern "C" {
    safe fn mf_threads_alone();
}

/// From now on libtorch's loops that this thread begins stay on it, so that a thread beside
/// the training takes no more than one core.
pub(crate) fn alone() {
    mf_threads_alone();
}
