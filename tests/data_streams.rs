//! Lines and rows that come one after another: from files, compressed files, pipes and readers.

mod support;

use std::io::{self, Cursor, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memfit::data::{
    Csv, Fields, Line, Lines, Loader, LoaderBuilder, Origin, Row, Stream, StreamJob, json, numbers,
};
use memfit::tch::Tensor;
use memfit::{DataPosition, Error, Mark};
use proptest::prelude::*;
use support::process::{SmallPages, anonymous, is_alone};
use support::waiting::{ends, until_others_wait, until_others_work};
use tempfile::TempDir;

type Ids = Loader<Tensor>;

fn write(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.include_checksum(true).unwrap();
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Lines `from..to` of unequal length, each beginning with its number.
fn numbered(from: u64, to: u64) -> Vec<u8> {
    (from..to)
        .map(|id| format!("{id} {}\n", "x".repeat((id * 7 % 50) as usize)))
        .collect::<String>()
        .into_bytes()
}

fn id(line: &Line) -> memfit::Result<i64> {
    let text = line.text()?;
    let number = text.split(' ').next().unwrap_or_default();
    number.parse().map_err(|_| Error::data(format!("`{number}` is no number")))
}

fn loader(lines: Lines) -> LoaderBuilder<StreamJob<Line>, i64> {
    Loader::stream(lines).map(|line, _| id(&line))
}

fn shuffled(lines: Lines, seed: u64, buffer: usize) -> LoaderBuilder<StreamJob<Line>, i64> {
    Loader::stream(lines).shuffle(seed).shuffle_buffer(buffer).map(|line, _| id(&line))
}

fn read(batch: &Tensor) -> Vec<i64> {
    Vec::try_from(batch).unwrap()
}

/// An epoch's records.
fn epoch(loader: &mut Ids) -> Vec<i64> {
    loader.by_ref().flat_map(|loaded| read(&loaded.unwrap().batch)).collect()
}

/// The raw lines of one epoch: bytes, or what is wrong.
fn raw(lines: Lines) -> Vec<Result<Vec<u8>, String>> {
    let mut lengths = Vec::new();
    let builder = Loader::stream(lines).map(|line, _| Ok(line.bytes().to_vec())).batch(1);
    for loaded in builder.collate_with(|lines: &[&Vec<u8>]| Ok(bytes(lines[0]))).build().unwrap() {
        lengths.push(loaded.map(|loaded| back(&loaded.batch)).map_err(|error| error.to_string()));
    }
    lengths
}

/// A batch of one line; the first byte keeps empty lines from being empty tensors.
fn bytes(line: &[u8]) -> Tensor {
    Tensor::from_slice(&[b"!", line].concat())
}

fn back(batch: &Tensor) -> Vec<u8> {
    Vec::<u8>::try_from(batch).unwrap()[1..].to_vec()
}

fn lines_of(bytes: &'static [u8]) -> Lines {
    Lines::of_reader(bytes)
}

fn ok(lines: &[&str]) -> Vec<Result<Vec<u8>, String>> {
    lines.iter().map(|line| Ok(line.as_bytes().to_vec())).collect()
}

#[test]
fn line_ends_and_empty_lines_are_as_documented() {
    let _guard = support::serial();
    assert_eq!(raw(lines_of(b"a\nb\r\n\n\r\nc\rd\ne\r")), ok(&["a", "b", "", "", "c\rd", "e\r"]));
    assert_eq!(raw(lines_of(b"a\nb\r\n\n\r\nc").pass_over_empty()), ok(&["a", "b", "c"]));
    assert_eq!(raw(lines_of(b"\n\n\n")), ok(&["", "", ""]));
    assert_eq!(raw(lines_of(b"\n\n\n").pass_over_empty()), ok(&[]));
    assert_eq!(raw(lines_of(b"")), ok(&[]));
    assert_eq!(raw(Lines::of_files(Vec::<PathBuf>::new())), ok(&[]));
}

#[test]
fn text_says_where_it_is_none() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a.txt", b"1\nab\xffc\n3\n");
    let mut loader = Loader::stream(Lines::of_file(path)).map(|line, _| id(&line)).batch(3).build().unwrap();
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("record 1 at byte 2 of ") && error.contains("no UTF-8 at byte 2"), "{error}");
    assert_eq!(read(&loader.next().unwrap().unwrap().batch), [1, 3]);
}

