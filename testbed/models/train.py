#!/usr/bin/env python3
"""Trains the three detection networks of the demo and writes them as ONNX.

    python3 testbed/models/train.py            # from the repository's root; about 30 minutes on two cores

Needs torch, numpy and Pillow (Debian: `python3-torch python3-numpy python3-pil`, then use /usr/bin/python3) and cargo, which
renders the scenes. Training and evaluation scenes have different seeds. One process trains `large`, one `small` and `medium`
on the same batches; each uses one thread, so a seed gives the same weights on the same machine and torch version.

The networks are fully convolutional: any picture whose sides are multiples of 8. Input: the picture as RGB planes, minus its
mean, divided by its standard deviation (`standardise`). Output: eight planes at one eighth of the size (`CLASSES` logits, the
offset of the box's centre from the cell's corner in cells, the logarithm of the box's size in cells).
"""
import argparse
import io
import json
import math
import multiprocessing
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
STRIDE = 8
CLASSES = 4
RESOLUTIONS = [(160, 120), (224, 168), (320, 240), (448, 336)]
# The larger pictures cost more and teach less per second.
RESOLUTION_SHARE = [0.24, 0.32, 0.3, 0.14]
TRAIN_SCENES, TRAIN_FRAMES_PER_SCENE, TRAIN_FIRST_SEED = 900, 3, 1_000_000
HELD_OUT_SCENES, HELD_OUT_FIRST_SEED = 60, 1
HELD_OUT_LIGHT = [(1.0, 90), (1.0, 50), (0.12, 75), (0.06, 90)]  # brightness and JPEG quality
MIN_VISIBLE_PART = 0.4
SCORE = 0.4


# ---------------------------------------------------------------- networks

