//! Pipes and readers: what waits, what is read ahead, what ends.

use super::*;

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