proptest! {
    #![proptest_config(support::random::cases(64))]

    /// Against `split`, through every kind of source, in reads of any size.
    #[test]
    fn any_bytes_are_the_lines_that_split_finds(
        content in prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), any::<u8>()], 0..300),
        step in 1_usize..40,
    ) {
        let _guard = support::serial();
        let content = [b"-".to_vec(), content].concat();
        let mut wanted: Vec<Vec<u8>> = content.split(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
        let last = wanted.pop().unwrap();
        for line in &mut wanted {
            if line.ends_with(b"\r") {
                line.pop();
            }
        }
        if !last.is_empty() {
            wanted.push(last);
        }
        let wanted: Vec<_> = wanted.into_iter().map(Ok).collect();
        prop_assert_eq!(&raw(Lines::of_reader(Steps(Cursor::new(content.clone()), step))), &wanted);
        prop_assert_eq!(&raw(Lines::of_reader(Steps(Cursor::new(gzip(&content)), step))), &wanted);
        prop_assert_eq!(&raw(Lines::of_reader(Steps(Cursor::new(zstd(&content)), step))), &wanted);
    }
}

/// Reads of at most so many bytes, every third of which is interrupted.
struct Steps<R>(R, usize);

impl<R: Read> Read for Steps<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.1 += 1 << 32;
        if (self.1 >> 32).is_multiple_of(3) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let most = into.len().min(self.1 as u32 as usize);
        self.0.read(&mut into[..most])
    }
}

#[test]
fn a_line_that_is_too_long_is_one_bad_record_and_the_stream_goes_on() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let long = "y".repeat(300_000);
    let fits = "z".repeat(1000);
    let text = format!("1\n{fits}\n{fits}\r\n{fits}-\n{long}\n5\n{long}");
    let path = write(&folder, "long.txt", text.as_bytes());
    let found = raw(Lines::of_file(&path).max_line(1000));
    assert_eq!(found.len(), 7);
    assert_eq!(found[0], Ok(b"1".to_vec()));
    assert_eq!((&found[1], &found[2]), (&Ok(fits.clone().into_bytes()), &Ok(fits.into_bytes())));
    let at = |record: usize, offset: usize, len: usize| {
        let file = path.display();
        Err(format!("record {record} at byte {offset} of {file}: a line of {len} bytes; at most 1000"))
    };
    assert_eq!(found[3], at(3, 2005, 1001));
    assert_eq!(found[4], at(4, 3007, 300_000));
    assert_eq!(found[5], Ok(b"5".to_vec()));
    assert_eq!(found[6], at(6, 303_010, 300_000));
    let mut passing = loader(Lines::of_file(&path).max_line(10)).pass_over(10).batch(10).build().unwrap();
    assert_eq!(epoch(&mut passing), [1, 5]);
    assert_eq!(passing.passed_over(), 5);
}

/// Files of 101, 0, 1 and 98 lines: plain, empty, gzip of two members, zstd of two frames.
fn mixed(folder: &TempDir) -> Vec<PathBuf> {
    let halves = |from, to, pack: fn(&[u8]) -> Vec<u8>| -> Vec<u8> {
        let middle = (from + to) / 2;
        [pack(&numbered(from, middle)), pack(&numbered(middle, to))].concat()
    };
    vec![
        write(folder, "a", &numbered(0, 101)),
        write(folder, "b", b""),
        write(folder, "c", &gzip(b"101 last")),
        write(folder, "d", &halves(102, 150, gzip)),
        write(folder, "e", &halves(150, 200, zstd)),
    ]
}

fn sorted(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids
}

/// Case 61.
#[test]
fn every_record_comes_once_in_an_order_that_workers_do_not_change() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = mixed(&folder);
    let all: Vec<i64> = (0..200).collect();
    let build = |workers, shuffle: bool| {
        let lines = Lines::of_files(&files);
        let builder = if shuffle { shuffled(lines.shuffle_files(3), 5, 16) } else { loader(lines) };
        builder.batch(7).workers(workers).prefetch(3).build().unwrap()
    };
    let mut plain = build(0, false);
    assert_eq!((epoch(&mut plain), epoch(&mut plain)), (all.clone(), all.clone()));
    let mut shuffled = build(0, true);
    let (first, second) = (epoch(&mut shuffled), epoch(&mut shuffled));
    assert!(first != second && first != all);
    assert_eq!((sorted(first.clone()), sorted(second.clone())), (all.clone(), all.clone()));
    for workers in [1, 4] {
        assert_eq!(epoch(&mut build(workers, false)), all);
        let mut again = build(workers, true);
        assert_eq!((epoch(&mut again), epoch(&mut again)), (first.clone(), second.clone()));
    }
}

/// What remains, by way of a second resume after the first batch.
fn twice(resumed: &mut Ids, again: impl FnOnce() -> Ids) -> Vec<i64> {
    let Some(loaded) = resumed.next() else { return Vec::new() };
    let loaded = loaded.unwrap();
    let mut again = again();
    again.seek(loaded.position).unwrap();
    let ids = [read(&loaded.batch), epoch(&mut again)].concat();
    assert_eq!(ids, [read(&loaded.batch), epoch(resumed)].concat());
    ids
}

