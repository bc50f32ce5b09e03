use std::panic::{set_hook, take_hook};
use std::sync::Once;

use crate::ffi::recompute;

/// Chains a panic hook, once, that is silent while a thread leaves a recompute early.
///
/// tch's infallible calls turn the stop into a panic, which a hook would print, backtrace
/// and all. Every other panic reaches the hook that was there before.
pub(super) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !recompute::leaving() {
                before(panic);
            }
        }));
    });
}
