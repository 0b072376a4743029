#!/usr/bin/env python3
"""Writes the measured tables of the model card (README.md, between its markers) from the evaluations beside it.

    python3 testbed/models/card.py             # standard library only
"""
import hashlib
import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODELS = ["small", "medium", "large"]
DARK = 0.06
STORY = [("small", 320, 75), ("medium", 224, 50), ("medium", 224, 75), ("medium", 224, 90), ("large", 224, 90),
         ("medium", 320, 90), ("large", 320, 75), ("large", 320, 90), ("large", 448, 90)]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def replaced(text, begin, end, content):
    before, rest = text.split(begin)
    return before + begin + "\n\n" + content + "\n" + end + rest.split(end)[1]


def main():
    rust = json.loads((HERE / "evaluation.json").read_text())
    python = json.loads((HERE / "evaluation-python.json").read_text())
    f1 = {(r["model"], r["width"], r["brightness"], r["quality"]): r["f1"] for r in rust["rows"]}
    kilobytes = {(r["width"], r["brightness"], r["quality"]): r["jpeg_bytes"] / 1000 for r in rust["rows"]}
    cost = {(r["model"], r["width"]): r for r in rust["cost"]}
    sizes = sorted({(r["width"], r["height"]) for r in rust["rows"]})
    lights = sorted({r["brightness"] for r in rust["rows"]}, reverse=True)
    qualities = sorted({r["quality"] for r in rust["rows"]}, reverse=True)
    parts = []

    parts.append(f"### F1 by size, resolution, brightness and JPEG quality\n\n{rust['scenes']} held-out scenes (seeds from "
                 f"{rust['first_seed']} on), one frame each, IoU 0.5, classes must agree, scores from {rust['min_score']:.1f} on.\n")
    for quality in qualities:
        parts.append(f"JPEG quality {quality}:\n")
        parts.append(table(["model", "resolution"] + [f"brightness {b:g}" for b in lights],
                           [[m, f"{w}×{h}"] + [f"{f1[m, w, b, quality]:.2f}" for b in lights] for m in MODELS for w, h in sizes]))

    parts.append("### Cost of one inference\n\nCPU milliseconds on one thread of the machine that wrote this card, median, in the "
                 "profile that tests and the demo use. `detect` includes the input's layout and the decoding.\n")
    parts.append(table(["model"] + [f"{w}×{h}" for w, h in sizes],
                       [[m] + [f"{cost[m, w]['inference_ms']:.1f} (detect {cost[m, w]['detect_ms']:.1f})" for w, _ in sizes]
                        for m in MODELS]))
    parts.append("Preparing a 640×480 frame (resize; JPEG at quality 75 both ways) and its size:\n")
    parts.append(table(["resolution", "resize ms", "JPEG ms"] + [f"kB at quality {q}, day / dark" for q in qualities],
                       [[f"{w}×{h}", f"{cost['small', w]['resize_ms']:.1f}", f"{cost['small', w]['jpeg_both_ways_ms']:.1f}"]
                        + [f"{kilobytes[w, lights[0], q]:.1f} / {kilobytes[w, 0.05, q]:.1f}" for q in qualities] for w, h in sizes]))

    pairs = [(r, f1[r["model"], r["width"], r["brightness"], r["quality"]]) for r in python["rows"]
             if (r["model"], r["width"], r["brightness"], r["quality"]) in f1]
    day = [abs(r["f1"] - other) for r, other in pairs if r["brightness"] == 1.0]
    dark = [abs(r["f1"] - other) for r, other in pairs if r["brightness"] < 1.0]
    parts.append("### The same in Python\n\n`train.py` measures the networks in torch, with Pillow's resize and JPEG, on the same frames. "
                 f"F1 differs in daylight by {sum(day) / len(day):.3f} on average and {max(day):.3f} at most, in the dark by "
                 f"{sum(dark) / len(dark):.3f} and {max(dark):.3f}, in either direction: a grey level of rounding decides there which faint "
                 "coefficients JPEG keeps.\n")

    parts.append("### Files\n")
    files = [HERE / f"{m}.onnx" for m in MODELS]
    parts.append(table(["file", "bytes", "SHA-256"], [[f"`{p.name}`", f"{p.stat().st_size:,}",
                                                       f"`{hashlib.sha256(p.read_bytes()).hexdigest()}`"] for p in files]))
    card = (HERE / "README.md").read_text()
    mean_f1 = {(r["model"], r["width"], r["brightness"], r["quality"]): r["f1_frame_mean"] for r in rust["rows"]}
    heights = dict(sizes)
    story = table(["plan (model, resolution, JPEG quality)", "CPU ms", "daylight", f"brightness {DARK:g}"],
                  [[f"{m} {w}×{heights[w]} q{q}", f"{cost[m, w]['detect_ms']:.0f}", f"{mean_f1[m, w, 1.0, q]:.2f}",
                    f"{mean_f1[m, w, DARK, q]:.2f}"] for m, w, q in STORY])
    card = replaced(card, "<!-- story: begin -->", "<!-- story: end -->", story)
    (HERE / "README.md").write_text(replaced(card, BEGIN, END, "\n".join(parts)))
    (HERE / "SHA256SUMS").write_text("".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in files))


if __name__ == "__main__":
    main()
