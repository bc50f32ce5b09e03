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


def names_of(model):
    """All names of each parameter, by identity, in the order of the alphabet: memfit uses the first."""
    names = {}
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False)):
        names.setdefault(id(parameter), []).append(name)
    return names


def group_of(optimizer):
    """The one group of an AdamW that memfit has the like of."""
    if len(optimizer.param_groups) != 1:
        raise ValueError("the recipe is for one parameter group")
    if optimizer.param_groups[0].get("amsgrad"):
        raise ValueError("memfit's AdamW has no amsgrad")
    return optimizer.param_groups[0]


def from_memfit(snapshot, model, optimizer=None):
    """Loads a snapshot into a model and, with one parameter group, its AdamW."""
    model.load_state_dict(state_dict_of(snapshot))
    if optimizer is None:
        return
    snapshot = Path(snapshot)
    tensors = load_file(snapshot / "optimizer.safetensors")
    scalars = json.loads((snapshot / "manifest.json").read_text())["scalars"]
    loaded = optimizer.state_dict()
    names = names_of(model)
    for index, parameter in enumerate(group_of(optimizer)["params"]):
        known = names.get(id(parameter), [])
        name = next((name for name in known if f"{name}.exp_avg" in tensors), None)
        if name is None:
            if parameter.requires_grad:
                raise KeyError(f"the snapshot has no state of AdamW for {known}")
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
    tensors, steps, names = {}, 0, names_of(model)
    for parameter in group_of(optimizer)["params"]:
        if id(parameter) not in names:
            raise KeyError("the optimizer has a parameter that the model has not")
        name = names[id(parameter)][0]
        moments = optimizer.state.get(parameter)
        if not moments:
            if parameter.requires_grad:
                raise KeyError(f"AdamW has no state for {name}: it has not been stepped with a gradient")
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
    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)]
    model = torch.nn.Sequential(*layers)
    model[2].weight = model[0].weight
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps):
    x = torch.arange(8, dtype=torch.float32).view(2, 4) / 8
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def refuses(call, error):
    try:
        call()
    except error:
        return
    raise AssertionError(f"{error.__name__} was wanted")


def main(role, folder):
    folder = Path(folder)
    model, optimizer = example()
    if role == "begin":
        refuses(lambda: to_memfit(folder / "refused", model, optimizer), KeyError)
        amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
        refuses(lambda: to_memfit(folder / "refused", model, amsgrad), ValueError)
        train(model, optimizer, 5)
        to_memfit(folder / "from_python", model, optimizer)
    else:
        snapshot = next(folder.glob("snapshots/step-*"))
        stranger = torch.nn.Parameter(torch.zeros(1))
        more = torch.optim.AdamW([*model.parameters(), stranger])
        refuses(lambda: from_memfit(snapshot, model, more), KeyError)
        from_memfit(snapshot, model, optimizer)
        torch.set_rng_state(generator_of(snapshot))
        save_file({"draws": torch.rand(5)}, folder / "draws.safetensors")
    train(model, optimizer, 5)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(own, folder / f"{role}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
