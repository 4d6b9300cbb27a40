"""Bidirectional decay in one walk: outputs and row sums of both directions against the weights of all pairs in fp64."""

import pytest
import torch
from torch import Tensor

from kernels.causal_case import Case, segments
from kernels.device import DEVICE
from linattn.kernels.causal import both_ways
from linattn.kernels.causal.library import _passes, triton_causal
from linattn.testing.poison import poisoned_allocations

BF = torch.bfloat16
NORMS = {None: 0, "sum": 1, "abs_max_one": 2}


def weights(case: Case) -> Tensor:
    """Log weights (B, H_kv, T, T): of what lies between two tokens, with the query's own decay or with the key's."""
    assert case.a is not None
    a = case.a.double().clamp(min=-800)
    a = a[None, :, None].expand(case.B, -1, case.T) if a.ndim == 1 else a
    if case.key_mask is not None:
        a = a.masked_fill(~case.key_mask[:, None], 0)
    with_own = a.cumsum(2)
    without = with_own - a
    f, b = (without, with_own) if case.index == "key" else (with_own, without)
    along, against = f[..., :, None] - f[..., None, :], b[..., None, :] - b[..., :, None]
    found = torch.where(torch.ones_like(along, dtype=torch.bool).tril(), along, against)
    if case.key_mask is not None:
        found = found.masked_fill(~case.key_mask[:, None, None, :], -torch.inf)
    if case.cu is not None:
        place = torch.bucketize(torch.arange(case.T), torch.tensor(case.cu[1:]), right=True).to(found.device)
        found = found.masked_fill(place[:, None] != place[None, :], -torch.inf)
    return found


def exact(case: Case) -> tuple[Tensor, Tensor]:
    group = case.H // case.H_kv
    k, v = (x.double().nan_to_num().repeat_interleave(group, 1) for x in (case.k, case.v))
    scores = case.q.double() @ k.mT * weights(case).exp().repeat_interleave(group, 1)
    sums = torch.stack([scores.sum(-1), scores.triu(1).sum(-1)])
    out = scores @ v
    if case.norm == "sum":
        out = out / (sums[0] + 1e-6)[..., None]
    if case.norm == "abs_max_one":
        out = out / sums[0].abs().clamp(min=1)[..., None]
    return out, sums


def kernels(case: Case) -> tuple[Tensor, Tensor]:
    a = case.a
    if case.key_mask is not None and a is not None:
        a = (a[None, :, None] if a.ndim == 1 else a).expand(case.B, -1, case.T).masked_fill(~case.key_mask[:, None], 0)
    return triton_causal(
        case.q, case.k, case.v, None, None, a, case.key_mask, case.cu_seqlens, case.index == "key", NORMS[case.norm],
        1e-6, BF, False, True,
    )[:2]  # fmt: skip


def served(case: Case) -> bool:
    return both_ways.serves(_passes(case.q, case.k, case.v, case.a, None, None, True, 1, 1e-6, log_input=case.i))


CASES = [
    (3, {"decay": "token", "index": "key", "T": 330, "V": 48, "K": 32, "H": 1}),  # whole and half chunks
    (2, {"decay": "token", "index": "query", "norm": "abs_max_one", "T": 150, "H": 4, "H_kv": 2}),
    (1, {"decay": "strong", "index": "key", "T": 197}),
    (2, {"decay": "closed", "norm": None, "T": 140}),
    (2, {"decay": "head", "index": "key", "T": 140, "B": 2, "mask": True}),
    (2, {"decay": "token", "cu": (0, 5, 5, 70, 300), "index": "key"}),
    (1, {"decay": "token", "T": 1}),
]


@pytest.mark.parametrize(("count", "options"), CASES)
def test_outputs_and_row_sums(count: int, options: dict) -> None:
    case = Case(both=True, dtype=BF, **options)
    assert served(case)
    want, want_sums = exact(case)
    with segments(count), poisoned_allocations():
        found, sums = kernels(case)
        again = kernels(case)
    eps = torch.finfo(BF).eps * (2 if DEVICE == "cpu" else 1)  # the interpreter cuts digits off where a GPU rounds
    seen = torch.ones(case.B, case.T, dtype=torch.bool) if case.key_mask is None else case.key_mask.cpu()
    rows = seen[:, None].expand(-1, case.H, -1).to(found.device)
    assert (found.double() - want)[rows].abs().max() <= 2 * eps * want[rows].abs().max()
    assert torch.equal(found[rows], again[0][rows])
    if case.norm is not None:  # sums of products of bf16, in fp32
        assert (sums.double() - want_sums)[:, rows].abs().max() <= 2e-5 * want_sums[:, rows].abs().max()


def test_row_sums_of_later_keys_are_theirs_alone() -> None:
    """A key that no row stands before is in no sum against time."""
    case = Case(both=True, dtype=BF, decay="token", T=130)
    before = kernels(case)[1]
    case.k[:, :, 0] += 1
    after = kernels(case)[1]
    assert torch.equal(before[1], after[1])
    assert (after[0] > before[0]).all()


def test_what_two_sweeps_still_do() -> None:
    assert served(Case(both=True, decay="token", dtype=BF))
    assert not served(Case(both=True, decay="token"))
    assert not served(Case(both=True, decay="token", dtype=BF, K=80))
    assert not served(Case(both=True, decay="token", dtype=BF, weighed=True))