/// Case 56: from every batch's position, by another batch size, other workers, then by two ranks.
fn resumes_everywhere<R: Send + Sync + 'static>(
    build: &dyn Fn(usize, usize) -> LoaderBuilder<StreamJob<R>, i64>,
) {
    let mut whole = build(7, 0).build().unwrap();
    let _ = epoch(&mut whole);
    let mut seen = vec![(whole.position(), 0)];
    let mut all = Vec::new();
    for loaded in &mut whole {
        let loaded = loaded.unwrap();
        all.extend(read(&loaded.batch));
        seen.push((loaded.position, all.len()));
    }
    assert_eq!(sorted(all.clone()), (0..200).collect::<Vec<_>>());
    for (at, (position, consumed)) in seen.into_iter().enumerate() {
        let rest = &all[consumed..];
        let (batch, workers) = ([7, 3, 64][at % 3], at % 3);
        let mut resumed = build(batch, workers).build().unwrap();
        resumed.seek(position).unwrap();
        let twice = twice(&mut resumed, || build(64, 0).build().unwrap());
        assert_eq!(twice, rest, "from {position:?}");
        if at % 4 != 0 {
            continue;
        }
        let of_rank = |rank| {
            let mut ranked = build(batch, workers).rank(rank, 2).build().unwrap();
            ranked.seek(position).unwrap();
            epoch(&mut ranked)
        };
        let (first, second) = (of_rank(0), of_rank(1));
        let dealt = |rank: usize| rest.iter().copied().skip(rank).step_by(2).collect::<Vec<_>>();
        assert_eq!((first, second), (dealt(0), dealt(1)), "from {position:?}");
    }
}

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

/// A reader that counts.
struct Counted(Cursor<Vec<u8>>, Arc<AtomicU64>);

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = self.0.read(into)?;
        self.1.fetch_add(len as u64, Ordering::Relaxed);
        Ok(len)
    }
}

#[test]
fn a_reader_is_read_ahead_by_prefetch_and_a_buffer_only() {
    let _guard = support::serial();
    let read = Arc::new(AtomicU64::new(0));
    let content: Vec<u8> =
        (0..20_000).flat_map(|id| format!("{id} {}\n", "r".repeat(90)).into_bytes()).collect();
    let total = content.len() as u64;
    let lines = Lines::of_reader(Counted(Cursor::new(content), read.clone()));
    let mut loader = loader(lines).batch(10).workers(2).build().unwrap();
    let _ = loader.next().unwrap().unwrap();
    until_others_wait();
    let ahead = read.load(Ordering::Relaxed);
    assert!(ahead <= 2 * (128 << 10) && ahead < total, "{ahead} of {total}");
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

/// What comes until the epoch ends: records, then the error, told once.
fn until_error(mut loader: Ids) -> (Vec<i64>, Option<Error>) {
    let (mut ids, mut found) = (Vec::new(), None);
    for loaded in loader.by_ref() {
        match loaded {
            Ok(loaded) => {
                assert!(found.is_none(), "a batch after {found:?}");
                ids.extend(read(&loaded.batch));
            }
            Err(error) => assert!(found.replace(error).is_none(), "two errors"),
        }
    }
    (ids, found)
}

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
fn a_run_resumes_with_every_record_once_after_a_file_is_repaired() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "first", &numbered(0, 10));
    let packed = gzip(&numbered(10, 400));
    for (buffer, cut) in [(1, 0), (1, 11), (1, 22), (1, 33), (30, 0), (1_000, 0)] {
        let path = write(&folder, "second", &packed[..packed.len() * 2 / 3 - cut]);
        let build = || shuffled(Lines::of_files([&first, &path]), 4, buffer).batch(8).build().unwrap();
        let (mut damaged, mut before, mut errors) = (build(), Vec::new(), 0);
        let mut position = damaged.position();
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

/// Each in its block, a third of the block away from its place in the stream on average.
#[test]
fn the_shuffle_mixes_each_block_evenly_and_nothing_across() {
    let _guard = support::serial();
    let ids = epoch(
        &mut shuffled(Lines::of_reader(Cursor::new(numbered(0, 20_000))), 1, 200).batch(64).build().unwrap(),
    );
    assert_eq!(sorted(ids.clone()), (0..20_000).collect::<Vec<_>>());
    assert!(ids.iter().enumerate().all(|(place, id)| place as i64 / 200 == id / 200));
    let way: i64 = ids.iter().enumerate().map(|(place, id)| (place as i64 - id).abs()).sum();
    // Five standard errors: a way deviates by 200/√18.
    assert!((way as f64 / 20_000.0 - 200.0 / 3.0).abs() < 5.0 * 47.1 / 141.0);
}

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

fn gzip_or_zstd(name: &str, bytes: &[u8]) -> Vec<u8> {
    if name == "gz" { gzip(bytes) } else { zstd(bytes) }
}

fn fifo(folder: &TempDir) -> PathBuf {
    let path = folder.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// Takes some records, lets the workers come to where they are to be left, and drops the loader.
fn dropped(lines: Lines, records: usize, come: fn()) {
    let mut loader = loader(lines).workers(2).build().unwrap();
    for _ in 0..records {
        loader.next().unwrap().unwrap();
    }
    come();
    ends("the drop of a loader", || drop(loader));
}

fn dropped_in_silence(lines: Lines, records: usize) {
    dropped(lines, records, until_others_wait);
}

/// Case 60.
#[test]
fn dropping_a_loader_leaves_a_silent_pipe_at_once() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "first", b"1\n2\n");
    // Nobody writes to it.
    dropped_in_silence(Lines::of_files([first, fifo(&folder)]), 2);
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"1\n2\n3").unwrap();
    dropped_in_silence(Lines::of_pipe(reader), 2);
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(&[gzip(b"1\n2\n"), gzip(b"3")[..12].to_vec()].concat()).unwrap();
    dropped_in_silence(Lines::of_pipe(reader), 2);
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"a\n1\n").unwrap();
    let mut rows = Loader::stream(Csv::of_pipe(reader)).map(numbers::<f32>(..)).workers(1).build().unwrap();
    rows.next().unwrap().unwrap();
    until_others_wait();
    ends("the drop of a loader of rows", || drop(rows));
    drop(writer);
}

