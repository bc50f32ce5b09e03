//! An epoch over a token file four times larger than a budget, drawn: through the loader by
//! positioned reads, through it over a mapping, and from a file read whole.
//!
//! `cargo run --release --example loader_memory -- docs/charts/loader-resident.svg` makes the picture of
//! `docs/data.md`; without a name a small one goes to `target/loader_memory.svg`. Each epoch has a process
//! of its own, watched by a `Monitor` whose file is drawn at the end.

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use memfit::data::{Loader, NextToken, Random, Tokens};
use memfit::memory::{Bytes, Monitor, ResidentChart};
use memfit::tch::Kind;

type Failure = Box<dyn Error + Send + Sync>;

const CONTEXT: u64 = 256;
/// The ways to read, by the word that names each to a process of its own.
const WAYS: [(&str, &str); 3] = [
    ("read", "loader, positioned reads"),
    ("map", "loader, mapped file"),
    ("whole", "the whole file in memory"),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ran = match words[..] {
        // With a budget that takes no time.
        [] => draw("target/loader_memory.svg".as_ref(), 1 << 20),
        [picture] => draw(picture.as_ref(), 64 << 20),
        [way, file, lines, budget] => budget
            .parse()
            .map_err(Into::into)
            .and_then(|budget| epoch(way, file.as_ref(), lines.as_ref(), budget)),
        _ => Err("give the picture's name, which ends in .svg or .png".into()),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("loader_memory: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn draw(picture: &Path, budget: u64) -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tokens");
    write_tokens(&file, 4 * budget / 2)?;
    let title = format!("An epoch over {} of tokens within a budget of {}", Bytes(4 * budget), Bytes(budget));
    let mut chart = ResidentChart::new(title).budget(budget).above_start();
    for (way, name) in WAYS {
        let lines = folder.path().join(way);
        let mut process = Command::new(std::env::current_exe()?);
        let status = process.arg(way).args([&file, &lines]).arg(budget.to_string()).status()?;
        if !status.success() {
            return Err(format!("the epoch `{way}` ended with {status}").into());
        }
        chart = chart.run_of_file(name, &lines)?;
    }
    if let Some(folder) = picture.parent() {
        std::fs::create_dir_all(folder)?;
    }
    chart.save(picture)?;
    println!("the chart is in {}", picture.display());
    Ok(())
}

/// An epoch under a monitor's eyes.
fn epoch(way: &str, file: &Path, lines: &Path, budget: u64) -> Result<(), Failure> {
    // What libtorch and threads take once is not the epoch's.
    run(Tokens::of(vec![1; 4096]).next_token(CONTEXT)?)?;
    let monitor = Monitor::every(Duration::from_millis(10)).write_json_lines(lines).start()?;
    let rows = match way {
        "read" => run(Tokens::<u16>::open(file)?.next_token(CONTEXT)?)?,
        "map" => run(Tokens::<u16>::open(file)?.mapped_within(budget / 2)?.next_token(CONTEXT)?)?,
        _ => run(Tokens::of(read_whole(file)?).next_token(CONTEXT)?)?,
    };
    let summary = monitor.stop()?;
    println!("{way}: {rows} rows in {:.2} s", summary.time.as_secs_f64());
    Ok(())
}

/// Every batch once, as training would have them.
fn run(rows: NextToken<u16>) -> Result<i64, Failure> {
    let mut count = 0;
    for loaded in Loader::new(rows).batch(256).shuffle(1).workers(2).build()? {
        let (inputs, targets) = loaded?.batch;
        count += inputs.size()[0];
        let _ = (inputs + targets).sum(Kind::Int64);
    }
    Ok(count)
}

fn read_whole(path: &Path) -> Result<Vec<u16>, Failure> {
    let mut file = File::open(path)?;
    let mut tokens = Vec::with_capacity(file.metadata()?.len() as usize / 2);
    let mut block = vec![0; 1 << 20];
    loop {
        match file.read(&mut block)? {
            0 => return Ok(tokens),
            // A regular file gives whole blocks until its end.
            read => tokens
                .extend(block[..read].chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]))),
        }
    }
}

fn write_tokens(path: &Path, count: u64) -> Result<(), Failure> {
    let mut file = BufWriter::new(File::create(path)?);
    let mut random = Random::of_sample(1, 0, 0);
    for _ in 0..count {
        file.write_all(&(random.next_u64() as u16).to_le_bytes())?;
    }
    Ok(file.flush()?)
}
