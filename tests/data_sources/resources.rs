//! What reading takes, as Linux tells it.

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use memfit::Error;
use memfit::data::{Loader, NextToken, Source, Token, Tokens};
use memfit::memory::{Limit, resident};
use memfit::tch::{Device, Kind, Tensor};

use crate::support::{live, serial};
use crate::{OneFile, get, skipped_in_memory};

/// 64 MiB of tokens whose sum is known.
fn large() -> (OneFile, u64) {
    let block: Vec<u8> = (0..1_u32 << 19).flat_map(|token| ((token % 50_257) as u16).to_le_bytes()).collect();
    let sum: u64 = (0..1_u64 << 19).map(|token| token % 50_257).sum();
    (OneFile::of(&block.repeat(64)), 64 * sum)
}

fn sum_of<T: Token>(rows: &NextToken<T>, watch: impl Fn()) -> u64 {
    let mut sum = 0;
    for index in 0..rows.len() {
        let (inputs, _) = get(rows, index).unwrap();
        sum += inputs.iter().sum::<i64>() as u64;
        if index % 64 == 0 {
            watch();
        }
    }
    sum
}

const BUDGET: u64 = 16 << 20;
const SLACK: u64 = 4 << 20;

/// Case 62. That the page cache holds little of the file is a test beside `Reader`: no file of `/proc` tells it.
#[test]
fn a_file_of_four_times_the_budget_is_read_within_the_budget() {
    let _guard = serial();
    let (file, sum) = large();
    let size = std::fs::metadata(&file.path).unwrap().len();
    assert!(size >= 4 * BUDGET);
    let tokens = Tokens::<u16>::open(&file.path).unwrap();
    // One token more than contexts need, so that the last context has its target.
    let last = get(&tokens.clone().rows(1_024).unwrap(), tokens.len() / 1_024 - 1).unwrap();
    let sum_of = |batch: &Tensor| batch.sum(Kind::Int64).int64_value(&[]);
    // What libtorch's threads take once is not the loader's.
    sum_of(&Tensor::ones([1 << 20], (Kind::Int64, Device::Cpu)));

    let _limit = Limit::new(live() + BUDGET).unwrap();
    let whole = Tensor::f_zeros([size as i64], (Kind::Uint8, Device::Cpu));
    assert!(Error::from(whole.unwrap_err()).is_out_of_memory(), "the budget is one");
    let before = resident().unwrap().anonymous;
    let rows = tokens.drop_behind(BUDGET / 4).next_token(1_024).unwrap();
    let mut batches = Loader::new(rows).batch(32).workers(2).build().unwrap();
    let mut seen = sum_of(&batches.next().unwrap().unwrap().batch.0);
    let first = resident().unwrap().anonymous;
    let mut most = 0;
    for batch in batches.by_ref() {
        seen += sum_of(&batch.unwrap().batch.0);
        most = most.max(resident().unwrap().anonymous);
    }
    assert_eq!(seen as u64, sum - last.iter().sum::<i64>() as u64, "all but the last row was read");
    assert!(most <= before + BUDGET, "{} MiB more than before the loader", (most - before) >> 20);
    assert!(most <= first + SLACK, "{} MiB more than after its first batch", (most - first) >> 20);
}

#[test]
fn a_mapping_gives_its_pages_back_and_reads_the_same() {
    let _guard = serial();
    let (file, sum) = large();
    if skipped_in_memory(&file) {
        return;
    }
    let most_of = |resident_bytes| {
        let tokens = Tokens::<u16>::open(&file.path).unwrap();
        let tail = get(&tokens.clone().rows(1_024).unwrap(), tokens.len() / 1_024 - 1).unwrap();
        let rows = tokens.mapped_within(resident_bytes).unwrap().next_token(1_024).unwrap();
        get(&rows, 0).unwrap();
        let before = resident().unwrap().file;
        let most = AtomicU64::new(0);
        let watch = || {
            most.fetch_max(resident().unwrap().file, Ordering::Relaxed);
        };
        assert_eq!(sum_of(&rows, watch), sum - tail.iter().sum::<i64>() as u64);
        most.into_inner().saturating_sub(before)
    };
    let bounded = most_of(BUDGET / 2);
    assert!(bounded <= BUDGET / 2 + SLACK, "{} MiB", bounded >> 20);
    let unbounded = most_of(u64::MAX);
    assert!(unbounded >= 3 * BUDGET, "without a bound all pages stay: {} MiB", unbounded >> 20);
}

/// A row of 2^29 tokens of a byte, of which the ids alone take 4 GiB, in a process that may have 2 GiB more.
#[test]
fn ids_for_which_there_is_no_memory_are_an_error() {
    const INSIDE: &str = "MEMFIT_TEST_LITTLE_ADDRESS_SPACE";
    const ROW: u64 = 1 << 29;
    if std::env::var_os(INSIDE).is_some() {
        let file = OneFile::of(&[]);
        file.set_len(ROW);
        let tokens = Tokens::<u8>::open(&file.path).unwrap();
        let Err(Error::OutOfMemory { requested, .. }) = get(&tokens.rows(ROW).unwrap(), 0) else { panic!() };
        assert_eq!(requested, Some(8 * ROW));
        return;
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).unwrap();
    let size: u64 = size.trim().trim_end_matches(" kB").parse().unwrap();
    let script = format!("ulimit -v {} && exec \"$0\" --exact \"$1\"", size + (2 << 20));
    let mut child = Command::new("sh");
    child.arg("-c").arg(script).arg(std::env::current_exe().unwrap());
    child.arg("resources::ids_for_which_there_is_no_memory_are_an_error").env(INSIDE, "");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
}