class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut; the second looks farther."""

    def __init__(self, channels, dilation):
        super().__init__()
        self.body = nn.Sequential(*convolution(channels, channels), *convolution(channels, channels, dilation=dilation)[:-1])
        self.end = nn.ReLU()

    def forward(self, x):
        return self.end(x + self.body(x))


def convolution(inputs, outputs, stride=1, dilation=1):
    return [nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def network(size):
    if size == "small":
        layers = [*convolution(3, 8, 2), *convolution(8, 12, 2), *convolution(12, 16, 2),
                  *convolution(16, 16), *convolution(16, 16, dilation=2), *convolution(16, 16, dilation=4)]
        width = 16
    elif size == "medium":
        layers = [*convolution(3, 12, 2), *convolution(12, 24, 2), *convolution(24, 48, 2),
                  Block(48, 2), Block(48, 4), *convolution(48, 48)]
        width = 48
    else:
        layers = [*convolution(3, 16, 2), *convolution(16, 32, 2), Block(32, 1), *convolution(32, 64, 2),
                  Block(64, 2), Block(64, 4), Block(64, 2)]
        width = 64
    head = nn.Conv2d(width, CLASSES + 4, 1)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    # A cell holds a given class about once in a thousand.
    nn.init.constant_(head.bias[:CLASSES], -5.0)
    return nn.Sequential(*layers, head)


# ---------------------------------------------------------------- scenes

class Scenes:
    def __init__(self, folder):
        truth = json.loads((folder / "truth.json").read_text())
        self.width, self.height, self.sigma = truth["width"], truth["height"], truth["noise_sigma"]
        self.boxes = [np.array(f["boxes"], np.float32).reshape(-1, 5) for f in truth["frames"]]
        self.pixels = np.memmap(folder / "frames.rgb", np.uint8, "r", shape=(len(self.boxes), self.height, self.width, 3))

    def __len__(self):
        return len(self.boxes)


def render(folder, first_seed, scenes, per_scene, *light):
    """Scenes from the renderer: clean, or under a spacing in seconds and a brightness."""
    if not (folder / "truth.json").exists():
        subprocess.run(["cargo", "run", "-q", "-p", "compass-scenes", "--example", "dump", "--", str(folder),
                        str(first_seed), str(scenes), str(per_scene), *map(str, light)], cwd=ROOT, check=True)
    return Scenes(folder)


def lit(pixels, brightness, noise, rng):
    """round(pixel × brightness + noise): the light model of compass-scenes."""
    table = (np.arange(256) * brightness + 0.5).astype(np.float32)
    start = rng.integers(0, noise.size - pixels.size)
    values = table[pixels.reshape(-1)] + noise[start:start + pixels.size]
    return np.clip(values, 0, 255).astype(np.uint8).reshape(pixels.shape)


def through_jpeg(picture, quality):
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=quality, subsampling=0)
    return Image.open(io.BytesIO(data.getvalue())).convert("RGB")


def standardise(picture):
    values = np.asarray(picture, np.float32)
    return ((values - values.mean()) / (values.std() + 1.0)).transpose(2, 0, 1)


def sample(scenes, index, size, noise, rng):
    """One augmented picture and its boxes (class, x, y, w, h as parts of the picture)."""
    pixels, boxes = scenes.pixels[index], scenes.boxes[index].copy()
    brightness = rng.uniform(0.6, 1.1) if rng.random() < 0.4 else math.exp(rng.uniform(math.log(0.04), math.log(0.7)))
    picture = Image.fromarray(lit(pixels, brightness, noise, rng))
    crop = (0, 0, scenes.width, scenes.height)
    if rng.random() < 0.4:
        part = rng.uniform(0.7, 1.0)
        w, h = scenes.width * part, scenes.height * part
        left, top = rng.uniform(0, scenes.width - w), rng.uniform(0, scenes.height - h)
        crop = (left, top, left + w, top + h)
        boxes[:, 1] = (boxes[:, 1] - left / scenes.width) / part
        boxes[:, 2] = (boxes[:, 2] - top / scenes.height) / part
        boxes[:, 3:] /= part
        x0, y0 = boxes[:, 1].clip(0, 1), boxes[:, 2].clip(0, 1)
        x1, y1 = (boxes[:, 1] + boxes[:, 3]).clip(0, 1), (boxes[:, 2] + boxes[:, 4]).clip(0, 1)
        keep = (x1 - x0) * (y1 - y0) >= MIN_VISIBLE_PART * boxes[:, 3] * boxes[:, 4]
        boxes = np.stack([boxes[:, 0], x0, y0, x1 - x0, y1 - y0], 1)[keep]
    picture = picture.resize(size, Image.BILINEAR, box=crop)
    if rng.random() < 0.8:
        picture = through_jpeg(picture, int(rng.integers(25, 96)))
    tensor = standardise(picture)
    if rng.random() < 0.5:
        tensor = tensor[:, :, ::-1].copy()
        boxes[:, 1] = 1 - boxes[:, 1] - boxes[:, 3]
    return tensor, boxes


def targets(boxes, size):
    """Heat (class planes) and, per cell, box values with a weight."""
    columns, rows = size[0] // STRIDE, size[1] // STRIDE
    heat = np.zeros((CLASSES, rows, columns), np.float32)
    values = np.zeros((4, rows, columns), np.float32)
    weight = np.zeros((rows, columns), np.float32)
    grid_y, grid_x = np.mgrid[0:rows, 0:columns].astype(np.float32)
    for kind, x, y, w, h in boxes:
        w_cells, h_cells = w * columns, h * rows
        cx, cy = (x + w / 2) * columns, (y + h / 2) * rows
        column, row = min(int(cx), columns - 1), min(int(cy), rows - 1)
        sx, sy = max(0.45, 0.13 * w_cells), max(0.45, 0.13 * h_cells)
        bump = np.exp(-((grid_x - column) ** 2 / (2 * sx * sx) + (grid_y - row) ** 2 / (2 * sy * sy)))
        heat[int(kind)] = np.maximum(heat[int(kind)], bump)
        # Cells around the centre learn the box too; where two objects meet, the nearer centre wins.
        better = (bump > 0.3) & (bump > weight)
        weight[better] = bump[better]
        values[0][better] = (cx - grid_x)[better]
        values[1][better] = (cy - grid_y)[better]
        values[2][better] = math.log(max(w_cells, 0.05))
        values[3][better] = math.log(max(h_cells, 0.05))
    return heat, values, weight


def loss(output, heat, values, weight):
    logits = output[:, :CLASSES]
    chance = torch.sigmoid(logits).clamp(1e-4, 1 - 1e-4)
    centre = heat >= 0.999
    objects = centre.sum().clamp(min=1)
    hit = -torch.log(chance) * (1 - chance) ** 2 * centre
    miss = -torch.log(1 - chance) * chance ** 2 * (1 - heat) ** 4 * ~centre
    # Log-size counts double: a size 30 % off costs more overlap than a centre 30 % of a cell off.
    distance = (output[:, CLASSES:] - values).abs() * torch.tensor([1.0, 1.0, 2.0, 2.0]).view(1, 4, 1, 1)
    boxes = (distance.sum(1) * weight).sum() / weight.sum().clamp(min=1)
    return (hit.sum() + miss.sum()) / objects + 0.5 * boxes


# ---------------------------------------------------------------- training

def train(sizes, folder, out, seed, steps, batch):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, len(sizes)])
    scenes = Scenes(folder)
    noise = rng.normal(0, scenes.sigma, 1 << 22).astype(np.float32)
    nets = {size: network(size) for size in sizes}
    peaks = {"small": 6e-3, "medium": 4e-3, "large": 3e-3}
    optimisers = {s: torch.optim.AdamW(n.parameters(), lr=peaks[s], weight_decay=1e-4) for s, n in nets.items()}
    started, averages = time.monotonic(), {size: 0.0 for size in sizes}
    for step in range(steps):
        size = RESOLUTIONS[rng.choice(len(RESOLUTIONS), p=RESOLUTION_SHARE)]
        drawn = [sample(scenes, int(rng.integers(len(scenes))), size, noise, rng) for _ in range(batch)]
        aims = [targets(boxes, size) for _, boxes in drawn]
        inputs = torch.from_numpy(np.stack([t for t, _ in drawn]))
        heat, values, weight = (torch.from_numpy(np.stack(part)) for part in zip(*aims))
        warm = min(1.0, (step + 1) / (0.05 * steps))
        pace = warm * (0.5 + 0.5 * math.cos(math.pi * step / steps)) + 0.003
        for name, net in nets.items():
            for group in optimisers[name].param_groups:
                group["lr"] = peaks[name] * pace
            value = loss(net(inputs), heat, values, weight)
            optimisers[name].zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimisers[name].step()
            averages[name] += (value.item() - averages[name]) * max(0.01, 1 / (step + 1))
        if step % 50 == 49:
            print(f"{step + 1}/{steps} {time.monotonic() - started:.0f}s "
                  + " ".join(f"{n} {v:.3f}" for n, v in averages.items()), flush=True)
        if step % 500 == 499 or step == steps - 1:
            for name, net in nets.items():
                export(net, out / f"{name}.onnx")
                torch.save(net.state_dict(), folder.parent / f"{name}.pt")


def export(net, path):
    net.eval()
    torch.onnx.export(net, torch.zeros(1, 3, 240, 320), str(path), opset_version=13, input_names=["image"],
                      output_names=["cells"], dynamic_axes={"image": {2: "height", 3: "width"}, "cells": {2: "rows", 3: "columns"}})
    net.train()


# ---------------------------------------------------------------- evaluation on held-out scenes

def decode(cells, score=SCORE):
    """Peaks of the class planes as (score, class, x, y, w, h), best first, overlapping ones dropped."""
    _, rows, columns = cells.shape
    chance = 1 / (1 + np.exp(-cells[:CLASSES]))
    padded = np.pad(chance, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    around = np.max([padded[:, dy:dy + rows, dx:dx + columns] for dy in range(3) for dx in range(3)], axis=0)
    found = []
    for kind, row, column in zip(*np.where((chance >= score) & (chance >= around))):
        dx, dy, lw, lh = cells[CLASSES:, row, column]
        w, h = math.exp(min(lw, 6)) / columns, math.exp(min(lh, 6)) / rows
        cx, cy = (column + dx) / columns, (row + dy) / rows
        x0, y0, x1, y1 = max(cx - w / 2, 0), max(cy - h / 2, 0), min(cx + w / 2, 1), min(cy + h / 2, 1)
        found.append((float(chance[kind, row, column]), int(kind), x0, y0, x1 - x0, y1 - y0))
    found.sort(key=lambda d: -d[0])
    kept = []
    for candidate in found:
        if all(overlap(candidate[2:], other[2:]) <= 0.5 for other in kept):
            kept.append(candidate)
    return kept


def overlap(a, b):
    w = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    h = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    if w <= 0 or h <= 0:
        return 0.0
    return w * h / (a[2] * a[3] + b[2] * b[3] - w * h)


def count(found, boxes):
    """(true positives, false positives, false negatives), greedy by score at IoU 0.5, classes must agree."""
    free, hits = list(range(len(boxes))), 0
    for _, kind, *area in found:
        best = max((i for i in free if int(boxes[i][0]) == kind), key=lambda i: overlap(area, boxes[i][1:]), default=None)
        if best is not None and overlap(area, boxes[best][1:]) >= 0.5:
            free.remove(best)
            hits += 1
    return hits, len(found) - hits, len(free)


def evaluate(work, nets):
    """F1 on the frames that the Rust evaluation sees too, pixel by pixel."""
    rows = []
    for brightness, quality in HELD_OUT_LIGHT:
        scenes = render(work / f"held-out-{brightness}", HELD_OUT_FIRST_SEED, HELD_OUT_SCENES, 1, 1, brightness)
        for width, height in RESOLUTIONS:
            totals = {name: np.zeros(3, int) for name in nets}
            for index in range(len(scenes)):
                picture = Image.fromarray(scenes.pixels[index]).resize((width, height), Image.BILINEAR)
                inputs = torch.from_numpy(standardise(through_jpeg(picture, quality)))[None]
                for name, net in nets.items():
                    with torch.no_grad():
                        totals[name] += count(decode(net(inputs)[0].numpy()), scenes.boxes[index])
            for name, (tp, fp, fn) in totals.items():
                rows.append({"model": name, "width": width, "height": height, "brightness": brightness, "quality": quality,
                             "f1": round(2 * tp / max(2 * tp + fp + fn, 1), 4), "tp": int(tp), "fp": int(fp), "fn": int(fn)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "models", help="rendered scenes and checkpoints")
    parser.add_argument("--out", type=Path, default=HERE, help="where the ONNX files go")
    parser.add_argument("--steps-large", type=int, default=2800)
    parser.add_argument("--steps-small", type=int, default=2800, help="for small and medium")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only-evaluate", action="store_true")
    arguments = parser.parse_args()
    # One thread a process: two processes fill two cores, and sums keep their order.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    started = time.monotonic()
    train_folder = arguments.work / "train"
    if not arguments.only_evaluate:
        render(train_folder, TRAIN_FIRST_SEED, TRAIN_SCENES, TRAIN_FRAMES_PER_SCENE)
        jobs = [(["large"], arguments.steps_large), (["small", "medium"], arguments.steps_small)]
        children = [multiprocessing.Process(target=train, args=(sizes, train_folder, arguments.out, arguments.seed, steps,
                                                                arguments.batch)) for sizes, steps in jobs]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode != 0 for child in children):
            raise SystemExit("training failed; the reason is above")
        print(f"trained in {time.monotonic() - started:.0f} s", flush=True)
    nets = {}
    for name in ("small", "medium", "large"):
        nets[name] = network(name)
        nets[name].load_state_dict(torch.load(arguments.work / f"{name}.pt"))
        nets[name].eval()
    rows = evaluate(arguments.work, nets)
    lines = ",\n".join(json.dumps(row) for row in rows)
    (arguments.out / "evaluation-python.json").write_text(
        f'{{\n"scenes": {HELD_OUT_SCENES},\n"first_seed": {HELD_OUT_FIRST_SEED},\n"rows": [\n{lines}\n]\n}}\n')


if __name__ == "__main__":
    main()
