//! Lines and rows that come one after another: from files, compressed files, pipes and readers.

mod compressed;
mod failures;
mod lines;
mod pipes;
mod positions;
#[path = "../support/mod.rs"]
mod support;
mod tables;

use std::io::{self, Cursor, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memfit::data::{
    Csv, Fields, Line, Lines, Loader, LoaderBuilder, Origin, Row, Stream, StreamJob, Tail, json, numbers,
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
    let mut seen = vec![(whole.data_position(), 0)];
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

fn io_error(error: Option<Error>, action: &str, path: &Path, text: &str) {
    let error = error.expect("an error");
    let Error::Io { action: found, path: at, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*found, at.as_path()), (action, path));
    assert!(error.to_string().contains(text), "{error}");
}

fn row_id(row: &Row) -> memfit::Result<i64> {
    Ok(row.text(0)?.parse().unwrap_or(-1))
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

/// A reader that fails.
struct Fails(io::ErrorKind, &'static str);

impl Read for Fails {
    fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::Error::new(self.0, self.1))
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
