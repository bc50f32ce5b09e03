use std::cell::Cell;
use std::io;

thread_local! {
    static BLOCKS_LEFT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Fails the block that the test asked for.
pub(super) fn count_block() -> io::Result<()> {
    let left = BLOCKS_LEFT.get();
    BLOCKS_LEFT.set(left.map(|left| left.saturating_sub(1)));
    if left == Some(0) { Err(io::Error::other("the disk is full")) } else { Ok(()) }
}
