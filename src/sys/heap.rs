//! The C heap.

/// Gives free pages of the C heap back to the system; where it cannot be asked to, nothing.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim has no precondition and takes the heap's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}
