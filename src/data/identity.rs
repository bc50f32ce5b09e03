//! Numbers that tell apart what records are made of. Positions have them, and so have snapshots.

use std::path::Path;

use super::random::mix;

/// One number of two, where it counts which is which.
pub(super) fn join(one: u64, other: u64) -> u64 {
    // Zeros would stay zeros.
    mix(mix(one.wrapping_add(0x9e37_79b9_7f4a_7c15)) ^ other)
}

/// A number of bytes.
pub(super) fn of_bytes(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let last = rest.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    join(words.fold(bytes.len() as u64, join), last)
}

/// A number of files' names below the folder that holds them all, which may be another tomorrow,
/// and of their order; of a single file, of its name alone.
pub(super) fn of_files<'a>(paths: impl Iterator<Item = &'a Path> + Clone) -> u64 {
    let above = folders_of_all(paths.clone());
    paths.fold(0, |files, path| {
        let parts = path.components().skip(above).map(|part| of_bytes(part.as_os_str().as_encoded_bytes()));
        join(files, parts.fold(0, join))
    })
}

/// How many of a path's components are the folder that holds all of the paths.
fn folders_of_all<'a>(paths: impl Iterator<Item = &'a Path>) -> usize {
    let mut folders = paths.map(|path| path.parent().unwrap_or(path).components());
    let first: Vec<_> = folders.next().into_iter().flatten().collect();
    folders.fold(first.len(), |all, folder| {
        first.iter().take(all).zip(folder).take_while(|(one, other)| **one == *other).count()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(paths: &[&str]) -> u64 {
        of_files(paths.iter().map(Path::new))
    }

    #[test]
    fn names_below_the_common_folder_and_their_order_count() {
        assert_eq!(of(&["/data/a/x", "/data/b/x"]), of(&["elsewhere/a/x", "elsewhere/b/x"]));
        assert_eq!(of(&["/data/a/x"]), of(&["x"]));
        let all = [
            of(&[]),
            of(&["x"]),
            of(&["x", "x"]),
            of(&["x", "y"]),
            of(&["y", "x"]),
            of(&["a/x", "y"]),
            of(&["a/x", "b/x"]),
            of(&["ax", "b/x"]),
            of(&["a", "x", "b/x"]),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(!all[..at].contains(one), "{at}");
        }
    }

    #[test]
    fn each_byte_counts_and_so_does_their_number() {
        let long = [0_u8; 20];
        let mut all: Vec<u64> = (0..20).map(|len| of_bytes(&long[..len])).collect();
        all.extend((0..20).map(|at| {
            let mut other = long;
            other[at] = 1;
            of_bytes(&other)
        }));
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
        assert_ne!(join(0, 1), join(1, 0));
        assert_ne!(join(join(0, 0), 0), join(0, 0));
    }
}
