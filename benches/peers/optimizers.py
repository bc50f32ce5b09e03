"""PyTorch's side of the optimizer table of `cargo xtask peers`: updates 50 million weights.

Reads lines on standard input and answers each with one line: `step` makes an update from the same
gradients again and gives `<seconds> <bytes of state> 0`; anything else ends it.
"""

import argparse
import sys
import time
import warnings

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--optimizer", required=True)
parser.add_argument("--shapes", required=True, help="as in 1536x512,512")
args = parser.parse_args()
warnings.filterwarnings("ignore")


def weights():
    torch.manual_seed(0)
    made = []
    for shape in args.shapes.split(","):
        size = [int(number) for number in shape.split("x")]
        weight = torch.nn.Parameter(torch.randn(size) * 0.02)
        weight.grad = torch.randn(size) * 0.01
        made.append(weight)
    return made


def optimizers(weights):
    optim = torch.optim
    if args.optimizer == "sgd":
        return [optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True)]
    if args.optimizer == "adamw":
        return [optim.AdamW(weights, lr=1e-3, fused=True)]
    if args.optimizer == "adafactor":
        return [optim.Adafactor(weights, lr=1e-2)]
    if args.optimizer == "muon":
        matrices = [weight for weight in weights if weight.dim() == 2]
        others = [weight for weight in weights if weight.dim() != 2]
        return [optim.Muon(matrices, lr=1e-3), optim.AdamW(others, lr=1e-3, fused=True)]
    if args.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            sys.exit("this Python has no torchao: `pip install torchao` into it, or leave adamw8bit out")
        return [AdamW8bit(weights, lr=1e-3)]
    sys.exit(f"PyTorch has no optimizer {args.optimizer}")


def size_of(value):
    if not isinstance(value, torch.Tensor):
        return 0
    # torchao's quantised state: codes and scales; the table of its 256 values is shared.
    parts = [name for name in getattr(value, "tensor_attrs", []) if name != "qmap"]
    if parts:
        return sum(size_of(getattr(value, name)) for name in parts)
    return value.numel() * value.element_size()


def main():
    chosen = optimizers(weights())

    def step():
        for optimizer in chosen:
            optimizer.step()

    step()  # makes the state, and torchao compiles
    states = [state for optimizer in chosen for state in optimizer.state.values()]
    size = sum(size_of(value) for state in states for value in state.values())
    print("ready", torch.__version__, torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        start = time.perf_counter()
        step()
        print(f"{time.perf_counter() - start:.6f} {size} 0", flush=True)


main()
