//! What cannot be read, and how a stream ends by it.

use super::*;

#[test]
fn every_rank_hears_of_what_ends_the_data() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let packed = gzip(&numbered(0, 40));
    let path = write(&folder, "cut", &packed[..packed.len() - 4]);
    for (buffer, given) in [(1, 36), (8, 36), (100, 0)] {
        let mut all = Vec::new();
        for rank in 0..3 {
            let builder = shuffled(Lines::of_file(&path), 1, buffer).batch(2).rank(rank, 3);
            let builder = builder.tail(memfit::data::Tail::Drop);
            let (ids, error) = until_error(builder.build().unwrap());
            assert!(error.is_some(), "rank {rank}");
            all.extend(ids);
        }
        assert_eq!(all.len(), given);
    }
}

#[test]
fn files_that_are_not_there_or_no_files_are_errors() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "first", b"1\n2\n");
    let missing = folder.path().join("missing");
    for (path, text) in [(&missing, "No such file"), (&folder.path().to_path_buf(), "directory")] {
        let mut alone = loader(Lines::of_file(path)).build().unwrap();
        io_error(alone.next().unwrap().err(), "opening", path, text);
        let (ids, error) = until_error(loader(Lines::of_files([&first, path])).batch(5).build().unwrap());
        assert_eq!(ids, [1, 2]);
        io_error(error, "opening", path, text);
    }
}

#[test]
fn a_file_that_changes_underneath_is_an_error() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let content = numbered(0, 20_000);
    let path = write(&folder, "a", &content);
    let mut loader_ = loader(Lines::of_file(&path)).batch(100).build().unwrap();
    assert_eq!(epoch(&mut loader_).len(), 20_000);
    // Cut while the next epoch reads it.
    assert_eq!(read(&loader_.next().unwrap().unwrap().batch).len(), 100);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(200_000).unwrap();
    let (ids, error) = until_error(loader_);
    assert!(ids.len() < 10_000);
    io_error(error, "reading", &path, "at byte 200000, it had ");
    // Cut, then gone, between epochs.
    let mut loader = loader(Lines::of_file(&path)).batch(30_000).build().unwrap();
    let _ = epoch(&mut loader);
    write(&folder, "a", b"1\n");
    io_error(loader.next().unwrap().err(), "opening", &path, "the file has 2 bytes, it had 200000 bytes");
    assert!(loader.next().is_none());
    std::fs::remove_file(&path).unwrap();
    io_error(loader.next().unwrap().err(), "opening", &path, "No such file");
}

/// Records 0 to 4, of which 2 is bad, then what nothing can follow; `skip` is the trait's own.
struct Failing(i64);

impl Stream for Failing {
    type Record = i64;

    fn begin(&mut self, _: u64, _: Option<Mark>) -> memfit::Result<()> {
        self.0 = 0;
        Ok(())
    }

    fn next(&mut self) -> Option<memfit::Result<(i64, Origin)>> {
        self.0 += 1;
        match self.0 - 1 {
            2 => Some(Err(Error::data("bad"))),
            number @ 0..5 => Some(Ok((number, Origin::record(number as u64)))),
            5 => {
                let source = io::Error::other("gone");
                Some(Err(Error::Io { action: "reading", path: "it".into(), source }))
            }
            _ => None,
        }
    }
}

#[test]
fn a_stream_that_cannot_skip_tells_every_rank_how_it_ends() {
    let _guard = support::serial();
    for (rank, wanted) in [(0, vec![0, 4]), (1, vec![1, 3])] {
        let loader = Loader::stream(Failing(0)).map(|number, _| Ok(number)).rank(rank, 2);
        let (mut ids, error) = until_error(loader.batch(3).pass_over(9).build().unwrap());
        ids.sort_unstable();
        assert_eq!(ids, wanted);
        io_error(error, "reading", Path::new("it"), "gone");
    }
}

#[test]
fn settings_that_cannot_be_are_refused_before_anything_is_read() {
    let _guard = support::serial();
    let refused = |error: Option<Error>, text: &str| {
        let error = error.expect("an error");
        assert!(matches!(error, Error::Config { .. }) && error.to_string().contains(text), "{error}");
    };
    for window in [0, 5, 9, 32, 99] {
        let mut loader = loader(lines_of(b"1\n").zstd_window(window)).build().unwrap();
        refused(loader.next().unwrap().err(), "zstd_window: 2 to the");
        refused(Csv::of_file("nowhere").zstd_window(window).begin(0, None).err(), "zstd_window");
    }
    for lines in
        [lines_of(b"1\n").zstd_window(10), Lines::of_reader(Cursor::new(zstd(b"1\n"))).zstd_window(31)]
    {
        assert_eq!(epoch(&mut loader(lines).build().unwrap()), [1]);
    }
    for byte in [b'"', b'\n', b'\r'] {
        refused(Csv::of_file("nowhere").delimiter(byte).begin(0, None).err(), "Csv::delimiter");
    }
}

#[test]
fn memory_that_runs_out_is_told_as_that() {
    let _guard = support::serial();
    let lines = Lines::of_reader((&b"1\n2"[..]).chain(Fails(io::ErrorKind::OutOfMemory, "full")));
    let (_, error) = until_error(loader(lines).batch(1).build().unwrap());
    assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{error:?}");
    let csv = Csv::of_reader((&b"a\n1\n2"[..]).chain(Fails(io::ErrorKind::OutOfMemory, "full")));
    let (_, error) = until_error(Loader::stream(csv).map(|row, _| row_id(&row)).build().unwrap());
    assert!(matches!(error, Some(Error::OutOfMemory { .. })), "{error:?}");
}
