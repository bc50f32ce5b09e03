//! memfit's side of the section `data` of `cargo xtask peers`: a `Loader`, epoch by epoch.
//!
//! - `tokens FILE COUNT` writes a file of so many random 16-bit tokens.
//! - `serve tokens|tokens-mapped|images PATH WORKERS REPEAT BATCH` reads lines: `epoch` runs a shuffled epoch and gives
//!   `<seconds> <samples>`; `first FILE` writes the first batch of the data's own order to a file, number
//!   by number, and gives `<samples>`; anything else ends it.
//! - `training tokens|images PATH PAIRS` prints what loading beside it costs a training step.
//! - Without arguments, as `cargo bench` and `cargo test --benches` run it, all of it once, on data of
//!   a few kilobytes.

mod images;
mod tokens;
mod training;

use std::error::Error;
use std::fs;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use memfit::Batch;
use memfit::data::Loader;
use memfit::tch::Tensor;

use tokens::Reading;

type Failure = Box<dyn Error + Send + Sync>;

/// Batches of pictures that are made ahead: all workers make one together, so one keeps them busy.
const PREFETCH: usize = 1;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ran = match words.as_slice() {
        ["tokens", file, count] => {
            count.parse().map_err(Into::into).and_then(|n| tokens::write(file.as_ref(), n))
        }
        ["serve", kind, path, rest @ ..] => serve(kind, path.as_ref(), rest),
        ["training", kind, path, pairs] => {
            pairs.parse().map_err(Into::into).and_then(|n| training(kind, path.as_ref(), n))
        }
        _ => try_all(),
    };
    match ran {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("loader: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn serve(kind: &str, path: &Path, numbers: &[&str]) -> Result<(), Failure> {
    let numbers: Vec<usize> = numbers.iter().map(|number| number.parse()).collect::<Result<_, _>>()?;
    let [workers, repeat, batch] = numbers[..] else { return Err("three numbers follow the path".into()) };
    let input = || std::io::stdin().lock().lines().map_while(Result::ok);
    match kind {
        "tokens" | "tokens-mapped" => {
            let reading = if kind == "tokens" { Reading::ByPosition } else { Reading::Mapped };
            tokens::warm_up(path, reading)?;
            answer(input(), |shuffled| tokens::loader(path, reading, batch, workers, shuffled))
        }
        "images" => {
            images::warm_up(path)?;
            answer(input(), |shuffled| images::loader(path, repeat, batch, workers, shuffled))
        }
        _ => Err(format!("there is no data {kind}: tokens, tokens-mapped and images").into()),
    }
}

/// Says that it is ready and answers each line; the loader is made with the first epoch.
fn answer(
    lines: impl Iterator<Item = String>,
    make: impl Fn(bool) -> Result<Pairs, Failure>,
) -> Result<(), Failure> {
    let mut output = std::io::stdout();
    writeln!(output, "ready memfit")?;
    let mut loader = None;
    for line in lines {
        match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["epoch"] => {
                let loader: &mut Pairs = match &mut loader {
                    Some(loader) => loader,
                    none => none.insert(make(true)?),
                };
                let start = Instant::now();
                let samples = epoch(loader)?;
                writeln!(output, "{:.6} {samples}", start.elapsed().as_secs_f64())?;
            }
            ["first", file] => writeln!(output, "{}", first(&mut make(false)?, file.as_ref())?)?,
            _ => break,
        }
    }
    Ok(())
}

/// Batches of rows and of what belongs to them.
type Pairs = Loader<(Tensor, Tensor)>;

fn epoch(loader: &mut Pairs) -> Result<i64, Failure> {
    let mut samples = 0;
    for batch in loader {
        samples += batch?.rows();
    }
    Ok(samples)
}

/// Writes the first batch's bytes; its samples.
fn first(loader: &mut Pairs, file: &Path) -> Result<i64, Failure> {
    let loaded = loader.next().ok_or("no batch")??;
    let mut bytes = Vec::new();
    let (x, y) = &loaded.batch;
    for tensor in [x, y] {
        let at = bytes.len();
        let size = tensor.numel() * tensor.kind().elt_size_in_bytes();
        bytes.resize(at + size, 0);
        tensor.f_copy_data_u8(&mut bytes[at..], tensor.numel())?;
    }
    fs::write(file, bytes)?;
    Ok(loaded.rows())
}

fn training(kind: &str, path: &Path, pairs: usize) -> Result<(), Failure> {
    match kind {
        "tokens" => training::tokens(path, pairs, 15),
        "images" => training::images(path, pairs, 6),
        _ => Err(format!("there is no data {kind}: tokens and images").into()),
    }
}

/// Every part once.
fn try_all() -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tokens");
    tokens::write(&file, 40 * 256 + 1)?;
    images::write_small(folder.path(), 9)?;
    for workers in [0, 2] {
        for reading in [Reading::Mapped, Reading::ByPosition] {
            let rows = epoch(&mut tokens::loader(&file, reading, 8, workers, true)?)?;
            println!("{workers} workers: {rows} rows of tokens in an epoch, {reading:?}");
        }
        let pictures = epoch(&mut images::loader(folder.path(), 2, 8, workers, true)?)?;
        println!("{workers} workers: {pictures} pictures in an epoch");
    }
    let written = folder.path().join("first");
    first(&mut images::loader(folder.path(), 1, 8, 0, false)?, &written)?;
    println!("the first batch: {} bytes", fs::metadata(&written)?.len());
    training::tokens(&file, 1, 1)?;
    training::images(folder.path(), 1, 1)
}
