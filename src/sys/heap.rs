//! The C heap.

/// Gives free pages of the C heap back to the system; where it cannot be asked to, nothing.
pub(crate) fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim has no precondition and takes the heap's own locks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// What the C heap holds from the system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// Bytes held, in arenas and in mappings of their own.
    pub(crate) held: u64,
    /// Bytes of them that are handed out to nobody.
    pub(crate) free: u64,
}

/// The C heap's own figures, where it gives them.
pub(crate) fn held() -> Option<Held> {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: mallinfo2 has no precondition, takes the heap's own locks and returns by value.
        let figures = unsafe { libc::mallinfo2() };
        Some(Held { held: (figures.arena + figures.hblkhd) as u64, free: figures.fordblks as u64 })
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    None
}