#[test]
fn going_to_a_position_waits_for_no_writer() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let silent = fifo(&folder);
    ends("going to a position", || {
        let mut loader = loader(Lines::of_file(silent)).workers(1).build().unwrap();
        loader.seek(DataPosition::default()).unwrap();
    });
}

/// A line that never ends has no read that waits: it ends all the same.
#[test]
#[cfg(target_os = "linux")]
fn dropping_a_loader_ends_a_line_without_end() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "first", b"1\n");
    dropped(Lines::of_files([first.clone(), "/dev/zero".into()]), 1, until_others_work);
    let sparse = folder.path().join("sparse");
    if std::fs::File::create(&sparse).unwrap().set_len(1 << 40).is_err() {
        eprintln!("skipped: no sparse file of a terabyte in {}", folder.path().display());
        return;
    }
    dropped(Lines::of_files([first, sparse]), 1, until_others_work);
}

struct Silent(std::sync::mpsc::Receiver<()>);

impl Read for Silent {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.recv().map_or(Ok(0), |()| {
            into[..2].copy_from_slice(b"1\n");
            Ok(2)
        })
    }
}

#[test]
fn a_reader_that_waits_is_left_behind() {
    let _guard = support::serial();
    let (more, silent) = std::sync::mpsc::channel();
    more.send(()).unwrap();
    dropped_in_silence(Lines::of_reader(Silent(silent)), 1);
    drop(more);
}

/// While nobody reads, the writer waits, and nothing is piled up.
#[test]
#[cfg(target_os = "linux")]
fn a_slow_consumer_stops_the_writer_of_a_pipe() {
    let _guard = support::serial();
    let _pages = SmallPages::hold();
    let folder = tempfile::tempdir().unwrap();
    let path = fifo(&folder);
    let written = Arc::new(AtomicU64::new(0));
    let (to, count) = (path.clone(), written.clone());
    let writer = std::thread::spawn(move || {
        let mut pipe = std::fs::OpenOptions::new().write(true).open(to).unwrap();
        let filler = "w".repeat(1_000);
        for id in 0..64_000 {
            let line = format!("{id} {filler}\n");
            pipe.write_all(line.as_bytes()).unwrap();
            count.fetch_add(line.len() as u64, Ordering::Relaxed);
        }
    });
    let mut loader = loader(Lines::of_file(path)).batch(100).workers(2).build().unwrap();
    let _ = loader.next().unwrap().unwrap();
    until_others_wait();
    let (before, ahead) = (anonymous(), written.load(Ordering::Relaxed));
    // Three batches of 100 KB, a buffer, and what a pipe holds.
    assert!(ahead < 1 << 20, "{ahead} bytes were written");
    assert_eq!(epoch(&mut loader), (100..64_000).collect::<Vec<_>>());
    assert!(anonymous().saturating_sub(before) < 8 << 20);
    writer.join().unwrap();
}

#[test]
fn a_writer_that_dies_ends_the_epoch_with_what_it_wrote() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let (reader, mut writer) = io::pipe().unwrap();
    writer.write_all(b"1\n2\n3 and so").unwrap();
    drop(writer);
    assert_eq!(epoch(&mut loader(Lines::of_pipe(reader)).workers(1).build().unwrap()), [1, 2, 3]);
    // A named pipe is opened anew by each epoch.
    let path = fifo(&folder);
    let mut again = loader(Lines::of_file(&path)).batch(5).workers(1).build().unwrap();
    for text in ["1\n2", "3\n"] {
        let to = path.clone();
        let writer = std::thread::spawn(move || std::fs::write(to, text).unwrap());
        assert_eq!(epoch(&mut again), if text == "3\n" { vec![3] } else { vec![1, 2] });
        writer.join().unwrap();
    }
    let mut child =
        Command::new("printf").arg("7\\n8\\n").stdout(std::process::Stdio::piped()).spawn().unwrap();
    let output = child.stdout.take().unwrap();
    assert_eq!(epoch(&mut loader(Lines::of_pipe(output)).build().unwrap()), [7, 8]);
    child.wait().unwrap();
}

