"""Wrong calls of linear attention: each error says what is wrong and what is allowed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import linattn
from linattn import linear_attention, linear_attention_step, linear_attention_with_state
from linattn.ops.maps import EluPlusOne, SoftmaxPair
from linattn.ops.shared.types import LinearState

B, H, T, K, V = 2, 4, 6, 8, 5
Q, KEYS, VALUES = torch.rand(B, H, T, K), torch.rand(B, 2, T, K), torch.rand(B, 2, T, V)
MASK = torch.ones(B, T, dtype=torch.bool)
STATE = LinearState(torch.zeros(B, 2, K, V), torch.zeros(B, 2, K))


def attend(**changes: Any) -> Callable[[], Any]:
    return lambda: linear_attention(**{"q": Q, "k": KEYS, "v": VALUES, **changes})


def packed(offsets: Any, **changes: Any) -> Callable[[], Any]:
    return attend(q=Q[:1], k=KEYS[:1], v=VALUES[:1], cu_seqlens=offsets, **changes)


def start(state: Any, **changes: Any) -> Callable[[], Any]:
    options = {"q": Q, "k": KEYS, "v": VALUES, "causal": True, "initial_state": state, **changes}
    return lambda: linear_attention_with_state(**options)


def step(**changes: Any) -> Callable[[], Any]:
    token = {"q_t": Q[:, :, 0], "k_t": KEYS[:, :, 0], "v_t": VALUES[:, :, 0], "state": None}
    return lambda: linear_attention_step(**{**token, **changes})


SHAPES = {
    "q is no tensor": (attend(q=[1.0]), TypeError, r"q must be a tensor \(B, H, Tq, K\), got list"),
    "k has another width": (attend(k=KEYS[..., 1:]), ValueError, "k has head dimension 7, but q has 8"),
    "k has another batch": (attend(k=KEYS[:1]), ValueError, "k has batch size 1, but q has 2"),
    "v has other heads": (attend(v=VALUES[:, :1]), ValueError, "v has number of heads 1, but k has 2"),
    "v is shorter": (attend(v=VALUES[:, :, 1:]), ValueError, "v has length 5, but k has 6"),
    "heads are no multiple": (attend(q=Q[:, :3]), ValueError, r"heads of q \(3\) must be a multiple of .* \(2\)"),
    "fewer queries, causal": (attend(q=Q[:, :, 1:], causal=True), ValueError, "causal=True needs as many queries as"),
    "fewer queries, decay": (
        attend(q=Q[:, :, 1:], log_decay=-torch.rand(2)), ValueError, "log_decay needs as many queries as keys"),
}  # fmt: skip

TYPES = {
    "integer q": (attend(q=Q.long()), TypeError, "q must be float32, float64, bfloat16 or float16, got torch.int64"),
    "mixed dtypes": (attend(k=KEYS.double()), TypeError, "k is torch.float64, but q is torch.float32; give them one"),
    "k elsewhere": (attend(k=KEYS.to("meta")), ValueError, "k is on meta, but q is on cpu"),
    "state elsewhere": (start(LinearState(*(t.to("meta") for t in STATE))), ValueError, r"initial_state\.kv is on"),
}  # fmt: skip

OPTIONS = {
    "unknown impl": (attend(impl="cuda"), ValueError, "impl must be one of 'auto', 'reference', .* got 'cuda'"),
    "unknown normalizer": (attend(normalizer="mean"), ValueError, "normalizer must be one of 'sum', .* got 'mean'"),
    "unknown decay_index": (attend(decay_index="both"), ValueError, "decay_index must be one of 'key', 'query'"),
    "causal is a number": (attend(causal=1), TypeError, "causal must be True or False, got 1"),
    "eps is negative": (attend(eps=-1e-6), ValueError, "eps must be a finite number >= 0, got -1e-06"),
    "eps is a bool": (attend(eps=True), ValueError, "eps must be a finite number >= 0, got True"),
    "validate is text": (attend(validate="yes"), TypeError, "validate must be True or False, got 'yes'"),
    "rotate is a number": (attend(rotate=3), TypeError, "rotate must be a function of the features of q and"),
    "unknown option": (attend(scale=2.0), TypeError, "unexpected keyword argument 'scale'"),
    "feature_map is a name": (attend(feature_map="relu"), TypeError, r"feature_map must be a FeatureMap such as Elu"),
    "maps of two widths": (
        attend(feature_map=(EluPlusOne(), SoftmaxPair())), ValueError, "feature_map gives q 8 features and k 16"),
    "one norm feature": (attend(norm_features=Q), TypeError, r"norm_features must be a pair \(q', k'\) of tensors"),
    "norm features of numbers": (attend(norm_features=(1, 2)), TypeError, "norm_features q' must be a tensor"),
    "norm features too short": (
        attend(norm_features=(Q, KEYS[:, :, 1:])), ValueError, r"norm_features k' must have shape \(2, 2, 6, 8\)"),
    "norm features unused": (
        attend(norm_features=(Q, KEYS), normalizer=None), ValueError, "norm_features .* normalizer=None has none"),
}  # fmt: skip

MASKS_AND_DECAYS = {
    "mask too long": (attend(key_mask=MASK.repeat(1, 2)), ValueError, r"key_mask must have shape \(2, 6\), got \(2, 1"),
    "mask of numbers": (attend(key_mask=MASK.float()), TypeError, r"key_mask must be bool .* use key_mask\.bool\(\)"),
    "decay is a number": (attend(log_decay=-0.1), TypeError, "log_decay must be a tensor or None, got float"),
    "decay per query head": (attend(log_decay=-torch.rand(4)), ValueError, r"log_decay must have shape \(2,\) or"),
    "integer decay": (attend(log_decay=torch.zeros(2).long()), TypeError, "log_decay must be floating, got torch.int"),
    "positive decay": (attend(log_decay=torch.tensor([0.5, -1])), ValueError, "log_decay must be <= 0 .* of 0.5"),
    "input gate is a number": (attend(log_input=-0.1), TypeError, "log_input must be a tensor .*, got float"),
    "input gate per head": (attend(log_input=torch.rand(2)), ValueError, r"log_input must be \(B, H_kv, Tk\)"),
    "input gate of q's heads": (attend(log_input=torch.rand(B, 4, T)), ValueError, "log_input must have shape"),
    "infinite input gate": (attend(log_input=torch.full((B, 2, T), torch.inf)), ValueError, r"log_input must be below"),
}  # fmt: skip

PACKING = {
    "offsets are a list": (packed([0, T]), TypeError, r"cu_seqlens must be an int32 or int64 tensor .* got list"),
    "fractional offsets": (packed(torch.tensor([0.0, T])), TypeError, "cu_seqlens must be int32 or int64, got"),
    "offsets decrease": (packed(torch.tensor([0, 4, 2, T])), ValueError, r"cu_seqlens must not decrease, got \[0, 4"),
    "offsets end early": (packed(torch.tensor([0, T - 1])), ValueError, "cu_seqlens must start at 0 and end at T = 6"),
    "two rows": (attend(cu_seqlens=torch.tensor([0, T])), ValueError, "cu_seqlens .* batch size must be 1, got 2"),
    "queries of another length": (
        lambda: linear_attention(Q[:1, :, 1:], KEYS[:1], VALUES[:1], cu_seqlens=torch.tensor([0, T])),
        ValueError, "cu_seqlens needs as many queries as keys"),
}  # fmt: skip

STATES = {
    "a tensor": (start(STATE.kv), TypeError, r"initial_state must be LinearState\(kv, k\) or None, got Tensor"),
    "of no tensors": (start(LinearState(0.0, 0.0)), TypeError, r"initial_state\.kv must be a tensor"),
    "another width": (
        start(LinearState(STATE.kv[..., 1:], STATE.k)), ValueError, r"initial_state\.kv must have shape \(2, 2, 8"),
    "another sum": (
        start(LinearState(STATE.kv, STATE.k[..., 1:])), ValueError, r"initial_state\.k must have shape \(2, 2, 8\)"),
    "one per row, not per sequence": (
        start(STATE, q=Q[:1], k=KEYS[:1], v=VALUES[:1], cu_seqlens=torch.tensor([0, 1, 2, T])),
        ValueError, r"initial_state\.kv must have shape \(3, 2, 8, 5\)"),
    "rotated": (start(None, rotate=lambda q, k: (q, k)), ValueError, "rotate .* does not go with a state"),
    "decay both ways": (
        start(None, causal=False, log_decay=-torch.rand(2)), ValueError, "a bidirectional log_decay has no state"),
}  # fmt: skip

STEPS = {
    "q_t of a sequence": (step(q_t=Q), ValueError, r"q_t must be \(B, H, K\), got shape \(2, 4, 6, 8\)"),
    "decay of a sequence": (step(log_decay=-torch.rand(B, 2, T)), ValueError, "log_decay must have shape"),
    "state is a number": (step(state=1.0), TypeError, r"state must be LinearState\(kv, k\) or None, got float"),
}  # fmt: skip

EXPLAIN = {
    "unknown option": (lambda: linattn.explain(Q, KEYS, VALUES, scale=1.0), TypeError, "argument 'scale'"),
    "wrong call": (lambda: linattn.explain(Q, KEYS, VALUES[:1]), ValueError, "v has batch size 1, but q"),
    "unknown op": (lambda: linattn.explain(Q, KEYS, VALUES, op=len), ValueError, "op must be one of the functions"),
}  # fmt: skip

ALL = {
    f"{group}: {case}": wrong
    for group, cases in {
        "shapes": SHAPES, "types": TYPES, "options": OPTIONS, "masks and decays": MASKS_AND_DECAYS,
        "packing": PACKING, "states": STATES, "steps": STEPS, "explain": EXPLAIN,
    }.items()
    for case, wrong in cases.items()
}  # fmt: skip


@pytest.mark.parametrize("case", ALL)
def test_the_error_names_what_is_wrong(case: str) -> None:
    call, kind, message = ALL[case]
    with pytest.raises(kind, match=message):
        call()


def test_the_calls_are_right_when_nothing_is_changed() -> None:
    """Else every case above could fail for a reason of its own."""
    assert attend()().shape == (B, H, T, V)
    assert packed(torch.tensor([0, 2, T]))().shape == (1, H, T, V)
    assert start(STATE)().output.shape == (B, H, T, V)
    assert step(state=STATE)().output.shape == (B, H, V)


def test_values_are_not_checked_when_told_so() -> None:
    assert attend(log_decay=torch.tensor([0.5, -1]), validate=False)().shape == (B, H, T, V)
