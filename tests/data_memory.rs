//! What reading files takes, as Linux tells it. The figures are the whole process', so these tests have a
//! process of their own.
#![cfg(target_os = "linux")]

mod support;

use std::process::Command;

use memfit::Error;
use memfit::data::{Loader, NextToken, Random, Source, Tokens};
use memfit::memory::Limit;
use memfit::tch::{Device, Kind, Tensor};
use tempfile::NamedTempFile;

use support::process::{SmallPages, anonymous, of_mappings};
use support::{live, serial};

const BUDGET: u64 = 16 << 20;
const SLACK: u64 = 4 << 20;
const CONTEXT: u64 = 1_024;

fn file_of(bytes: &[u8]) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    file
}

/// 64 MiB of tokens whose sum is known.
fn large() -> (NamedTempFile, u64) {
    let block: Vec<u8> = (0..1_u32 << 19).flat_map(|token| ((token % 50_257) as u16).to_le_bytes()).collect();
    let sum: u64 = (0..1_u64 << 19).map(|token| token % 50_257).sum();
    (file_of(&block.repeat(64)), 64 * sum)
}

/// Whether a file lies in memory, where its pages count as shared ones and are never dropped; says so.
fn skipped_in_memory(file: &NamedTempFile) -> bool {
    let path = file.path().canonicalize().unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let mut under: Vec<(&str, &str)> = mounts
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ').skip(1);
            Some((words.next()?, words.next()?))
        })
        .filter(|(folder, _)| path.starts_with(folder))
        .collect();
    // Of several on one folder, the last one is seen.
    under.sort_by_key(|(folder, _)| folder.len());
    let found = under.last().is_some_and(|(_, kind)| ["tmpfs", "ramfs"].contains(kind));
    if found {
        eprintln!("skipped: the temporary folder is in memory, whose pages count as shared ones");
    }
    found
}

fn resident_of(file: &NamedTempFile) -> u64 {
    of_mappings(file.path(), "Rss")
}

/// The sum of the inputs of rows, and the most that was resident of the file meanwhile.
fn read(rows: &NextToken<u16>, file: &NamedTempFile, order: impl Iterator<Item = u64>) -> (u64, u64) {
    let (mut sum, mut most) = (0, 0);
    for (count, index) in order.enumerate() {
        let (inputs, _) = rows.get(index, &mut Random::of_sample(0, 0, 0)).unwrap();
        sum += inputs.iter().sum::<i64>() as u64;
        // Any moment between two times that pages are given back, not always the same one.
        if count % 509 == 0 {
            most = most.max(resident_of(file));
        }
    }
    (sum, most)
}

/// Case 62. That the page cache holds little of the file is a test beside `Reader`: no file of `/proc` tells it.
#[test]
fn a_file_of_four_times_the_budget_is_read_within_the_budget() {
    let _guard = serial();
    let _pages = SmallPages::hold();
    let (file, sum) = large();
    let size = std::fs::metadata(file.path()).unwrap().len();
    assert!(size >= 4 * BUDGET);
    let tokens = Tokens::<u16>::open(file.path()).unwrap();
    // One token more than contexts need, so that the last context has its target.
    let last = last_row(&tokens);
    let sum_of = |batch: &Tensor| batch.sum(Kind::Int64).int64_value(&[]);
    // What libtorch's threads take once is not the loader's.
    sum_of(&Tensor::ones([1 << 20], (Kind::Int64, Device::Cpu)));

    let _limit = Limit::new(live() + BUDGET).unwrap();
    let whole = Tensor::f_zeros([size as i64], (Kind::Uint8, Device::Cpu));
    assert!(Error::from(whole.unwrap_err()).is_out_of_memory(), "the budget is one");
    let before = anonymous();
    let rows = tokens.drop_behind(BUDGET / 4).next_token(CONTEXT).unwrap();
    let mut batches = Loader::new(rows).batch(32).workers(2).build().unwrap();
    let mut seen = sum_of(&batches.next().unwrap().unwrap().batch.0);
    let first = anonymous();
    let mut most = 0;
    for (count, batch) in batches.by_ref().enumerate() {
        seen += sum_of(&batch.unwrap().batch.0);
        // To count pages takes longer than to read them.
        if count % 7 == 0 {
            most = most.max(anonymous());
        }
    }
    assert_eq!(seen as u64, sum - last, "all but the last row was read");
    assert!(most <= before + BUDGET, "{} MiB more than before the loader", (most - before) >> 20);
    assert!(most <= first + SLACK, "{} MiB more than after its first batch", (most - first) >> 20);
}