#[test]
fn an_open_file_is_read_from_where_it_stands_and_so_is_the_standard_input() {
    let _guard = support::serial();
    if std::env::var_os("MEMFIT_READS_STDIN").is_some() {
        let ids = epoch(&mut loader(Lines::stdin().unwrap()).workers(1).build().unwrap());
        assert_eq!(ids, (10..500).collect::<Vec<_>>());
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a", &numbered(0, 500));
    let open = || {
        let mut file = std::fs::File::open(&path).unwrap();
        file.read_exact(&mut vec![0; numbered(0, 10).len()]).unwrap();
        file
    };
    assert_eq!(epoch(&mut loader(Lines::of_pipe(open())).build().unwrap()), (10..500).collect::<Vec<_>>());
    let name = "an_open_file_is_read_from_where_it_stands_and_so_is_the_standard_input";
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", name]).env("MEMFIT_READS_STDIN", "1").stdin(open());
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn io_error(error: Option<Error>, action: &str, path: &Path, text: &str) {
    let error = error.expect("an error");
    let Error::Io { action: found, path: at, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*found, at.as_path()), (action, path));
    assert!(error.to_string().contains(text), "{error}");
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

#[test]
fn json_is_made_on_the_workers_and_its_errors_say_where() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path =
        write(&folder, "a.jsonl", b"{\"x\": [1, 2], \"y\": 3}\n{\"x\": [1, }\n\n{\"x\": [4, 5], \"y\": 6}");
    #[derive(serde::Deserialize)]
    struct Point {
        x: Vec<f32>,
        y: i64,
    }
    let points =
        Loader::stream(Lines::of_file(&path)).map(json::<Point>()).map(|point, _| Ok((point.x, point.y)));
    let mut points = points.batch(4).workers(2).build().unwrap();
    let texts: Vec<_> = (0..2).map(|_| points.next().unwrap().unwrap_err().to_string()).collect();
    let file = path.display();
    let wanted = format!("record 1 at byte 22 of {file}: column 11: expected value");
    assert_eq!(texts[0], wanted);
    assert!(texts[1].starts_with(&format!("record 2 at byte 34 of {file}: column 0: EOF")), "{}", texts[1]);
    let (x, y) = points.next().unwrap().unwrap().batch;
    assert_eq!((support::values(&x), support::values(&y)), (vec![1.0, 2.0, 4.0, 5.0], vec![3.0, 6.0]));
    let values = Loader::stream(lines_of(b"{\"n\": 1}\n{\"n\": 2}\n")).map(json::<serde_json::Value>());
    let mut values = values.map(|value, _| Ok(value["n"].as_i64().unwrap_or(-1))).batch(2).build().unwrap();
    assert_eq!(epoch(&mut values), [1, 2]);
}

fn rows(csv: Csv) -> LoaderBuilder<StreamJob<Row>, Vec<f32>> {
    Loader::stream(csv).map(numbers(..))
}

fn all(loader: LoaderBuilder<StreamJob<Row>, Vec<f32>>) -> (Vec<f64>, Vec<String>) {
    let (mut values, mut errors) = (Vec::new(), Vec::new());
    for loaded in loader.build().unwrap() {
        match loaded {
            Ok(loaded) => values.extend(support::values(&loaded.batch)),
            Err(error) => errors.push(error.to_string()),
        }
    }
    (values, errors)
}

#[test]
fn rows_are_quoted_named_and_of_one_width() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let text = "a,\"b,\n\"\"b\"\"\",c\n1,2,3\n\n4,5\n6,7,8,9\n\"10\", 11 ,1.2e1\n13,x,15\n";
    let path = write(&folder, "a.csv", text.as_bytes());
    let file = path.display();
    let (values, errors) = all(rows(Csv::of_file(&path)).batch(10).workers(2));
    assert_eq!(values, [1.0, 2.0, 3.0, 10.0, 11.0, 12.0]);
    // The header of 15 bytes, a row of 6, and an empty line.
    let wanted = [
        format!("record 1 at byte 22 of {file}: 2 fields where 3 are expected"),
        format!("record 2 at byte 26 of {file}: 4 fields where 3 are expected"),
        format!("record 4 at byte 50 of {file}: field 1 (b,\n\"b\"): `x` is no f32"),
    ];
    assert_eq!(errors, wanted);
    let (values, errors) = all(Loader::stream(Csv::of_file(&path).flexible()).map(numbers(["c"])).batch(9));
    assert_eq!((values, errors.len()), (vec![3.0, 8.0, 12.0, 15.0], 1));
    assert!(errors[0].ends_with("no field 2 (c): the row has 2"), "{}", errors[0]);
    let (_, errors) = all(Loader::stream(Csv::of_file(&path)).map(numbers(["d"])));
    assert!(errors[0].ends_with("no field is named `d`"), "{}", errors[0]);
    let plain = || Csv::of_reader(&b"1\t2\r\n3\t4\r\n"[..]).no_header().delimiter(b'\t');
    assert_eq!(all(rows(plain())).0, [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(all(Loader::stream(plain()).map(numbers([1, 0])).batch(2)).0, [2.0, 1.0, 4.0, 3.0]);
    let (_, errors) = all(Loader::stream(plain()).map(numbers(1..3)));
    assert_eq!(errors.len(), 2);
    assert!(errors[0].ends_with("no field 2: the row has 2"), "{}", errors[0]);
    for empty in [&b""[..], b"a,b\n", b"\n\n"] {
        assert_eq!(all(rows(Csv::of_reader(empty))), (vec![], vec![]));
    }
    let both = Fields::from(["a"]);
    let pairs = Csv::of_reader(&b"a,b\n1,2\n"[..]);
    let pairs =
        Loader::stream(pairs).map(move |row, _| Ok((both.of::<f32>(&row)?, row.text(1)?.len() as i64)));
    let (x, y) = pairs.build().unwrap().next().unwrap().unwrap().batch;
    assert_eq!((support::values(&x), support::values(&y)), (vec![1.0], vec![1.0]));
}

#[test]
#[cfg(target_os = "linux")]
fn a_quote_that_is_not_closed_ends_the_stream_and_takes_no_memory() {
    let _guard = support::serial();
    let _pages = SmallPages::hold();
    let folder = tempfile::tempdir().unwrap();
    let text = format!("a\n1\n2\n\"{}", "3\n".repeat(16 << 20));
    let path = write(&folder, "open.csv", text.as_bytes());
    drop(text);
    let before = anonymous();
    let mut loader = rows(Csv::of_file(&path).max_row(1 << 20)).batch(2).pass_over(9).build().unwrap();
    assert_eq!(support::values(&loader.next().unwrap().unwrap().batch), [1.0, 2.0]);
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(anonymous().saturating_sub(before) < 8 << 20);
    assert!(loader.next().is_none());
    let begin = format!("reading {}: record 2 at byte 6: a row of more than 1048576 bytes", path.display());
    assert!(error.starts_with(&begin), "{error}");
    let exact = format!("a\n{}\n5\n", "0".repeat(99));
    assert_eq!(all(rows(Csv::of_reader(Cursor::new(exact.clone())).max_row(100))).0, [0.0, 5.0]);
    let (values, errors) = all(rows(Csv::of_reader(Cursor::new(exact)).max_row(99)));
    assert_eq!((values.len(), errors.len()), (0, 1));
}

/// Files of 200 rows, some over several lines, with a header each and ends of all kinds.
fn row_files(folder: &TempDir) -> [PathBuf; 4] {
    let content = |from: u32, to: u32, end: &str| -> Vec<u8> {
        let rows = (from..to).map(|id| format!("{id},\"{}\"{end}", "x\n".repeat((id % 9) as usize)));
        (format!("id,text{end}") + &rows.collect::<String>()).into_bytes()
    };
    let mut last = content(180, 200, "\n\n");
    last.truncate(last.len() - 2);
    [
        write(folder, "a", &content(0, 80, "\r\n")),
        write(folder, "b", &gzip(&content(80, 170, "\n"))),
        write(folder, "c", &zstd(&content(170, 180, "\r"))),
        write(folder, "d", &last),
    ]
}

fn row_id(row: &Row) -> memfit::Result<i64> {
    Ok(row.text(0)?.parse().unwrap_or(-1))
}

#[test]
fn rows_resume_with_exactly_those_that_remain() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = row_files(&folder);
    resumes_everywhere(&|batch, workers| {
        let rows = Loader::stream(Csv::of_files(&files)).map(|row, _| row_id(&row));
        rows.batch(batch).workers(workers)
    });
    resumes_everywhere(&|batch, workers| {
        let rows = Loader::stream(Csv::of_files(&files).shuffle_files(3));
        rows.shuffle(5).shuffle_buffer(12).map(|row, _| row_id(&row)).batch(batch).workers(workers)
    });
    // Without a header the first rows are records, too.
    let build = || {
        let rows = Loader::stream(Csv::of_files(&files).no_header()).map(|row, _| row_id(&row));
        rows.batch(7).build().unwrap()
    };
    let mut whole = build();
    let ids = epoch(&mut whole);
    assert_eq!(ids.len(), 204);
    for batches in 0..ids.len() / 7 {
        let mut first = build();
        let mut position = first.position();
        for loaded in first.by_ref().take(batches) {
            position = loaded.unwrap().position;
        }
        let mut resumed = build();
        resumed.seek(position).unwrap();
        assert_eq!(epoch(&mut resumed), &ids[batches * 7..]);
    }
}

#[test]
fn a_position_in_the_middle_of_a_row_is_refused() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let begin = |text: &[u8], offset: u64| {
        let path = write(&folder, "a.csv", text);
        let mut csv = Csv::of_file(path);
        csv.begin(0, Some(Mark { file: 0, offset, record: 1 })).map(|()| csv)
    };
    let text = b"a,b\n11,2\r\n33,4";
    for offset in [1, 3, 5, 8, 12, 13] {
        let error = begin(text, offset).unwrap_err().to_string();
        assert!(error.contains(&format!("no row begins at byte {offset}: ")), "{error}");
        let error = begin(&gzip(text), offset).unwrap_err().to_string();
        assert!(error.contains(&format!("no row begins at byte {offset}: ")), "{error}");
    }
    for (offset, rows) in [(4, 2), (9, 1), (10, 1), (14, 0)] {
        let mut csv = begin(text, offset).unwrap();
        assert_eq!(std::iter::from_fn(|| csv.next()).map(Result::unwrap).count(), rows, "{offset}");
    }
    for offset in [15, 16, 1000] {
        assert!(matches!(begin(text, offset), Err(Error::Io { .. })));
    }
}

