"""A comparison as ``linattn compare`` writes it, from formulas: 7 mechanisms, 3 seeds, 10 epochs, 6 layers."""

import json
from math import exp, log, sin
from pathlib import Path
from statistics import mean, stdev
from typing import Any

SEEDS = (0, 1, 2)
EPOCHS = 10
LAYERS = 6
TOKENS = 196
# Name -> top-1 of the last epoch by seed, images/s forward, peak MiB, mean entropy.
MECHANISMS = {
    "softmax": ((93.41, 93.60, 93.52), 9800.0, 1912.4, 3.31),
    "relu": ((91.02, 91.34, 90.88), 14100.0, 1105.0, 5.07),
    "focused": ((92.15, 92.02, 92.40), 11200.0, 1301.2, 4.71),
    "pola": ((92.88, 92.61, 92.93), 10900.0, 1388.9, 4.40),
    "nala": ((93.05, 92.79, 93.11), 11050.0, 1352.5, 4.02),
    "mirror": ((93.20, 92.95, 93.01), 12400.0, 1211.7, 4.28),
    "quadratic": ((92.44, 92.71, 92.38), 8700.0, 1702.3, 4.55),
}


def write_folder(folder: Path, results: dict[str, Any] | None = None, examples: dict[str, Any] | None = None) -> Path:
    """The folder of a comparison, before its report is written."""
    (folder / "results.json").write_text(json.dumps(make_results() if results is None else results))
    (folder / "examples.json").write_text(json.dumps(make_examples() if examples is None else examples))
    return folder


def make_results() -> dict[str, Any]:
    rows = [_row(name, i, seed) for name in MECHANISMS for i, seed in enumerate(SEEDS)]
    return {"meta": _meta(), "mechanisms": [_mechanism(i, name) for i, name in enumerate(MECHANISMS)], "rows": rows}


def make_unfinished() -> dict[str, Any]:
    """Stopped in the middle: one mechanism whole, one with two of three runs, one failed, the rest waiting."""
    results = make_results()
    results["meta"]["finished"] = False
    results["mechanisms"] = results["mechanisms"][:3]
    relu, focused = results["mechanisms"][1:]
    focused.update({field: None for field in focused if field not in ("mechanism", "lr")})
    relu.update({field: None for field in relu if field.startswith("top1")}, runs=0)
    del relu["entropy_gap"], relu["layers"], relu["peak_bytes_train"]
    for row in results["rows"]:
        if row["mechanism"] == "relu" and row["seed"] == 2:
            row.update(status="failed", reason="loss is nan in epoch 3", top1=None, epochs=row["epochs"][:3])
            row["epochs"][-1]["train_loss"] = "nan"
        elif row["mechanism"] not in ("softmax", "relu"):
            row.update(status="waiting", top1=None, train_seconds=None, epochs=[])
    return results


def make_examples() -> dict[str, Any]:
    """A grey image of 28 x 28 with a map of 14 x 14, and one in colour of 8 x 8 with a map of 8 x 8."""
    grey = [[_stroke(y / 27, x / 27) for x in range(28)] for y in range(28)]
    color = [[[30 * x, 30 * y, 255 - 15 * (x + y)] for x in range(8)] for y in range(8)]
    return {
        "layer": "blocks.5.attn",
        "images": [
            {"label": "ankle boot", "pixels": grey, "token": [6, 5], "maps": _maps(14, (6, 5))},
            {"label": "sky", "pixels": color, "token": [1, 6], "maps": _maps(8, (1, 6))},
        ],
    }


def _stroke(y: float, x: float) -> int:
    distance = min(abs((x - 0.5) ** 2 + (y - 0.3) ** 2 - 0.03), abs((x - 0.5) ** 2 + (y - 0.68) ** 2 - 0.04))
    return round(255 * exp(-distance * 90))


def _maps(grid: int, token: tuple[int, int]) -> dict[str, list[list[float]]]:
    maps = {}
    for name, (*_, entropy) in MECHANISMS.items():
        width = exp(entropy) / 300 * grid**2
        maps[name] = [
            [exp(-((y - token[0]) ** 2 + (x - token[1]) ** 2) / width) + 0.05 * sin(x * y) ** 2 for x in range(grid)]
            for y in range(grid)
        ]
    return maps


