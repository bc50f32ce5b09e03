//! What needs a device; skipped with a reason where there is none.

mod support;

use memfit::offload::CpuOffload;
use memfit::optim::{AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Lion, LionConfig, Optimizer};
use memfit::tch::nn::{self, Module};
use memfit::tch::{Cuda, Device, Kind, Tensor};
use memfit::{Error, Update};

/// The device, or the reason why a test does not run.
fn device(test: &str) -> Option<Device> {
    if Cuda::is_available() {
        return Some(Device::Cuda(0));
    }
    println!("skipped {test}: no CUDA device here");
    None
}

fn chain(x: &Tensor) -> Tensor {
    (0..24).fold(x.shallow_clone(), |x, _| (x * 1.01).tanh().matmul(&Tensor::eye(SIDE, OPTIONS)))
}

const SIDE: i64 = 1024;
const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cuda(0));

/// Case 39.
#[test]
fn copies_in_flight_keep_their_bytes_when_buffers_are_reused() {
    let _guard = support::serial();
    let Some(device) = device("copies_in_flight_keep_their_bytes_when_buffers_are_reused") else { return };
    let x = Tensor::randn([SIDE, SIDE], OPTIONS).set_requires_grad(true);
    chain(&x).sum(Kind::Float).backward();
    let expected = x.grad().copy();
    for offload in
        [CpuOffload::activations(), CpuOffload::activations().disk(std::env::temp_dir()).host_limit(16 << 20)]
    {
        let mut offload = offload;
        // Rounds without synchronisation between them reuse pinned buffers and device blocks.
        for _ in 0..4 {
            let _ = x.grad().zero_();
            let loss = offload.around(device, &[], || Ok(chain(&x).sum(Kind::Float))).expect("forward");
            loss.backward();
            assert!(x.grad().equal(&expected));
        }
        let moved = offload.moved();
        assert!(moved.out_bytes > 0 && moved.live_on_host == 0 && moved.live_on_disk == 0);
    }
}

/// Case 36, index tensors.
#[test]
fn an_index_tensor_that_lived_on_the_cpu_comes_back_there() {
    let _guard = support::serial();
    let Some(device) = device("an_index_tensor_that_lived_on_the_cpu_comes_back_there") else { return };
    let table = Tensor::randn([64, 8], OPTIONS).set_requires_grad(true);
    let ids = Tensor::from_slice(&[1_i64, 5, 1]);
    let mut offload = CpuOffload::activations().disk(std::env::temp_dir()).min_bytes(1);
    let run = || Ok(table.index(&[Some(&ids)]).square().sum(Kind::Float));
    offload.around(device, &[], run).expect("forward").backward();
    let moved = table.grad().copy();
    let _ = table.grad().zero_();
    run().expect("forward").backward();
    assert!(table.grad().equal(&moved));
}

#[test]
fn state_and_weights_on_the_host_train_as_on_the_cpu() {
    let _guard = support::serial();
    let Some(device) = device("state_and_weights_on_the_host_train_as_on_the_cpu") else { return };
    let vs = nn::VarStore::new(device);
    let block = nn::linear(vs.root(), 64, 64, Default::default());
    let x = Tensor::randn([16, 64], OPTIONS);
    let copies: Vec<Tensor> = vs
        .trainable_variables()
        .iter()
        .map(|weight| weight.detach().to_device(Device::Cpu).set_requires_grad(true))
        .collect();
    let mut reference = AdamW::new(&copies, AdamWConfig::default()).expect("an optimizer");
    let optimizer = AdamW::new(&vs, AdamWConfig::default()).expect("an optimizer");
    let mut optimizer = CpuOffload::optimizer(optimizer).host().expect("a host tier");
    let block = CpuOffload::parameters(block, &vs).host().expect("a host tier");
    for _ in 0..3 {
        optimizer.zero_grad();
        block.forward(&x).square().mean(Kind::Float).backward();
        for (copy, weight) in copies.iter().zip(vs.trainable_variables()) {
            support::set_grad(copy, &weight.grad().to_device(Device::Cpu));
        }
        optimizer.step(&Update::plain()).expect("a step");
        reference.step(&Update::plain()).expect("a step");
    }
    let present = block.present().expect("the weights");
    for (copy, weight) in copies.iter().zip(vs.trainable_variables()) {
        assert!(weight.to_device(Device::Cpu).equal(copy));
    }
    drop(present);
    assert!(vs.trainable_variables()[0].f_sum(Kind::Float).map_err(Error::from).is_err());
}

#[test]
fn updates_of_our_own_kernels_are_refused_with_the_way_out_and_run_on_the_host() {
    let _guard = support::serial();
    let name = "updates_of_our_own_kernels_are_refused_with_the_way_out_and_run_on_the_host";
    let Some(device) = device(name) else { return };
    let w = Tensor::ones([4096], (Kind::Float, device)).set_requires_grad(true);
    w.square().sum(Kind::Float).backward();
    let weights = vec![w.shallow_clone()];
    let refused = Lion::new(&weights, LionConfig::default()).expect("a leaf").step(&Update::plain());
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    let refused = AdamW8bit::new(&weights, AdamW8bitConfig::default()).expect("a leaf").allocate();
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    let inner = Lion::new(&weights, LionConfig::default().lr(0.25).weight_decay(0.0)).expect("a leaf");
    let mut lion = CpuOffload::optimizer(inner).host().expect("a device");
    lion.step(&Update::plain()).expect("a step");
    assert_eq!(w.double_value(&[0]), 0.75);
}