type Fieldss = Vec<Vec<Vec<u8>>>;

/// The csv crate's own reading.
fn by_csv(content: &[u8]) -> Fieldss {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(content);
    reader.byte_records().map(|row| row.unwrap().iter().map(<[u8]>::to_vec).collect()).collect()
}

/// What comes from a mark on, the marks before each row, and whether an error ended it.
fn by_stream(csv: &mut Csv, from: Option<Mark>) -> (Fieldss, Vec<Mark>, bool) {
    let (mut rows, mut marks) = (Vec::new(), Vec::new());
    csv.begin(0, from).unwrap();
    loop {
        marks.push(csv.mark().unwrap());
        match csv.next() {
            None => return (rows, marks, false),
            Some(Err(_)) => return (rows, marks, true),
            Some(Ok((row, _))) => {
                rows.push((0..row.len()).map(|field| row.get(field).unwrap().to_vec()).collect());
            }
        }
    }
}

proptest! {
    #![proptest_config(support::random::cases(512))]

    /// Whatever the bytes, in reads of any size, from the start and from each mark.
    #[test]
    fn any_bytes_are_the_rows_that_the_csv_crate_finds(
        content in prop::collection::vec(
            prop::sample::select(vec!["\n", "\r", "\r\n", "\"", ",", "a", "\u{feff}"]),
            0..60,
        ),
        step in 1_usize..20,
    ) {
        let _guard = support::serial();
        let content: Arc<[u8]> = content.concat().into_bytes().into();
        let mut wanted = by_csv(&content);
        // Only in an open quote is a further newline of any weight.
        let open = wanted != by_csv(&[&content, &b"\n"[..]].concat());
        if open {
            wanted.pop();
        }
        let again = content.clone();
        let mut csv = Csv::with(move || Ok(Box::new(Steps(Cursor::new(again.clone()), step))));
        csv = csv.no_header().flexible();
        let (rows, marks, failed) = by_stream(&mut csv, None);
        prop_assert_eq!((&rows, failed), (&wanted, open));
        for (at, mark) in marks.into_iter().enumerate().take(wanted.len() + 1) {
            let (rest, _, failed) = by_stream(&mut csv, Some(mark));
            prop_assert_eq!((&rest[..], failed), (&wanted[at..], open), "from {:?}", mark);
        }
    }
}

