//! Compressed data: damage, memory, limits.

use super::*;

fn inner(error: &Error) -> (&Path, &Error) {
    let Error::Io { path, source, .. } = error else { panic!("{error:?}") };
    (path, source.get_ref().unwrap().downcast_ref().unwrap())
}

#[test]
fn compressed_data_cut_anywhere_is_an_error_after_the_records_before() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let content = numbered(0, 40);
    for packed in [gzip(&content), zstd(&content)] {
        for end in 5..packed.len() {
            let path = write(&folder, "cut", &packed[..end]);
            let (ids, error) = until_error(loader(Lines::of_file(&path)).batch(3).build().unwrap());
            let error = error.unwrap_or_else(|| panic!("{end} of {} bytes passed", packed.len()));
            assert_eq!(ids, (0..ids.len() as i64).collect::<Vec<_>>());
            let (file, inner) = inner(&error);
            let Error::Data { origin, .. } = inner else { panic!("{inner:?}") };
            assert_eq!((file, origin.record), (path.as_path(), Some(ids.len() as u64)));
            assert_eq!(origin.offset, Some(numbered(0, ids.len() as u64).len() as u64));
        }
        let path = write(&folder, "cut", &packed[..packed.len() - 6]);
        let (ids, error) =
            until_error(shuffled(Lines::of_file(&path), 1, 8).batch(3).workers(2).build().unwrap());
        assert!(error.is_some() && sorted(ids.clone()) == (0..ids.len() as i64).collect::<Vec<_>>());
    }
}

#[test]
fn a_bit_flipped_in_compressed_data_is_an_error_never_a_wrong_end() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let content = numbered(0, 40);
    for packed in [gzip(&content), zstd(&content)] {
        // Behind the headers, some bits of which say nothing of the content.
        let mut found = 0;
        for at in 10..packed.len() {
            let mut damaged = packed.clone();
            damaged[at] ^= 0x10;
            let path = write(&folder, "flipped", &damaged);
            match until_error(loader(Lines::of_file(&path)).pass_over(1_000).build().unwrap()) {
                (_, Some(error)) => {
                    assert!(matches!(error, Error::Io { .. }), "{error}");
                    found += 1;
                }
                // The same bytes copied from elsewhere.
                (ids, None) => assert_eq!(ids, (0..40).collect::<Vec<_>>(), "byte {at}"),
            }
        }
        assert!(found > (packed.len() - 10) * 9 / 10, "{found} of {}", packed.len() - 10);
    }
}

/// Case 62, for streams: 64 MiB through a budget of 16 MiB.
#[test]
#[cfg(target_os = "linux")]
fn compressed_data_takes_no_memory_of_its_length() {
    let _guard = support::serial();
    let _pages = SmallPages::hold();
    let folder = tempfile::tempdir().unwrap();
    let lines = "0 some text that is compressed\n".repeat(1 << 16);
    // As many members, or frames, as it takes.
    let times = (64 << 20) / lines.len() + 1;
    for (name, member) in [("gz", gzip(lines.as_bytes())), ("zst", zstd(lines.as_bytes()))] {
        let path = write(&folder, name, &member.repeat(times));
        let mut loader = shuffled(Lines::of_file(path), 1, 1_000).batch(500).workers(2);
        loader = loader.prefetch(2);
        let mut loader = loader.build().unwrap();
        let before = anonymous();
        let (mut records, mut most) = (0, 0);
        for loaded in &mut loader {
            records += loaded.unwrap().batch.size()[0];
            if records % 100_000 == 0 {
                most = most.max(anonymous());
            }
        }
        assert_eq!(records, (1 << 16) * times as i64);
        assert!(most > 0 && most.saturating_sub(before) < 16 << 20, "{} bytes for {name}", most - before);
    }
}

/// Case 62: a line without an end, compressed a thousandfold.
#[test]
#[cfg(target_os = "linux")]
fn a_compressed_bomb_meets_the_limit_of_a_line() {
    let _guard = support::serial();
    let _pages = SmallPages::hold();
    let folder = tempfile::tempdir().unwrap();
    let (zeros, times) = (vec![b'0'; 1 << 20], 64);
    for (name, member) in [("gz", gzip(&zeros)), ("zst", zstd(&zeros))] {
        let path = write(&folder, name, &[member.repeat(times), gzip_or_zstd(name, b"\n7\n")].concat());
        let before = anonymous();
        let mut loader = loader(Lines::of_file(path).max_line(1 << 20)).batch(1).build().unwrap();
        let error = loader.next().unwrap().unwrap_err().to_string();
        let after = anonymous();
        assert!(error.contains("a line of 67108864 bytes; at most 1048576"), "{error}");
        assert!(after.saturating_sub(before) < 12 << 20, "{} bytes", after - before);
        assert_eq!(epoch(&mut loader), [7]);
    }
    // A window that a frame may not have.
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(25).unwrap();
    encoder.write_all(b"1\n2\n").unwrap();
    let path = write(&folder, "wide", &encoder.finish().unwrap());
    let (_, error) = until_error(loader(Lines::of_file(&path)).build().unwrap());
    let error = error.unwrap().to_string();
    assert!(error.contains("zstd_window"), "{error}");
    assert_eq!(epoch(&mut loader(Lines::of_file(&path).zstd_window(25)).build().unwrap()), [1, 2]);
}

#[test]
fn only_zstd_is_advised_about_its_window() {
    let _guard = support::serial();
    let text = "Frame requires too much memory for decoding";
    let packed = zstd(&numbered(0, 1_000));
    for begin in [b"1\n".to_vec(), packed[..packed.len() / 2].to_vec()] {
        let read = Cursor::new(begin).chain(Fails(io::ErrorKind::Other, text));
        let (_, error) = until_error(loader(Lines::of_reader(read)).build().unwrap());
        let error = error.unwrap().to_string();
        assert!(error.contains(text) && !error.contains("zstd_window"), "{error}");
    }
}
