"""Results of a comparison as ``linattn compare`` writes them, from formulas: 7 mechanisms, 5 seeds, 10 epochs."""

from math import exp, log, sin
from typing import Any

SEEDS, EPOCHS, LAYERS, TOKENS = range(5), 10, 6, 196
# Name -> mean score, images/s forward, peak MiB, mean entropy.
MECHANISMS = {
    "softmax": (93.5, 9800.0, 1912.4, 3.31),
    "relu": (91.1, 14100.0, 1105.0, 5.07),
    "focused": (92.2, 11200.0, 1301.2, 4.71),
    "pola": (92.8, 10900.0, 1388.9, 4.40),
    "nala": (93.4, 11050.0, 1352.5, 4.02),
    "mirror": (93.1, 12400.0, 1211.7, 4.28),
    "quadratic": (92.5, 8700.0, 1702.3, 4.55),
}


def score(name: str, seed: int) -> float:
    """Seeds move all alike, and each mechanism a little differently."""
    return round(MECHANISMS[name][0] + 0.3 * sin(seed) + 0.05 * sin(len(name) * (seed + 1)), 2)


def make_meta(**changes: Any) -> dict[str, Any]:
    return {
        "device": "NVIDIA H200", "cpu": "Intel(R) Xeon(R)", "threads": 16, "date": "2026-11-15T10:00:00+00:00",
        "versions": {"linattn": "0.2.0", "torch": "2.11.0"}, "experiment": "compare", "finished": True,
        "command": "linattn compare --data fashion-mnist --seeds 2 --device cuda",
        "about": "softmax, relu in a tiny ViT at 196 tokens on fashion-mnist",
        "metric": {"name": "top-1", "unit": "%", "decimals": 2, "higher": True, "counted": "image", "round": "epoch"},
        "data": {"name": "fashion-mnist", "train": 60000, "image_size": [28, 28]},
        "host": {"size": "tiny", "tokens": TOKENS, "preset": None}, "config": {"epochs": EPOCHS, "flip": True},
    } | changes  # fmt: skip


def make_rows(seeds=SEEDS) -> list[dict[str, Any]]:
    rows = [_sweep(name, lr) for name in MECHANISMS for lr in (0.0005, 0.001, 0.002)]
    rows += [_run(name, seed) for seed in seeds for name in MECHANISMS]
    rows += [_cost(number, name) for number, name in enumerate(MECHANISMS)]
    return rows + [_attention(name) for name in MECHANISMS]


def _sweep(name: str, lr: float) -> dict[str, Any]:
    found = MECHANISMS[name][0] - 1 - (lr != 0.001)
    return {"kind": "sweep", "mechanism": name, "seed": 0, "lr": lr, "validation": True, "score": found, "seconds": 9.0}


def _run(name: str, seed: int) -> dict[str, Any]:
    records = []
    for number in range(1, EPOCHS + 1):
        left = (EPOCHS - number) / (EPOCHS - 1)
        found = {"train_loss": 0.62 + 0.9 * left**3 + 0.01 * seed, "score": score(name, seed) - 35 * left**4}
        records.append({"round": number, **found})
    return {"kind": "run", "mechanism": name, "seed": seed, "lr": 0.001, "validation": False,
            "score": score(name, seed), "seconds": 60.0 + seed, "records": records}  # fmt: skip


def _cost(number: int, name: str) -> dict[str, Any]:
    _, speed, mib, _ = MECHANISMS[name]
    attention = 180_000_000 if name == "softmax" else 52_000_000 + 9_000_000 * number
    return {
        "kind": "cost", "mechanism": name, "parameters": 2_684_170 + 1_153 * number, "flops": 530_000_000 + attention,
        "attention_flops": attention, "state_size": None if name == "softmax" else 12_480 * (1 + number % 2),
        "images_per_second_forward": [0.9 * speed, speed, 1.1 * speed], "images_per_second_train": [0.31 * speed] * 3,
        "peak_bytes_train": int(mib * 2**20), "busy": 0.0,
    }  # fmt: skip


def _attention(name: str) -> dict[str, Any]:
    entropy, cuts, layers = MECHANISMS[name][3], name in ("relu", "focused"), []
    for number in range(LAYERS):
        heads = [min(entropy + 0.25 * sin(number + len(name)) + 0.1 * head, log(TOKENS)) for head in (-1, 0, 1)]
        correlation = [-0.61 + 0.03 * number, None, -0.55] if name == "softmax" else [0.02 * number, -0.01, 0.03]
        layers.append({
            "layer": f"blocks.{number}.attn", "entropy": heads, "entropy_norm_correlation": correlation,
            "positive_sequence_entropy": [value - 0.2 for value in heads], "effective_rank": [20.0 + 3 * number] * 3,
            "energy_lost": [0.48, 0.51, 0.5] if cuts else [None] * 3, "opposed_kept": [0.0, 0.5, float(not cuts)],
        })  # fmt: skip
    return {"kind": "attention", "mechanism": name, "entropy": entropy, "layers": layers}


def make_examples() -> dict[str, Any]:
    """A grey image of 28 x 28 with maps of 14 x 14, and one in colour of 8 x 8 with maps of 8 x 8."""
    grey = [[round(255 * exp(-(((x - 14) / 9) ** 2) - ((y - 12) / 5) ** 2)) for x in range(28)] for y in range(28)]
    color = [[[30 * x, 30 * y, 255 - 15 * (x + y)] for x in range(8)] for y in range(8)]
    found = []
    for label, pixels, size, (y, x) in (("ankle boot", grey, 14, (6, 5)), ("sky", color, 8, (1, 6))):
        maps = {
            name: [
                [exp(-((row - y) ** 2 + (column - x) ** 2) / width) for column in range(size)] for row in range(size)
            ]
            for width, name in enumerate(MECHANISMS, size)
        }
        found.append({"label": label, "pixels": pixels, "token": [y, x], "maps": maps})
    return {"layer": "blocks.5.attn", "images": found}