#[test]
fn a_quote_that_is_open_at_the_end_ends_the_stream_by_an_error() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    for (text, values, row) in [
        ("a\n1\n\"2\n3\n4", vec![1.0], Some("record 1 at byte 4: ")),
        ("a\n1\n\n\n\"2\"\"\n", vec![1.0], Some("record 1 at byte 6: ")),
        ("\"a\n1\n", vec![], Some("record 0 at byte 0: ")),
        ("a\n1\n\"2\"", vec![1.0, 2.0], None),
        ("a\n1\n\"2\"\r", vec![1.0, 2.0], None),
    ] {
        let path = write(&folder, "open.csv", text.as_bytes());
        let (found, errors) = all(rows(Csv::of_file(&path)).pass_over(9));
        assert_eq!((found, errors.len()), (values, usize::from(row.is_some())), "{text:?}: {errors:?}");
        if let Some(row) = row {
            assert!(
                errors[0].contains(row) && errors[0].ends_with("a quote that is not closed"),
                "{}",
                errors[0]
            );
        }
    }
}

#[test]
fn empty_lines_do_not_count_towards_a_row() {
    let _guard = support::serial();
    let text = format!("a\n1\n{}2\nx\n", "\r\n".repeat(200_000));
    let (values, errors) = all(rows(Csv::of_reader(Cursor::new(text)).max_row(100)));
    assert_eq!(values, [1.0, 2.0]);
    assert!(errors[0].starts_with("record 2 at byte 400006: "), "{}", errors[0]);
}

