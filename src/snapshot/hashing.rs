//! Checksums of file parts, on several threads where the part is long.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crc32fast::Hasher;

/// Bytes that are read and hashed at once.
pub(super) const BLOCK: usize = 1 << 17;

/// The least that is worth a thread.
const SHARE: u64 = 1 << 20;
/// More do not read faster; fewer leave a disk waiting.
const MOST: u64 = 4;

/// Hashes `length` bytes from `offset` on, with a block of memory per thread.
pub(super) fn checksum(file: &File, offset: u64, length: u64) -> io::Result<Hasher> {
    let each = share(length);
    let starts: Vec<u64> = (0..length).step_by(each.max(1) as usize).collect();
    joined(starts.into_iter().map(|start| {
        move || {
            let (mut hasher, mut at) = (Hasher::new(), offset + start);
            let end = offset + (start + each).min(length);
            let mut block = vec![0; BLOCK.min((end - at) as usize)];
            while at < end {
                let wanted = block.len().min((end - at) as usize);
                let Some(part) = block.get_mut(..wanted) else { break };
                file.read_exact_at(part, at)?;
                hasher.update(part);
                at += wanted as u64;
            }
            Ok(hasher)
        }
    }))
}

/// Fills `bytes` from `offset` on, and hashes them.
pub(super) fn read_into(file: &File, offset: u64, bytes: &mut [u8]) -> io::Result<Hasher> {
    let each = share(bytes.len() as u64).max(1) as usize;
    joined(bytes.chunks_mut(each).enumerate().map(|(number, bytes)| {
        move || {
            let (mut hasher, mut at) = (Hasher::new(), offset + (number * each) as u64);
            for block in bytes.chunks_mut(BLOCK) {
                file.read_exact_at(block, at)?;
                hasher.update(block);
                at += block.len() as u64;
            }
            Ok(hasher)
        }
    }))
}

/// Bytes for each thread.
fn share(length: u64) -> u64 {
    let threads = (length / SHARE).clamp(1, MOST);
    length.div_ceil(threads)
}

/// Runs the parts side by side, the first one here, and joins their sums in order.
fn joined<F>(parts: impl Iterator<Item = F>) -> io::Result<Hasher>
where
    F: FnOnce() -> io::Result<Hasher> + Send,
{
    let mut parts = parts;
    let Some(first) = parts.next() else { return Ok(Hasher::new()) };
    std::thread::scope(|scope| {
        let others: Vec<_> = parts.map(|part| scope.spawn(part)).collect();
        let mut whole = first()?;
        for other in others {
            let sum = other.join().map_err(|_| io::Error::other("a reading thread panicked"))?;
            whole.combine(&sum?);
        }
        Ok(whole)
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn parts_on_several_threads_have_the_sum_of_the_whole() {
        let bytes: Vec<u8> = (0..40_000_001u64).map(|n| ((n * 2_654_435_761) >> 13) as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        for (offset, length) in [(0, bytes.len()), (3, 33_000_000), (7, 5), (9, 0)] {
            let part = &bytes[offset..offset + length];
            let right = crc32fast::hash(part);
            assert_eq!(checksum(&file, offset as u64, length as u64).unwrap().finalize(), right);
            let mut read = vec![0; length];
            assert_eq!(read_into(&file, offset as u64, &mut read).unwrap().finalize(), right);
            assert!(read == part);
        }
        let beyond = checksum(&file, 0, bytes.len() as u64 + 1).map(|_| ()).unwrap_err();
        assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
    }
}