/// The sum of a file's last row, of which the last token is no input.
fn last_row(tokens: &Tokens<u16>) -> u64 {
    let rows = tokens.clone().rows(CONTEXT).unwrap();
    let last = rows.get(rows.len() - 1, &mut Random::of_sample(0, 0, 0)).unwrap();
    last.iter().sum::<i64>() as u64
}

#[test]
fn a_mapping_gives_its_pages_back_and_reads_the_same() {
    let _guard = serial();
    let (file, sum) = large();
    if skipped_in_memory(&file) {
        return;
    }
    let tokens = Tokens::<u16>::open(file.path()).unwrap();
    let sum = sum - last_row(&tokens);
    let rows = |bytes| tokens.clone().mapped_within(bytes).unwrap().next_token(CONTEXT).unwrap();
    let (bounded, all) = (rows(BUDGET / 2), 0..rows(BUDGET).len());
    let bound = BUDGET / 2 + SLACK;
    // An odd factor that shares none with the count makes a permutation.
    let shuffled = all.clone().map(|index| index * 7_919 % all.end);
    for (order, name) in [
        (Box::new(all.clone()) as Box<dyn Iterator<Item = u64>>, "in order"),
        (Box::new(shuffled), "shuffled"),
    ] {
        let (found, most) = read(&bounded, &file, order);
        assert_eq!(found, sum, "{name}");
        assert!(most <= bound, "{name}: {} KiB", most >> 10);
    }
    drop(bounded);
    assert_eq!(resident_of(&file), 0, "a mapping ends with its last source");
    let (found, most) = read(&rows(u64::MAX), &file, all);
    assert_eq!(found, sum);
    assert!(most > bound, "without a bound pages stay that the system does not need: {} KiB", most >> 10);
}

/// A row of 2^29 tokens of a byte, of which the ids alone take 4 GiB, in a process that may have 2 GiB more.
#[test]
fn ids_for_which_there_is_no_memory_are_an_error() {
    let _guard = serial();
    const INSIDE: &str = "MEMFIT_TEST_LITTLE_ADDRESS_SPACE";
    const ROW: u64 = 1 << 29;
    if std::env::var_os(INSIDE).is_some() {
        let file = file_of(&[]);
        file.as_file().set_len(ROW).unwrap();
        let tokens = Tokens::<u8>::open(file.path()).unwrap();
        let Err(Error::OutOfMemory { requested, .. }) =
            tokens.rows(ROW).unwrap().get(0, &mut Random::of_sample(0, 0, 0))
        else {
            panic!()
        };
        assert_eq!(requested, Some(8 * ROW));
        return;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let script = format!("ulimit -v {} && exec \"$0\" --exact \"$1\"", size + (2 << 20));
    let mut child = Command::new("sh");
    child.arg("-c").arg(script).arg(std::env::current_exe().unwrap());
    child.arg("ids_for_which_there_is_no_memory_are_an_error").env(INSIDE, "");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}

#[test]
fn a_view_takes_no_memory_that_is_counted_or_anonymous() {
    let _guard = serial();
    let file = file_of(&vec![7; 32 << 20]);
    if skipped_in_memory(&file) {
        return;
    }
    let tokens = Tokens::<u8>::open(file.path()).unwrap();
    let counted = live();
    let view = tokens.view(0..tokens.len()).unwrap();
    assert_eq!(view.max().int64_value(&[]), 7);
    assert_eq!(live(), counted);
    assert!(resident_of(&file) > 0, "it is read through the mapping");
    let copied = || of_mappings(file.path(), "Anonymous");
    assert_eq!(copied(), 0, "its pages are the page cache's own");
    let mut row = view.narrow(0, 0, 1);
    let _ = row.fill_(8);
    assert!(copied() > 0, "a page that is written to is not");
}
