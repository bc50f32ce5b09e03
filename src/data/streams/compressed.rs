//! Compressed bytes are known by how they begin, not by their file's name.

use std::io::{self, BufReader, Cursor, Read};

/// How bytes are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
/// What follows the first byte, 0x50 to 0x5f, of a frame that zstd passes over.
const SKIPPABLE: &[u8] = &[0x2a, 0x4d, 0x18];

impl Compression {
    /// By the first bytes; of four, or of all where there are fewer.
    pub(super) fn of(head: &[u8]) -> Self {
        match head {
            head if head.starts_with(GZIP) => Self::Gzip,
            head if head.starts_with(ZSTD) => Self::Zstd,
            [0x50..=0x5f, rest @ ..] if rest.starts_with(SKIPPABLE) => Self::Zstd,
            _ => Self::None,
        }
    }
}

/// Whether more bytes are needed to tell.
fn is_open(head: &[u8]) -> bool {
    let begins = |magic: &[u8]| head.len() < magic.len() && magic.starts_with(head);
    let skippable = match head {
        [0x50..=0x5f, rest @ ..] => rest.len() < SKIPPABLE.len() && SKIPPABLE.starts_with(rest),
        _ => false,
    };
    begins(GZIP) || begins(ZSTD) || skippable
}

/// Decompresses what is compressed. Of a source that may wait no more is read than it takes
/// to tell.
pub(super) fn sniffed(mut read: Box<dyn Read + Send>, window: u32) -> io::Result<Box<dyn Read + Send>> {
    let mut head = [0; 4];
    let mut len = 0;
    while is_open(&head[..len]) {
        match read.read(&mut head[len..]) {
            Ok(0) => break,
            Ok(more) => len = (len + more).min(head.len()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let compression = Compression::of(&head[..len]);
    let whole = Cursor::new(head).take(len as u64).chain(read);
    decoded(Box::new(whole), compression, window)
}

/// Decompresses as it is read.
pub(super) fn decoded(
    read: Box<dyn Read + Send>,
    compression: Compression,
    window: u32,
) -> io::Result<Box<dyn Read + Send>> {
    Ok(match compression {
        Compression::None => read,
        Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(read)),
        Compression::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::new(Encoded { read, failed: false })?;
            decoder.window_log_max(window)?;
            Box::new(Zstd(decoder))
        }
    })
}

/// Says what helps against a window that is too large.
struct Zstd(zstd::stream::read::Decoder<'static, BufReader<Encoded>>);

/// What zstd calls such a window.
const WIDE: &str = "Frame requires too much memory";

impl Read for Zstd {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into).map_err(|error| {
            let text = error.to_string();
            match !self.0.get_ref().get_ref().failed && text.starts_with(WIDE) {
                true => io::Error::other(format!("{text}; let it have a larger window by `zstd_window`")),
                false => error,
            }
        })
    }
}

/// Remembers whether an error is its own, and not the decoder's.
struct Encoded {
    read: Box<dyn Read + Send>,
    failed: bool,
}

impl Read for Encoded {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.read.read(into);
        self.failed = read.is_err();
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_tell_and_no_more_are_waited_for() {
        assert_eq!(Compression::of(&[0x1f, 0x8b, 8, 0]), Compression::Gzip);
        assert_eq!(Compression::of(&[0x28, 0xb5, 0x2f, 0xfd]), Compression::Zstd);
        assert_eq!(Compression::of(&[0x5a, 0x2a, 0x4d, 0x18]), Compression::Zstd);
        for plain in [&b""[..], b"(abc", b"\x1f", b"Z*M"] {
            assert_eq!(Compression::of(plain), Compression::None);
        }
        assert!(is_open(b"") && is_open(b"\x1f") && is_open(b"(") && is_open(b"P*M"));
        assert!(!is_open(b"a") && !is_open(b"(\n") && !is_open(b"P\n") && !is_open(b"\x1f\x8b"));
    }
}
