"""PyTorch's side of the section `data` of `cargo xtask peers`: a DataLoader, epoch by epoch.

`--make N` writes N pictures into the folder `--path` and ends. Otherwise it reads lines on
standard input and answers each with one line: `epoch` runs a shuffled epoch and gives
`<seconds> <samples>`; `first FILE` writes the first batch of the data's own order to a file, number
by number, and gives `<samples>`; anything else ends it. The DataLoader is made with the first
epoch and its workers stay.
"""

import argparse
import os
import sys
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

SIDE = 224
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Tokens(Dataset):
    """Rows of a file of 16-bit tokens, and the token that follows each token."""

    def __init__(self, path, context):
        self.data = np.memmap(path, dtype=np.uint16, mode="r")
        self.context = context

    def __len__(self):
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        row = torch.from_numpy(self.data[start : start + self.context + 1].astype(np.int64))
        return row[:-1], row[1:]


class Images(Dataset):
    """Pictures of a folder in the order of their names, again and again, with a number each."""

    def __init__(self, folder, repeat):
        names = sorted(name for name in os.listdir(folder) if name.endswith(".jpg"))
        self.paths = [os.path.join(folder, name) for name in names]
        self.repeat = repeat
        self.mean = torch.tensor(MEAN).view(-1, 1, 1)
        self.deviation = torch.tensor(DEVIATION).view(-1, 1, 1)

    def __len__(self):
        return len(self.paths) * self.repeat

    def __getitem__(self, index):
        index %= len(self.paths)
        with open(self.paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        # As torchvision's ToTensor and Normalize do it.
        pixels = torch.from_numpy(np.array(image, np.uint8, copy=True))
        tensor = pixels.permute(2, 0, 1).contiguous().to(torch.float32).div(255)
        tensor = tensor.clone().sub_(self.mean).div_(self.deviation)
        return tensor, index % 10


def make(folder, count):
    """Smooth noise whose spectrum falls like a photograph's, at a photograph's quality."""
    random = np.random.default_rng(0)
    height, width = 375, 500
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None, :]
    falling = np.maximum(np.hypot(down, across), 1 / width) ** -1.2
    for index in range(count):
        # Channels are mostly alike, as light and shadow make them.
        planes = []
        grey = random.standard_normal((height, width))
        for _ in range(3):
            noise = np.fft.rfft2(grey + 0.2 * random.standard_normal((height, width)))
            plane = np.fft.irfft2(noise * falling, (height, width))
            planes.append(128 + 56 * plane / plane.std())
        pixels = np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(os.path.join(folder, f"{index:05}.jpg"), quality=90)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=["tokens", "images"], required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--make", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    if args.make:
        return make(args.path, args.make)
    if args.data == "tokens":
        data = Tokens(args.path, args.context)
    else:
        data = Images(args.path, args.repeat)
    # What the first use of each library takes is not the loader's.
    torch.utils.data.default_collate([data[0], data[0]])
    loader = None
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "epoch":
            if loader is None:
                workers = args.workers
                loader = DataLoader(
                    data, batch_size=args.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
                )
            samples = 0
            start = time.perf_counter()
            for x, _ in loader:
                samples += len(x)
            print(f"{time.perf_counter() - start:.6f} {samples}", flush=True)
        elif word == "first":
            x, y = next(iter(DataLoader(data, batch_size=args.batch)))
            with open(rest[0], "wb") as file:
                file.write(x.numpy().tobytes() + y.numpy().tobytes())
            print(len(x), flush=True)
        else:
            break


main()
