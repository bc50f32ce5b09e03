use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result};

/// Runs a user's code; its panic is an error.
pub(super) fn caught<R>(place: &'static str, body: impl FnOnce() -> Result<R>) -> Result<R> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => Err(Error::from_panic(payload, place)),
    }
}
