//! Some of a stream's records are a stream of their own.

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use memfit::data::{Csv, Interrupt, Line, Lines, Loader, LoaderBuilder, Origin, Part, Stream, StreamJob};
use memfit::tch::Tensor;
use memfit::{DataPosition, Error, Mark, Result};
use proptest::prelude::*;

/// Lines `0..len` of unequal length, each beginning with its number, in files of some.
fn files(folder: &Path, len: u64, each: u64) -> Vec<PathBuf> {
    let starts = (0..len).step_by(each as usize);
    let written = starts.map(|start| {
        let line = |id: u64| format!("{id} {}\n", "x".repeat((id * 7 % 50) as usize));
        let text: String = (start..len.min(start + each)).map(line).collect();
        let path = folder.join(format!("{start:05}.txt"));
        std::fs::write(&path, text).unwrap();
        path
    });
    written.collect()
}

fn id(line: &Line) -> Result<i64> {
    let text = line.text()?;
    let number = text.split(' ').next().unwrap_or_default();
    number.parse().map_err(|_| Error::data(format!("`{number}` is no number")))
}

fn loader(part: Part<Lines>) -> LoaderBuilder<StreamJob<Line>, i64> {
    Loader::stream(part).map(|line, _| id(&line))
}

/// What remains of the epoch.
fn rest(loader: &mut Loader<Tensor>) -> Vec<i64> {
    loader.by_ref().flat_map(|loaded| Vec::<i64>::try_from(&loaded.unwrap().batch).unwrap()).collect()
}

fn sorted(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids
}

fn ids(range: std::ops::Range<i64>) -> Vec<i64> {
    range.collect()
}

#[test]
fn parts_have_what_the_whole_has() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), 20, 6);
    let part = |range| {
        let mut loader =
            loader(Part::of(Lines::of_files(&files), range)).batch(3).workers(1).build().unwrap();
        // The second epoch is as the first.
        let (first, second) = (rest(&mut loader), rest(&mut loader));
        assert_eq!(first, second);
        first
    };
    assert_eq!(part(0..13), ids(0..13));
    assert_eq!(part(13..20), ids(13..20));
    assert_eq!(part(6..12), ids(6..12), "a file of several");
    // Beyond the stream's end nothing is.
    assert_eq!(part(18..u64::MAX), ids(18..20));
    assert_eq!(part(20..30), ids(0..0));
    assert_eq!(part(30..40), ids(0..0));
    assert_eq!(part(5..5), ids(0..0));
    let (backwards, last) = (std::ops::Range { start: 7, end: 3 }, u64::MAX..u64::MAX);
    assert_eq!((part(backwards), part(last)), (vec![], vec![]));
}

#[test]
fn what_is_beyond_the_range_is_not_read() {
    let _guard = support::serial();
    let (read, mut write) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut write, b"0\n1\n2\n3\n").unwrap();
    // The pipe stays open: a read of a fifth line would wait.
    let mut loader = loader(Part::of(Lines::of_pipe(read), 1..4)).batch(2).build().unwrap();
    assert_eq!(rest(&mut loader), [1, 2, 3]);
    drop(write);
}

#[test]
fn a_read_that_waits_ends_with_the_loader() {
    let _guard = support::serial();
    let (read, mut write) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut write, b"0\n1\n2\n").unwrap();
    let mut loader = loader(Part::of(Lines::of_pipe(read), 1..9)).batch(2).workers(1).build().unwrap();
    assert_eq!(Vec::<i64>::try_from(&loader.next().unwrap().unwrap().batch).unwrap(), [1, 2]);
    // A worker waits for the fourth line.
    let (done, ended) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        drop(loader);
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(10)).unwrap();
    drop(write);
}

#[test]
fn ranks_share_a_part_out() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), 50, 17);
    for shuffled in [false, true] {
        let mut all = Vec::new();
        for rank in 0..3 {
            let mut builder = loader(Part::of(Lines::of_files(&files), 10..41)).batch(4).rank(rank, 3);
            if shuffled {
                builder = builder.shuffle(5).shuffle_buffer(8);
            }
            all.extend(rest(&mut builder.build().unwrap()));
        }
        let all = sorted(all);
        // Ranks have equal batches; the last records may be too few for all.
        assert!(all.windows(2).all(|pair| pair[0] < pair[1]), "{all:?}");
        assert!(all.iter().all(|id| (10..41).contains(id)) && all.len() >= 30, "{all:?}");
    }
}

proptest! {
    #![proptest_config(support::random::cases(48))]

    #[test]
    fn a_resumed_part_gives_what_remains(
        len in 1_u64..60,
        each in 1_u64..30,
        start in 0_u64..40,
        wanted in 0_u64..40,
        buffer in prop_oneof![Just(None), (1_usize..20).prop_map(Some)],
        batch in 1_usize..7,
        taken in 0_usize..8,
        workers in 0_usize..3,
    ) {
        let _guard = support::serial();
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), len, each);
        let make = |workers| {
            let mut builder =
                loader(Part::of(Lines::of_files(&files), start..start + wanted)).batch(batch).workers(workers);
            if let Some(buffer) = buffer {
                builder = builder.shuffle(3).shuffle_buffer(buffer);
            }
            builder.build().unwrap()
        };
        let mut straight = make(workers);
        let (mut before, mut position) = (Vec::new(), None);
        for loaded in straight.by_ref().take(taken) {
            let loaded = loaded.unwrap();
            before.extend(Vec::<i64>::try_from(&loaded.batch).unwrap());
            position = Some(loaded.position);
        }
        let whole: Vec<i64> = (start..len.min(start + wanted)).map(|id| id as i64).collect();
        if let Some(position) = position {
            let mark = position.mark.unwrap();
            prop_assert!(mark.record <= position.samples, "{position:?}");
            let mut resumed = make(2 - workers);
            resumed.seek(position).unwrap();
            let remaining = rest(&mut resumed);
            if before.len() < whole.len() {
                prop_assert_eq!(&remaining, &rest(&mut straight));
            }
            before.extend(&remaining);
            prop_assert_eq!(sorted(before), whole);
        } else {
            prop_assert_eq!(sorted(rest(&mut make(0))), whole);
        }
    }
}

