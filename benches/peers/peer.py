"""One side of `cargo xtask peers`: PyTorch, trained step by step on command.

Reads lines on standard input and answers each with one line:
`step` trains on the next batch and gives `<seconds> <peak bytes> <loss>`; `quit` ends.
"""

import argparse
import ctypes
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--counter", required=True, help="memfit's counting allocator as a shared library")
parser.add_argument("--folder", required=True, help="weights, text and offsets, as the Rust side wrote them")
parser.add_argument("--strategy", required=True, help="parts joined by +, as in bf16+checkpoint:1")
for size in ("blocks", "heads", "width", "context", "batch"):
    parser.add_argument(f"--{size}", type=int, required=True)
parser.add_argument("--dropout", type=float, required=True)
args = parser.parse_args()

# Installed before the first tensor is made.
counter = ctypes.CDLL(args.counter)
if not counter.mf_cpu_counted():
    sys.exit("libtorch's CPU allocator is not the counting one")

import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width = args.width
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def attention(self, x):
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, args.heads, width // args.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x):
        x = x + F.dropout(self.attention(self.norm1(x)), args.dropout, self.training)
        wide = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + F.dropout(self.down(wide), args.dropout, self.training)


class Gpt(nn.Module):
    def __init__(self, every):
        super().__init__()
        self.every = every
        self.tokens = nn.Embedding(256, args.width)
        self.positions = nn.Parameter(torch.empty(args.context, args.width))
        self.blocks = nn.ModuleList(Block() for _ in range(args.blocks))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for index, block in enumerate(self.blocks):
            if self.every and index % self.every == 0:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


class Data:
    """The rows whose offsets the Rust side wrote down."""

    def __init__(self):
        with open(f"{args.folder}/text", "rb") as file:
            self.text = file.read()
        with open(f"{args.folder}/offsets") as file:
            self.offsets = [int(line) for line in file]
        self.at = 0

    def batch(self):
        starts = [self.offsets[(self.at + row) % len(self.offsets)] for row in range(args.batch)]
        self.at += args.batch
        rows = [list(self.text[start : start + args.context + 1]) for start in starts]
        return (
            torch.tensor([row[:-1] for row in rows]),
            torch.tensor([row[1:] for row in rows]),
        )


def peak():
    stats = (ctypes.c_uint64 * 8)()
    counter.mf_cpu_read(stats)
    return stats[1]


def strategy():
    every, micros, bf16, in_backward = 0, 1, False, False
    for part in args.strategy.split("+"):
        name, _, number = part.partition(":")
        if name == "checkpoint":
            every = int(number)
        elif name == "accumulate":
            micros = int(number)
        elif name == "bf16":
            bf16 = True
        elif name == "in-backward":
            in_backward = True
        elif name != "plain":
            sys.exit(f"PyTorch has no strategy {name}")
    return every, micros, bf16, in_backward


def update_in_backward(model):
    """Each parameter moves as soon as its gradient is there, by an optimizer of its own."""

    def attach(parameter):
        optimizer = torch.optim.AdamW([parameter], lr=3e-4, fused=True)

        def update(_):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        parameter.register_post_accumulate_grad_hook(update)

    for parameter in model.parameters():
        attach(parameter)


def main():
    every, micros, bf16, in_backward = strategy()
    model = Gpt(every)
    model.load_state_dict(load_file(f"{args.folder}/weights.safetensors"))
    if in_backward:
        update_in_backward(model)
        optimizers = []
    else:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)]
    data = Data()
    torch.manual_seed(0)

    def mean_loss(tokens, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(tokens).view(-1, 256).float()
            return F.cross_entropy(logits, targets.view(-1))

    def step(tokens, targets):
        total = 0.0
        parts = list(zip(tokens.chunk(micros), targets.chunk(micros)))
        for micro_tokens, micro_targets in parts:
            loss = mean_loss(micro_tokens, micro_targets) / len(parts)
            loss.backward()
            total = total + loss.detach()
            del loss
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    print("ready", torch.__version__, torch.get_num_threads(), flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            break
        tokens, targets = data.batch()
        counter.mf_cpu_reset_peak()
        start = time.perf_counter()
        loss = step(tokens, targets)
        seconds = time.perf_counter() - start
        print(f"{seconds:.6f} {peak()} {loss.item():.9f}", flush=True)


main()
