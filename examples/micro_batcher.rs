//! Out of memory, survived: a batch that does not fit runs in the largest micro-batches that do.
//!
//! A limit stands for a small machine. The whole batch is tried first; when memory runs out, the
//! window begins again with half the rows, and that size is remembered.

mod gpt;

use gpt::{Config, Failure, Gpt, Recompute};
use memfit::memory::{self, Bytes, Limit};
use memfit::optim::{AdamW, AdamWConfig};
use memfit::strategies::MicroBatcher;
use memfit::tch::{Device, Kind, Tensor, nn};
use memfit::{Error, Loss, Stack};

fn main() -> Result<(), Failure> {
    let config = Config { batch: 16, dropout: 0.0, ..Config::small() };
    let vs = nn::VarStore::new(Device::Cpu);
    let model = Gpt::new(&vs.root(), &config, Recompute::Never);
    let mut training = Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default().lr(3e-4))?)
        .with(MicroBatcher::new())
        .build()?;
    let batch = |rows: i64| {
        let bytes = Tensor::randint(256, [rows, config.context + 1], (Kind::Int64, Device::Cpu));
        (bytes.narrow(1, 0, config.context), bytes.narrow(1, 1, config.context).contiguous())
    };
    // The weight of a loss says what it is a mean over, so that unequal parts count as they should.
    let loss = |rows: &(Tensor, Tensor)| Ok(Loss::mean(model.loss(rows, true), rows.0.numel()));

    // Calls of tch that do not return a `Result` panic where memory runs out; the stack makes an
    // error of that, so its message needs not be printed.
    std::panic::set_hook(Box::new(|_| {}));
    let limit = Limit::new(memory::stats(Device::Cpu)?.current + (10 << 20))?;
    let found = training.find_max_batch(1..=config.batch, |rows| loss(&batch(rows)))?;
    println!("of 1 to {} rows the most that have run at once: {}", config.batch, found.size);

    for _ in 0..3 {
        let outcome = training.step_batch(&batch(config.batch), loss)?;
        if let Some(split) = outcome.split() {
            let (rows, parts, tries) = (split.rows, split.micro_batches, split.retries);
            println!("{parts} micro-batches of {rows} rows, after {tries} that ran out of memory");
        }
    }
    drop(limit);

    let _limit = Limit::new(memory::stats(Device::Cpu)?.current + (1 << 20))?;
    match training.step_batch(&batch(config.batch), loss) {
        Err(error @ Error::DoesNotFit { .. }) => println!("\nwith {} left: {error}", Bytes(1 << 20)),
        other => return Err(format!("one row was not to fit: {other:?}").into()),
    }
    Ok(())
}
