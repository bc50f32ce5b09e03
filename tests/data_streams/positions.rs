//! Runs that stop and resume, and positions of other data.

use super::*;

#[test]
fn a_run_resumes_with_exactly_the_records_that_remain() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = mixed(&folder);
    let one = numbered(0, 200);
    let plain = write(&folder, "plain", &one[..one.len() - 1]);
    let gz = write(&folder, "gz", &gzip(&one));
    let zst = write(&folder, "zst", &zstd(&one));
    for path in [&plain, &gz, &zst] {
        resumes_everywhere(&|batch, workers| loader(Lines::of_file(path)).batch(batch).workers(workers));
    }
    resumes_everywhere(&|batch, workers| {
        shuffled(Lines::of_file(&plain), 1, 32).batch(batch).workers(workers)
    });
    resumes_everywhere(&|batch, workers| loader(Lines::of_files(&files)).batch(batch).workers(workers));
    resumes_everywhere(&|batch, workers| {
        let lines = Lines::of_files(&files).shuffle_files(8).pass_over_empty();
        shuffled(lines, 2, 10).batch(batch).workers(workers)
    });
    let content: Arc<[u8]> = one.into();
    resumes_everywhere(&move |batch, workers| {
        let content = content.clone();
        let lines = Lines::with(move || Ok(Box::new(Steps(Cursor::new(content.clone()), 100))));
        loader(lines).batch(batch).workers(workers)
    });
}

/// Bytes that this process read by system calls, where the kernel counts them.
#[cfg(target_os = "linux")]
fn bytes_read() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/io").ok()?;
    text.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

#[test]
#[cfg(target_os = "linux")]
fn what_lies_before_a_mark_is_not_read_in_plain_files() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let mut content = Vec::new();
    for id in 0..8_000 {
        content.extend_from_slice(format!("{id} {}\n", "q".repeat(2_000)).as_bytes());
    }
    let path = write(&folder, "big", &content);
    let build = |shuffle: bool| {
        let lines = Lines::of_file(&path);
        let builder = if shuffle { shuffled(lines, 1, 400) } else { loader(lines) };
        builder.batch(100)
    };
    for shuffle in [false, true] {
        let mut first = build(shuffle).build().unwrap();
        let position = first.by_ref().take(77).map(|loaded| loaded.unwrap().position).last().unwrap();
        let Some(before) = bytes_read() else {
            eprintln!("skipped: this kernel counts no bytes that a process reads");
            return;
        };
        let mut resumed = build(shuffle).build().unwrap();
        resumed.seek(position).unwrap();
        assert_eq!(epoch(&mut resumed).len(), 300);
        // 300 of 8,000 records, the block of 400 that they are in, a buffer and the reading itself.
        let read = bytes_read().unwrap() - before;
        assert!((600_000..1_100_000).contains(&read), "{read} bytes of {}", content.len());
    }
}

#[test]
fn a_position_of_other_files_or_another_order_is_refused() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = mixed(&folder);
    let position_of = |lines: Lines| -> DataPosition {
        let mut loader = loader(lines).batch(60).build().unwrap();
        loader.by_ref().take(2).map(|loaded| loaded.unwrap().position).last().unwrap()
    };
    let position = position_of(Lines::of_files(&files));
    let refused = |lines: Lines| loader(lines).build().unwrap().seek(position).unwrap_err();
    let error = refused(Lines::of_files(&files).shuffle_files(1));
    assert!(matches!(&error, Error::State { .. }), "{error}");
    assert!(matches!(refused(Lines::of_files(&files[..2])), Error::State { .. }));
    assert!(matches!(refused(Lines::of_files(files.iter().rev())), Error::State { .. }));
    assert!(matches!(refused(Lines::of_files(&files).pass_over_empty()), Error::State { .. }));
    // The same names with other content: no line begins there.
    let other = tempfile::tempdir().unwrap();
    let others = mixed(&other);
    write(&other, "d", &gzip(&numbered(1102, 1150)));
    let error = refused(Lines::of_files(&others)).to_string();
    assert!(error.contains("no line begins at byte"), "{error}");
    write(&other, "d", &gzip(b"102\n"));
    let error = refused(Lines::of_files(&others)).to_string();
    assert!(error.contains("the data ends at byte 4"), "{error}");
    let mut beyond = position;
    (beyond.samples, beyond.mark) = (1_000, None);
    let error = loader(Lines::of_files(&files)).build().unwrap().seek(beyond).unwrap_err().to_string();
    assert!(error.contains("record 1000 of a stream of 200"), "{error}");
}

#[test]
fn what_can_be_read_once_says_so_in_a_second_epoch() {
    let _guard = support::serial();
    let mut once = loader(lines_of(b"1\n2\n")).batch(2).build().unwrap();
    assert_eq!(epoch(&mut once), [1, 2]);
    let error = once.next().unwrap().unwrap_err();
    assert!(matches!(error, Error::CallOrder { .. }) && error.to_string().contains("`with`"), "{error}");
    let mut with = loader(Lines::with(|| Ok(Box::new(&b"1\n2\n"[..])))).batch(2).build().unwrap();
    assert_eq!((epoch(&mut with), epoch(&mut with)), (vec![1, 2], vec![1, 2]));
}