/// Numbers from 0, which counts how it is asked.
#[derive(Debug, Default)]
struct Counted {
    at: u64,
    begun: Vec<Option<Mark>>,
    passed: u64,
    marks: bool,
}

impl Stream for Counted {
    type Record = u64;

    fn begin(&mut self, _: u64, from: Option<Mark>) -> Result<()> {
        self.begun.push(from);
        self.at = from.map_or(0, |mark| mark.record);
        Ok(())
    }

    fn next(&mut self) -> Option<Result<(u64, Origin)>> {
        self.at += 1;
        Some(Ok((self.at - 1, Origin::record(self.at - 1))))
    }

    fn skip(&mut self) -> Result<bool> {
        (self.at, self.passed) = (self.at + 1, self.passed + 1);
        Ok(true)
    }

    fn mark(&self) -> Option<Mark> {
        self.marks.then_some(Mark { file: 7, offset: 10 * self.at, record: self.at })
    }

    fn order(&self) -> u64 {
        1
    }

    fn interrupt(&self) -> Interrupt {
        Interrupt::Impossible
    }
}

fn marked() -> Counted {
    Counted { marks: true, ..Counted::default() }
}

#[test]
fn marks_count_the_records_of_the_part() {
    let mut part = Part::of(marked(), 100..110);
    part.begin(0, None).unwrap();
    assert_eq!(part.mark(), Some(Mark { file: 7, offset: 1000, record: 0 }));
    let (record, origin) = part.next().unwrap().unwrap();
    assert_eq!((record, origin), (100, Origin::record(100)), "the origin is the stream's");
    assert!(part.skip().unwrap());
    let mark = part.mark().unwrap();
    assert_eq!(mark, Mark { file: 7, offset: 1020, record: 2 });

    // From a mark the stream begins at its own, and nothing is passed over.
    let mut part = Part::of(marked(), 100..110);
    part.begin(0, Some(mark)).unwrap();
    let left: Vec<u64> = std::iter::from_fn(|| part.next()).map(|next| next.unwrap().0).collect();
    assert_eq!(left, [102, 103, 104, 105, 106, 107, 108, 109]);
    let asked = format!("{part:?}");
    assert!(asked.contains("passed: 0") && asked.contains("record: 102"), "{asked}");
    assert!(!part.skip().unwrap() && part.next().is_none(), "the part is over");
    assert_eq!(part.mark().unwrap().record, 10);

    // A stream without marks is counted through.
    let mut part = Part::of(Counted::default(), 100..110);
    part.begin(0, None).unwrap();
    assert!(part.mark().is_none() && format!("{part:?}").contains("passed: 100"));
    assert!(matches!(part.interrupt(), Interrupt::Impossible));
}

#[test]
fn marks_that_are_none_of_the_part_are_refused() {
    let mark = |record| Some(Mark { record, ..Mark::default() });
    let mut part = Part::of(marked(), 100..110);
    part.begin(0, mark(10)).unwrap();
    assert!(part.next().is_none());
    for record in [11, u64::MAX] {
        let error = part.begin(0, mark(record)).unwrap_err().to_string();
        assert!(error.contains(&format!("record {record} of a part of 10")), "{error}");
    }
    let mut empty = Part::of(marked(), std::ops::Range { start: 5, end: 2 });
    assert!(matches!(empty.begin(0, mark(0)), Err(Error::State { .. })));
}

#[test]
fn an_order_is_of_its_stream_and_range() {
    let ranges = [0..10, 0..11, 10..11, 1..10, 0..1, 0..0, 0..1 << 40, 1 << 20..1 << 40, 0..u64::MAX];
    let mut orders: Vec<u64> = ranges.into_iter().map(|range| Part::of(marked(), range).order()).collect();
    let count = orders.len();
    orders.sort_unstable();
    orders.dedup();
    assert_eq!(orders.len(), count);
    let lines = |path: &str| Part::of(Lines::of_file(path), 0..10).order();
    assert_ne!(lines("a"), lines("b"));
}

#[test]
fn a_position_of_another_part_is_refused() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let files = files(folder.path(), 20, 20);
    let make = |range| loader(Part::of(Lines::of_files(&files), range)).batch(2).build().unwrap();
    let mut first = make(0..10);
    let position: DataPosition = first.next().unwrap().unwrap().position;
    assert!(make(0..10).seek(position).is_ok());
    for range in [0..11, 1..10, 10..20] {
        assert!(matches!(make(range).seek(position), Err(Error::State { .. })));
    }
}

#[test]
fn a_bad_record_is_one_of_the_part_and_named_by_its_file() {
    let _guard = support::serial();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    std::fs::write(&path, "0,0\n1\n2,2\n3\n4,4\n").unwrap();
    // The first bad row is passed over, the second is in the part.
    let rows = Part::of(Csv::of_file(&path).no_header(), 2..5);
    let numbers = memfit::data::numbers::<i64>(..);
    let mut loader = Loader::stream(rows).map(numbers).batch(3).build().unwrap();
    let error = loader.next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("record 3 at byte 10 of ") && error.contains("1 fields where 2"), "{error}");
    let batch = loader.next().unwrap().unwrap().batch;
    assert_eq!(batch.size(), [2, 2]);
}