def _meta() -> dict[str, Any]:
    return {
        "device": "NVIDIA H200",
        "cpu": "Intel(R) Xeon(R) Platinum 8480+",
        "threads": 16,
        "versions": {"linattn": "0.2.0", "torch": "2.11.0", "python": "3.11.9"},
        "command": "linattn compare --data fashion-mnist --mechanisms softmax,relu,focused,pola,nala,mirror,quadratic "
        "--seeds 0,1,2 --epochs 10 --device cuda",
        "date": "2026-11-15T10:00:00+00:00",
        "data": {
            "name": "fashion-mnist",
            "classes": ["t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"],
            "train": 60000,
            "test": 10000,
            "image_size": [28, 28],
            "channels": 1,
        },
        "host": {"size": "tiny", "tokens": TOKENS, "patch_size": 2, "depth": LAYERS, "dim": 192, "num_heads": 3},
        "train": {
            "epochs": EPOCHS,
            "batch_size": 256,
            "lr": 0.001,
            "min_lr": 1e-05,
            "warmup_epochs": 2,
            "weight_decay": 0.05,
            "betas": [0.9, 0.999],
            "clip_norm": 1.0,
            "label_smoothing": 0.1,
            "ema_decay": None,
            "mixup": 0.0,
            "cutmix": 0.0,
            "rand_augment": None,
            "erasing": 0.0,
            "crop_padding": 2,
            "flip": True,
            "precision": "bf16",
            "compile": False,
            "seed": 0,
            "device": "cuda",
        },
        "seeds": list(SEEDS),
        "lrs": [0.0005, 0.001],
        "finished": True,
    }


def _mechanism(i: int, name: str) -> dict[str, Any]:
    top1, speed, mib, entropy = MECHANISMS[name]
    return {
        "mechanism": name,
        "lr": 0.001,
        "sweep": [{"lr": 0.0005, "top1": mean(top1) - 0.9}, {"lr": 0.001, "top1": mean(top1) - 0.4}],
        "top1_mean": mean(top1),
        "top1_std": stdev(top1),
        "top1_min": min(top1),
        "top1_max": max(top1),
        "runs": len(top1),
        "parameters": 2_684_170 + 1_153 * i,
        "mechanism_parameters": 1_153 * i,
        "flops": 530_000_000 + (180_000_000 if name == "softmax" else 52_000_000 + 9_000_000 * i),
        "attention_flops": 180_000_000 if name == "softmax" else 52_000_000 + 9_000_000 * i,
        "state_size": None if name == "softmax" else 12_480 * (2 if name in ("nala", "quadratic") else 1),
        "images_per_second_forward": speed,
        "images_per_second_train": speed * 0.31,
        "peak_bytes_train": int(mib * 2**20),
        "train_seconds_mean": 6e5 / speed,
        "entropy": entropy,
        "entropy_gap": None if name == "softmax" else entropy - MECHANISMS["softmax"][3],
        "layers": [_layer(name, entropy, i) for i in range(LAYERS)],
    }


def _layer(name: str, entropy: float, i: int) -> dict[str, Any]:
    heads = [min(entropy + 0.25 * sin(i + len(name)) + 0.1 * (head - 1), log(TOKENS)) for head in range(3)]
    cuts = name in ("relu", "focused")
    return {
        "layer": f"blocks.{i}.attn",
        "entropy": heads,
        "entropy_norm_correlation": [-0.61 + 0.03 * i, None, -0.55]
        if name == "softmax"
        else [0.02 * i - 0.01 * len(name), -0.01, 0.03],
        "positive_sequence_entropy": [value - 0.2 for value in heads],
        "effective_rank": [20.0 + 3 * i, 22.0, 24.5],
        "energy_lost": [0.48, 0.51, 0.5] if cuts else [None, None, None],
        "opposed_kept": [0.0, 0.0, 0.0] if cuts else [1.0, 1.0, 0.5],
    }


def _row(name: str, i: int, seed: int) -> dict[str, Any]:
    top1, speed, *_ = MECHANISMS[name]
    epochs = [_epoch(epoch, top1[i], 0.1 * i + 0.02 * len(name)) for epoch in range(EPOCHS)]
    return {
        "mechanism": name,
        "seed": seed,
        "lr": 0.001,
        "status": "done",
        "reason": "",
        "top1": top1[i],
        "train_seconds": 6e5 / speed + i,
        "epochs": epochs,
    }


def _epoch(epoch: int, top1: float, shift: float) -> dict[str, Any]:
    left = (EPOCHS - 1 - epoch) / (EPOCHS - 1)
    return {
        "epoch": epoch,
        "lr": 0.001 * left,
        "train_loss": 0.62 + (0.9 + shift) * left**3 + 0.02 * (94 - top1),
        "test_loss": 0.6 + left**3,
        "top1": top1 - 35 * left**4 - shift * left,
        "seconds": 4.5,
    }
