"""Every tile and config of the causal kernels, odd and wide shapes, and what needs a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kernels.causal_case import Case, check, segments
from kernels.device import DEVICE
from linattn.kernels.causal import config as causal_config
from linattn.kernels.causal import passes as causal_passes
from linattn.kernels.causal import token_gradients
from linattn.kernels.causal.attend import attend_causal
from linattn.testing.poison import poisoned_allocations

CONFIGS = [(width, config) for width, configs in causal_config.CANDIDATES.items() for config in configs]


@contextmanager
def trial(config: dict[str, int]) -> Iterator[None]:
    causal_config.TRIAL.update(dict.fromkeys(("output", "dq", "dk", "dv", "states"), config))
    try:
        yield
    finally:
        causal_config.TRIAL.clear()


@pytest.mark.parametrize(("width", "columns"), sorted({(width, config["BW"]) for width, config in CONFIGS}))
def test_every_tile(width: int, columns: int) -> None:
    """All that tells configs apart in the interpreter: it knows neither warps nor stages."""
    with trial({"BW": columns}), segments(2), poisoned_allocations():
        check(Case(K=width, V=width, T=66, H=1, dtype=torch.bfloat16, norm="sum"))


@pytest.mark.parametrize("options", [
    {"norm": "sum", "mask": True, "state": True, "K": 80, "V": 16},
    {"norm": "sum", "decay": "token", "state": True},
    {"norm": "abs_max_one", "decay": "strong"},
])  # fmt: skip
def test_key_sums_in_parts(options: dict) -> None:
    """Initial sums, masked keys, and decays in both forms; the sum that is handed over is whole again."""
    causal_config.TRIAL["output"] = {"parts": 8}
    try:
        with segments(2), poisoned_allocations():
            check(Case(T=130, H=2, H_kv=1, dtype=torch.bfloat16, **options))
    finally:
        causal_config.TRIAL.clear()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize(("width", "config"), CONFIGS)
@pytest.mark.parametrize("decay", [None, "token"])
def test_every_config(width: int, config: dict[str, int], decay: str | None) -> None:
    """Values and gradients within the budget, and twice the same bits."""
    case = Case(K=width, V=width, T=500, B=1, H=4, H_kv=4, dtype=torch.bfloat16, decay=decay)
    with trial(config), segments(2), poisoned_allocations():
        found = check(case)
        again = case.kernels()
    for name, x in found.items():
        assert torch.equal(x, again[name]), name


def test_odd_widths_in_16_bits_meet_no_masked_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros up to a multiple of 16, and rows that start at whole vectors, before a kernel sees them."""
    seen = []
    for module in (causal_passes, token_gradients):
        monkeypatch.setattr(module, "launch", lambda kernel, programs, *args, **options: seen.append(args))
    q = torch.zeros(1, 2, 20, 3 * 33, dtype=torch.bfloat16, device=DEVICE)[..., 1:34].requires_grad_()
    v = q[..., :17]
    out = attend_causal(
        q, q, v, log_decay=None, decay_index="query", normalizer="sum", eps=0.0, out_dtype=q.dtype
    ).output  # fmt: skip
    assert out.shape == (1, 2, 20, 17)
    out.sum().backward()
    assert len(seen) == 5  # four sweeps, and the row sums' gradient
    for args in seen:
        for x in args:
            if isinstance(x, Tensor) and x.dtype == torch.bfloat16:
                assert x.shape[-1] % 16 == 0
                assert x.stride(-1) == 1
                assert x.data_ptr() % 16 == 0


@pytest.mark.parametrize("learned", [True, False])
def test_one_stage_where_products_are_in_two_parts(learned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps that make dots, and no others: those of a fixed decay are slower with one stage."""
    seen = []
    monkeypatch.setattr(causal_passes, "launch", lambda kernel, programs, *args, **options: seen.append(options))
    q = torch.zeros(1, 1, 70, 128, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    a = torch.zeros(1, 1, 70, device=DEVICE, requires_grad=learned)
    out = attend_causal(
        q, q, q, log_decay=a, decay_index="query", normalizer="sum", eps=0.0, out_dtype=q.dtype
    ).output  # fmt: skip
    out.sum().backward()
    stages = {dots: [o["STAGES"] for o in seen if "DOTS" in o and (o["DOTS"] > 0) == dots] for dots in (True, False)}
    assert stages[True] == [1] * 4 * learned  # dq and dk, for mild decays and others
    assert stages[False]
    assert min(stages[False]) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("K", "V"), [(16, 16), (32, 32), (64, 64), (128, 128), (64, 128), (128, 256), (96, 80), (256, 256)]
)
@pytest.mark.parametrize("options", [
    {"norm": None}, {"norm": "sum"}, {"norm": None, "decay": "token"}, {"norm": "abs_max_one", "decay": "head"},
    {"norm": "sum", "decay": "token", "both": True},
])  # fmt: skip
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
def test_every_width(K: int, V: int, dtype: torch.dtype, options: dict) -> None:
    check(Case(B=2, H=4, H_kv=2, T=700, K=K, V=V, dtype=dtype, **options))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="what registers a compiler gives away shows on a GPU")
@pytest.mark.parametrize("options", [{"state": True}, {"mask": True, "H_kv": 2}, {"mask": True, "state": True}])
@pytest.mark.parametrize("K", [80, 96, 128])
def test_few_values_of_many_features(K: int, options: dict) -> None:
    """Where the assembler once lost the gradient of a row sum, see ``added_after``."""
    check(Case(T=130, K=K, V=16, dtype=torch.bfloat16, norm="sum", **options))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize("decay", [None, "token"])
def test_long_sequences_in_segments(decay: str | None) -> None:
    """Few heads: the device's own choice of segments, unlike in the small tests."""
    case = Case(B=1, H=2, T=5000, K=64, V=64, dtype=torch.bfloat16, decay=decay, state=True)
    check(case)
