"""PyTorch's side of memfit's snapshots: weights, AdamW's state and the generator, both ways.

`docs/interop.md` has the recipe. Needs `torch` and `safetensors`. Run as a program it plays
PyTorch's part in `tests/interop.rs`.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def state_dict_of(snapshot):
    """The model's state dict, tied tensors under each of their names."""
    path = Path(snapshot) / "model.safetensors"
    state = load_file(path)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
    for alias, name in notes.items():
        if name in state:
            state[alias] = state[name]
    return state


def from_memfit(snapshot, model, optimizer=None):
    """Loads a snapshot into a model and, with one parameter group, its AdamW."""
    model.load_state_dict(state_dict_of(snapshot))
    if optimizer is None:
        return
    snapshot = Path(snapshot)
    tensors = load_file(snapshot / "optimizer.safetensors")
    scalars = json.loads((snapshot / "manifest.json").read_text())["scalars"]
    loaded = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    for index, name in enumerate(names):
        if f"{name}.exp_avg" not in tensors:
            continue
        step = scalars[f"optimizer.{name}.step"]["int"]
        loaded["state"][index] = {
            "step": torch.tensor(float(step)),
            "exp_avg": tensors[f"{name}.exp_avg"],
            "exp_avg_sq": tensors[f"{name}.exp_avg_sq"],
        }
    group = loaded["param_groups"][0]
    group["lr"] = scalars["optimizer.group0.lr"]["float"]
    group["weight_decay"] = scalars["optimizer.group0.weight_decay"]["float"]
    optimizer.load_state_dict(loaded)


def generator_of(snapshot):
    """What `torch.set_rng_state` takes."""
    return load_file(Path(snapshot) / "training.safetensors")["rng.cpu"]


def to_memfit(folder, model, optimizer=None):
    """Writes `model.safetensors` and, for AdamW, `optimizer.safetensors`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    first, state, notes = {}, {}, {"format": "pt"}
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        kept = first.setdefault(id(tensor), name)
        if kept == name:
            state[name] = tensor.detach().contiguous().cpu()
        else:
            notes[name] = kept
    save_file(state, folder / "model.safetensors", metadata=notes)
    if optimizer is None:
        return
    tensors, steps = {}, 0
    for name, parameter in model.named_parameters():
        moments = optimizer.state.get(parameter)
        if not moments:
            continue
        count = int(moments["step"])
        steps = max(steps, count)
        tensors[f"{name}.step"] = torch.tensor(count, dtype=torch.int64)
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}.{moment}"] = moments[moment].contiguous().cpu()
    tensors["steps"] = torch.tensor(steps, dtype=torch.int64)
    save_file(tensors, folder / "optimizer.safetensors")


def example():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    x = torch.arange(8, dtype=torch.float32).view(2, 4) / 8
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def main(role, folder):
    folder = Path(folder)
    model, optimizer = example()
    if role == "begin":
        train(model, optimizer, 5)
        to_memfit(folder / "from_python", model, optimizer)
    else:
        snapshot = next(folder.glob("snapshots/step-*"))
        from_memfit(snapshot, model, optimizer)
        torch.set_rng_state(generator_of(snapshot))
        save_file({"draws": torch.rand(5)}, folder / "draws.safetensors")
    train(model, optimizer, 5)
    save_file(model.state_dict(), folder / f"{role}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
