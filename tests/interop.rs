//! PyTorch reads what memfit wrote and the other way round, AdamW's state included. Skipped
//! with a reason where `MEMFIT_PYTHON` names no Python with torch and safetensors.

mod support;

use std::path::Path;
use std::process::Command;

use memfit::optim::{AdamW, AdamWConfig};
use memfit::snapshot::{Extras, Weights, read_tensors};
use memfit::tch::{Device, Kind, Tensor, nn, nn::Module};
use memfit::{Loss, Snapshots, Stack, State, Value};
use support::{difference, serial};

fn python(role: &str, folder: &Path) -> bool {
    let Some(python) = std::env::var_os("MEMFIT_PYTHON") else {
        println!("skipped: MEMFIT_PYTHON names no Python with torch and safetensors");
        return false;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("xtask/interop/memfit_interop.py");
    // Python finds its own libtorch.
    let status = Command::new(python)
        .arg(script)
        .arg(role)
        .arg(folder)
        .env_remove("LD_LIBRARY_PATH")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .status();
    assert!(status.unwrap().success(), "python could not {role}");
    true
}

fn train(stack: &mut Stack, model: &nn::Sequential, steps: usize) {
    let x = Tensor::arange(8, (Kind::Float, Device::Cpu)).view([2, 4]) / 8.0;
    for _ in 0..steps {
        let loss = || Ok(Loss::of(model.forward(&x).square().mean(Kind::Float)));
        assert!(stack.step_with(loss).unwrap().stepped());
    }
}

/// PyTorch's file against our weights; its update rounds differently from ours.
fn compare(file: &Path, vs: &nn::VarStore) {
    let theirs = Tensor::read_safetensors(file).unwrap();
    assert_eq!(theirs.len(), vs.variables().len());
    for (name, theirs) in theirs {
        let apart = difference(&vs.variables()[&name], &theirs);
        assert!(apart < 1e-6, "{name}: {apart}");
    }
}

#[test]
fn pytorch_goes_on_where_memfit_stopped_and_back() {
    let _guard = serial();
    let dir = tempfile::tempdir().unwrap();
    if !python("begin", dir.path()) {
        return;
    }
    let vs = nn::VarStore::new(Device::Cpu);
    let first = nn::linear(vs.root() / "0", 4, 4, Default::default());
    let tied = (vs.root() / "2").add("weight", first.ws.shallow_clone(), true);
    let bias = (vs.root() / "2").zeros("bias", &[4]);
    let model = nn::seq()
        .add(first)
        .add_fn(|x| x.tanh())
        .add_fn(move |x| x.linear(&tied, Some(&bias)))
        .add(nn::linear(vs.root() / "3", 4, 1, Default::default()));
    let mut stack =
        Stack::of(&vs, AdamW::new(&vs, AdamWConfig::default().lr(0.01)).unwrap()).build().unwrap();

    let from_python = dir.path().join("from_python");
    Weights::open(from_python.join("model.safetensors")).unwrap().load_into(&vs).unwrap();
    let mut state = State::collect(|visitor| stack.optimizer_mut().visit_state(visitor)).unwrap();
    for (name, value) in read_tensors(from_python.join("optimizer.safetensors")).unwrap() {
        state.insert(name, value);
    }
    assert!(matches!(state.get("steps"), Some(Value::Int(5))));
    stack.optimizer_mut().load(&state).unwrap();
    train(&mut stack, &model, 5);
    compare(&dir.path().join("begin.safetensors"), &vs);

    let mut snapshots = Snapshots::in_folder(dir.path().join("snapshots")).unwrap();
    snapshots.save(&mut stack, &Extras::new()).unwrap();
    let ours = Tensor::rand([5], (Kind::Float, Device::Cpu));
    assert!(python("go_on", dir.path()));
    let theirs = Tensor::read_safetensors(dir.path().join("draws.safetensors")).unwrap();
    assert!(theirs[0].1.equal(&ours), "the generator's state is PyTorch's own");
    train(&mut stack, &model, 5);
    compare(&dir.path().join("go_on.safetensors"), &vs);
}