/// A weight whose elements share memory cannot be written back.
#[test]
fn a_weight_that_does_not_come_back_after_its_state_moved_is_poison() {
    let _guard = support::serial();
    let name = "a_weight_that_does_not_come_back_after_its_state_moved_is_poison";
    let Some(device) = device(name) else { return };
    let w = Tensor::ones([1], (Kind::Float, device)).expand([64], false).detach().set_requires_grad(true);
    w.square().sum(Kind::Float).backward();
    let inner = Lion::new(&vec![w.shallow_clone()], LionConfig::default()).expect("a leaf");
    let mut lion = CpuOffload::optimizer(inner).host().expect("a device");
    let failed = lion.step(&Update::plain());
    assert!(matches!(failed, Err(Error::Poisoned { .. })), "{failed:?}");
}

#[test]
fn a_monitor_and_the_report_have_the_device_s_figures() {
    let _guard = support::serial();
    let Some(device) = device("a_monitor_and_the_report_have_the_device_s_figures") else { return };
    let held = Tensor::zeros([SIDE, SIDE], OPTIONS);
    let report = memfit::memory::system_report().unwrap();
    let gpu = report.gpus.iter().find(|gpu| gpu.device == device).unwrap();
    assert!(gpu.free < gpu.total, "{report}");
    let monitor = memfit::memory::Monitor::every(std::time::Duration::from_secs(60)).start().unwrap();
    let reading = monitor.latest();
    let seen = reading.devices.iter().find(|seen| seen.device == device).unwrap();
    assert!(seen.live >= 4 * held.numel() as u64 && seen.reserved >= seen.live, "{seen:?}");
    monitor.stop().unwrap();
    drop(held);
    for _ in 0..2 {
        assert!(memfit::memory::stats(device).unwrap().peak >= seen.live, "asking does not reset it");
    }
}

#[test]
fn a_loader_brings_batches_to_the_device_in_their_order() {
    use memfit::data::{Loader, Random, Source};
    struct Rows;
    impl Source for Rows {
        type Sample = (Vec<f32>, i64);

        fn len(&self) -> u64 {
            200
        }

        fn get(&self, index: u64, _: &mut Random) -> memfit::Result<Self::Sample> {
            Ok((vec![index as f32; 1 << 16], index as i64))
        }
    }
    let _guard = support::serial();
    let Some(device) = device("a_loader_brings_batches_to_the_device_in_their_order") else { return };
    // Without workers none is ahead.
    let loader = |workers| Loader::new(Rows).batch(4).workers(workers).pin(device).build().expect("a loader");
    for (index, batch) in loader(2).enumerate().chain(loader(0).enumerate()) {
        let (rows, labels) = batch.expect("a batch").batch;
        assert_eq!((rows.device(), labels.device()), (device, device));
        // The training's own queue is busy while the next copy runs.
        let busy = chain(&rows.narrow(1, 0, SIDE));
        assert_eq!(busy.size(), [4, SIDE]);
        let wanted: Vec<i64> = (4 * index as i64..4 * index as i64 + 4).collect();
        assert_eq!(Vec::<i64>::try_from(&labels).expect("labels"), wanted);
        let means = Vec::<f64>::try_from(rows.mean_dim(1, false, Kind::Double)).expect("means");
        assert_eq!(means, wanted.iter().map(|label| *label as f64).collect::<Vec<_>>());
    }
}

#[test]
fn a_sample_on_the_device_is_told() {
    let _guard = support::serial();
    let Some(device) = device("a_sample_on_the_device_is_told") else { return };
    use memfit::data::{InMemory, Loader};
    let loader =
        Loader::new(InMemory::of(vec![1_i64])).map(move |n, _| Ok(Tensor::from(n).to_device(device)));
    let error = loader.build().unwrap().next().unwrap().unwrap_err().to_string();
    assert!(error.starts_with("record 0: it is on Cuda(") && error.contains("LoaderBuilder::pin"), "{error}");
}

#[test]
fn a_loader_for_a_device_that_is_not_there_is_refused() {
    let _guard = support::serial();
    use memfit::data::{Loader, Random, Source};
    struct One;
    impl Source for One {
        type Sample = i64;

        fn len(&self) -> u64 {
            1
        }

        fn get(&self, _: u64, _: &mut Random) -> memfit::Result<i64> {
            Ok(1)
        }
    }
    let refused = Loader::new(One).pin(Device::Cuda(99)).build();
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    // On a CPU the same line costs nothing.
    assert_eq!(Loader::new(One).pin(Device::Cpu).build().expect("a loader").count(), 1);
}