/// From now on what is large has a mapping of its own, which ends when it is freed, and no thread keeps the end of
/// its heap: glibc keeps other memory for later, how much depends on what was freed before.
#[cfg(target_os = "linux")]
fn keep_nothing_for_later() {
    #[cfg(target_env = "gnu")]
    for setting in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
        // SAFETY: numbers only.
        assert_eq!(unsafe { libc::mallopt(setting, 64 << 10) }, 1);
    }
}

/// A row of 20 MiB, and one of as many fields as take as much.
#[test]
#[cfg(target_os = "linux")]
fn the_room_of_a_long_row_is_given_back() {
    let _guard = support::serial();
    if !is_alone("the_room_of_a_long_row_is_given_back") {
        return;
    }
    let _pages = SmallPages::hold();
    keep_nothing_for_later();
    for long in ["x".repeat(20 << 20), ",".repeat(4 << 20)] {
        let text = format!("a\n{long}\n{}", "1\n".repeat(100));
        let mut csv = Csv::of_reader(Cursor::new(text)).flexible().max_row(32 << 20);
        csv.begin(0, None).unwrap();
        let before = anonymous();
        for _ in 0..50 {
            drop(csv.next().unwrap().unwrap());
        }
        // They took 32 and 80 MiB.
        let more = anonymous().saturating_sub(before);
        assert!(more < 2 << 20, "{more} bytes");
    }
}

#[test]
fn a_range_without_fields_is_an_error() {
    let _guard = support::serial();
    let errors =
        |fields: Fields| all(Loader::stream(Csv::of_reader(&b"a,b,c\n1,2,3\n"[..])).map(numbers(fields))).1;
    assert_eq!(errors((5..).into()), ["record 0 at byte 6: no field 5: the row has 3"]);
    assert_eq!(errors((3..).into()), ["record 0 at byte 6: no field 3: the row has 3"]);
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 4..2;
    assert_eq!(errors(backwards.into()), ["record 0 at byte 6: no field is in the range 4..2"]);
    assert_eq!(errors((1..1).into()), ["record 0 at byte 6: no field is in the range 1..1"]);
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
        let loader = Loader::stream(Failing(0)).map(|number, _| Ok(number)).rank(rank, 2).pass_over(9);
        let (mut ids, error) = until_error(loader.build().unwrap());
        ids.sort_unstable();
        assert_eq!(ids, wanted);
        io_error(error, "reading", Path::new("it"), "gone");
    }
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

/// A reader that fails.
struct Fails(io::ErrorKind, &'static str);

impl Read for Fails {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::new(self.0, self.1))
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

/// Whether a file's pages can be dropped: where its file system is memory they are the file.
#[cfg(target_os = "linux")]
fn drops(path: &Path) -> bool {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: the descriptor is open, no pointer is passed.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    cached(path) == 0
}

/// The most bytes that a kernel holds as one piece of a file.
#[cfg(target_os = "linux")]
const LARGEST: usize = 2 << 20;

#[cfg(target_os = "linux")]
fn page_size() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// Pages of a file that are in memory.
#[cfg(target_os = "linux")]
fn cached(path: &Path) -> usize {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: nobody changes the file.
    let map = unsafe { memmap2::Mmap::map(&file).unwrap() };
    let mut pages = vec![0_u8; map.len().div_ceil(page_size())];
    // SAFETY: the mapping is alive and the vector has a byte for each of its pages.
    let done = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
    assert_eq!(done, 0);
    pages.iter().filter(|page| **page & 1 == 1).count()
}

#[test]
#[cfg(target_os = "linux")]
fn pages_of_files_are_dropped_behind() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "a", &numbered(0, 300_000));
    std::fs::File::open(&path).unwrap().sync_all().unwrap();
    let pages = std::fs::metadata(&path).unwrap().len().div_ceil(page_size() as u64) as usize;
    let mut kept = loader(Lines::of_file(&path)).batch(10_000).build().unwrap();
    assert_eq!(epoch(&mut kept).len(), 300_000);
    if cached(&path) < pages {
        eprintln!("skipped: this system caches no files in {}", folder.path().display());
        return;
    }
    if !drops(&path) {
        eprintln!("skipped: this system keeps the pages of files in {}", folder.path().display());
        return;
    }
    let mut dropping = loader(Lines::of_file(&path).drop_behind(1 << 20)).batch(10_000).build().unwrap();
    let mut most = 0;
    for (at, loaded) in dropping.by_ref().enumerate() {
        loaded.unwrap();
        if at > 20 {
            most = most.max(cached(&path));
        }
    }
    assert!(most < pages / 2, "{most} of {pages} pages");
    // What another process reads, or the kernel has in hand, stays at that moment: of the last pages, held as one.
    let left = cached(&path);
    assert!(left == 0 || left <= LARGEST / page_size() && drops(&path), "{left} pages are left");
}