#[test]
fn a_run_resumes_with_every_record_once_after_a_file_is_repaired() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "first", &numbered(0, 10));
    let packed = gzip(&numbered(10, 400));
    for (buffer, cut) in [(1, 0), (1, 11), (1, 22), (1, 33), (30, 0), (1_000, 0)] {
        let path = write(&folder, "second", &packed[..packed.len() * 2 / 3 - cut]);
        let build = || shuffled(Lines::of_files([&first, &path]), 4, buffer).batch(8).build().unwrap();
        let (mut damaged, mut before, mut errors) = (build(), Vec::new(), 0);
        let mut position = damaged.data_position();
        for loaded in damaged.by_ref() {
            match loaded {
                Ok(loaded) => {
                    position = loaded.position;
                    before.extend(read(&loaded.batch));
                }
                Err(_) => errors += 1,
            }
        }
        assert!(errors == 1 && before.len() % buffer == 0 && before.is_empty() == (buffer == 1_000));
        write(&folder, "second", &packed);
        let mut repaired = build();
        repaired.seek(position).unwrap();
        let ids = [before, epoch(&mut repaired)].concat();
        assert_eq!(ids, epoch(&mut shuffled(Lines::of_files([&first, &path]), 4, buffer).build().unwrap()));
        assert_eq!(sorted(ids), (0..400).collect::<Vec<_>>());
    }
}

/// The samples that fill no batch of every rank are left out of an epoch that ends, not of one that breaks off.
#[test]
fn a_break_among_the_last_samples_loses_none_of_them() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let text = numbered(0, 48);
    // Whole lines, and one that ends in the middle of nothing: the file is no longer what it says.
    let whole = gzip(&text);
    for (buffer, world, batch) in [(1, 3, 2), (8, 3, 2), (8, 1, 5), (16, 2, 3)] {
        let path = write(&folder, "lines", &[&gzip(&numbered(0, 40))[..], b"no gzip"].concat());
        let build = |rank| {
            let loader = shuffled(Lines::of_file(&path), 4, buffer).batch(batch).rank(rank, world);
            loader.tail(Tail::Drop).build().unwrap()
        };
        let (mut before, mut positions) = (Vec::new(), Vec::new());
        for rank in 0..world {
            let mut damaged = build(rank);
            let mut errors = 0;
            while errors == 0 {
                match damaged.next().unwrap() {
                    Ok(loaded) => before.extend(read(&loaded.batch)),
                    Err(_) => errors += 1,
                }
            }
            positions.push(damaged.data_position());
        }
        assert!(positions.iter().all(|position| *position == positions[0]), "{positions:?}");
        assert_eq!(positions[0].samples, before.len() as u64, "{buffer} {world} {batch}");
        write(&folder, "lines", &whole);
        for (rank, position) in positions.into_iter().enumerate() {
            let mut repaired = build(rank);
            repaired.seek(position).unwrap();
            before.extend(epoch(&mut repaired));
        }
        let wanted = 48 - 48 % (world * batch);
        let ids = sorted(before);
        assert_eq!(ids.len(), wanted, "{buffer} {world} {batch}");
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
    }
}

#[test]
fn a_mark_behind_its_position_is_refused() {
    let _guard = support::serial();
    let mut whole = shuffled(lines_of(b"0\n1\n2\n3\n"), 4, 1).batch(1).build().unwrap();
    let mut position = whole.next().unwrap().unwrap().position;
    position.samples = 0;
    let error = whole.seek(position).unwrap_err().to_string();
    assert!(error.contains("is at record 0, and its mark at record 1"), "{error}");
}

#[test]
fn files_are_told_apart_by_their_names_below_the_folder_of_all() {
    let _guard = support::serial();
    let lines = |paths: &[&str]| Lines::of_files(paths).order();
    assert_eq!(lines(&["/x/s0/part", "/x/s1/part"]), lines(&["/y/z/s0/part", "/y/z/s1/part"]));
    assert_ne!(lines(&["/x/s0/part", "/x/s1/part"]), lines(&["/x/s1/part", "/x/s0/part"]));
    assert_ne!(lines(&["/x/ab", "/x/c"]), lines(&["/x/a", "/x/bc"]));
    assert_ne!(lines(&["/x/a/b"; 1]), lines(&["/x/a/c"; 1]));
    assert_eq!(lines(&["/x/a"]), lines(&["b/a"]));
    assert_eq!(lines(&["a", "b"]), lines(&["/x/a", "/x/b"]));
    assert_ne!(lines(&["x/a", "b"]), lines(&["a", "b"]));
    let csv = || Csv::of_file("/x/a");
    let numbers = [
        lines(&["/x/a"]),
        Lines::of_file("/x/a").pass_over_empty().order(),
        csv().order(),
        csv().no_header().order(),
        csv().delimiter(b';').order(),
        csv().delimiter(0).order(),
        csv().delimiter(0).no_header().order(),
        csv().shuffle_files(0).order(),
    ];
    for (at, number) in numbers.iter().enumerate() {
        assert!(!numbers[..at].contains(number), "{at}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_run_resumes_on_pipes_that_bring_the_same_again() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path = fifo(&folder);
    let write = |content: Vec<u8>| {
        let to = path.clone();
        // Who reads may leave before the end.
        std::thread::spawn(move || drop(std::fs::write(to, content)))
    };
    for pack in [|bytes: &[u8]| bytes.to_vec(), gzip] {
        let content = pack(&numbered(0, 200));
        let writer = write(content.clone());
        let mut first = loader(Lines::of_file(&path)).batch(9).build().unwrap();
        let position = first.by_ref().take(7).map(|loaded| loaded.unwrap().position).last().unwrap();
        drop(first);
        writer.join().unwrap();
        let writer = write(content);
        let mut resumed = loader(Lines::of_file(&path)).batch(5).workers(1).build().unwrap();
        resumed.seek(position).unwrap();
        assert_eq!(epoch(&mut resumed), (63..200).collect::<Vec<_>>());
        writer.join().unwrap();
        let writer = write(pack(&numbered(1_000, 1_200)));
        let error = loader(Lines::of_file(&path)).build().unwrap().seek(position).unwrap_err().to_string();
        assert!(error.contains("no line begins at byte"), "{error}");
        writer.join().unwrap();
    }
}
