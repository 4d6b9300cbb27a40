"""Row sums in a kernel of their own: every case that they have inside the walk of the outputs, and their digits."""

from collections.abc import Iterator

import pytest
import torch

from kernels.causal_case import Case, check, segments
from kernels.device import DEVICE
from linattn.kernels.causal import config as causal_config
from linattn.kernels.causal.library import triton_causal
from linattn.testing.poison import poisoned_allocations


@pytest.fixture(autouse=True)
def apart() -> Iterator[None]:
    causal_config.TRIAL["output"] = {"apart": 1}
    try:
        with poisoned_allocations():
            yield
    finally:
        causal_config.TRIAL.clear()


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, {"norm": "sum", "state": True, "K": 48}),
        (1, {"norm": "abs_max_one", "decay": "token", "H": 4, "H_kv": 2, "T": 64}),
        (3, {"norm": "sum", "decay": "token", "state": True, "mask": True, "index": "key", "T": 70}),
        (2, {"norm": "sum", "decay": "token", "state": True, "cu": (0, 5, 5, 70, 130)}),
        (2, {"norm": "sum", "decay": "head", "both": True, "K": 40, "T": 66, "H": 1}),
        (1, {"norm": "abs_max_one", "decay": "token", "both": True, "mask": True, "T": 64}),
        (
            2,
            {"norm": "sum", "decay": "token", "both": True, "weighed": True, "dtype": torch.bfloat16, "T": 70},
        ),
        (1, {"norm": "abs_max_one", "decay": "closed", "both": True, "index": "key", "T": 40}),
    ],
)
def test_values_and_gradients(count: int, options: dict) -> None:
    with segments(count):
        check(Case(**options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [None, "steep"])
def test_low_precision(dtype: torch.dtype, decay: str | None) -> None:
    check(Case(dtype=dtype, decay=decay, T=150, state=True))


@pytest.mark.parametrize("both", [False, True])
def test_row_sums_that_are_small_differences_keep_their_digits(both: bool) -> None:
    """Signed keys under a decay, of which neither a key with its factor nor a sum is rounded to 16 bits."""
    case = Case(T=150, K=32, dtype=torch.bfloat16, decay="steep" if both else "token", norm=None)
    args = case.q, case.k, case.v, None, None, case.a, None, None, False, 1, 1e-6, torch.bfloat16, False, both
    found = triton_causal(*args)[1]
    f = case.a.double().cumsum(-1)
    weights = (f[..., :, None] - f[..., None, :]).exp().tril()
    if both:
        # Against time a token's decay is that of the step towards it, and no token sees itself.
        g = f - case.a.double()
        back = (g[..., None, :] - g[..., :, None]).exp().triu(1)
        weights = torch.stack([weights + back, back])
    q, k = case.q.double(), case.k.double()
    pairs = torch.einsum("bhik,bgjk->bhij", q, k) * weights
    sizes = torch.einsum("bhik,bgjk->bhij", q.abs(), k.abs()) * weights
    error = (found.double() - pairs.sum(-1)).abs()
    assert (error <= 2**-18 * sizes.sum(-1)).all(), (error / sizes.sum(-1)).max()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize("K", [80, 128, 256])
@pytest.mark.parametrize("options", [
    {"state": True}, {"decay": "head", "norm": "abs_max_one"}, {"decay": "token", "both": True}, {"decay": "steep"},
    {"decay": "token", "cu": (0, 5, 5, 300, 700), "state": True}, {"mask": True, "B": 2},
])  # fmt: skip
def test_wide_heads(K: int, options: dict) -> None:
    """Several chunks ahead in flight, in one warp; and twice the same bits."""
    case = Case(**{"T": 600, "K": K, "V": 128, "H": 4, "H_kv": 2, "dtype": torch.bfloat16, **options})
    with segments(2):
        found, again = check(case), case.kernels()
    for name, x in found.items():
        assert torch.equal(x, again[name]), name
