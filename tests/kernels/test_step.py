"""The decoding step's kernel: output, next state and all gradients against fp64, in place as out of place."""

from typing import Any

import pytest
import torch

from kernels.budget import BF16, FP16, FP32, ROUNDINGS, assert_within, evaluate, moved
from kernels.case import Case, checks, laid
from kernels.device import DEVICE
from linattn.kernels.common import which_kernel
from linattn.kernels.step.attend import attend_step_
from linattn.ops.linear.call import LinearCall
from linattn.ops.shared.types import LinearState

NORMS = ["sum", "abs_max_one", None]


def step(**options: Any) -> Case:
    return Case(**{"B": 2, "H": 4, "H_kv": 2, "T": 1, "causal": True, "decay": "token", "start": True} | options)


@checks(
    *(step(decay=decay, index=index, norm=norm) for decay in (None, "head", "token", "channel")
      for index in ("query", "key") for norm in NORMS),
    *(step(K=32, V=48, dtype=dtype, norm=norm) for dtype in (BF16, FP16) for norm in NORMS),
    *(step(B=1, H=2, H_kv=1, K=K, V=V, decay="channel")
      for K, V in ((1, 1), (5, 130), (20, 40), (64, 128), (128, 33), (256, 256))),
    *(step(H=H, H_kv=H_kv, V=40) for H, H_kv in ((1, 1), (6, 1), (6, 3), (5, 5))),
    *(step(decay=decay, own_norm=True) for decay in (None, "head", "token", "channel")),
    step(H=2, H_kv=2, layout="tokens"),
)  # fmt: skip
def test_values_and_gradients(case: Case) -> None:
    call = LinearCall(*(case.t[n] for n in "qkv"), causal=True, log_decay=case.t.get("log_decay"), need_state=True)
    assert which_kernel.kernel_of(call) == which_kernel.STEP
    case.check()


@pytest.mark.parametrize("decay", [None, "token"])
def test_no_state_is_an_empty_one(decay: str | None) -> None:
    """Its output is v whatever the query, whose gradient is what rounding leaves of terms as large as with a state."""
    case = step(decay=decay, start=False, final=True)
    exact, plain = case.evaluate("reference", True), case.evaluate("reference")
    a_few_roundings = evaluate(case, {name: moved(x) for name, x in case.t.items()}, "reference")
    rests = {"d q": ROUNDINGS * step(decay=decay).evaluate("reference")["d q"].abs().max().item()}
    assert_within(case.evaluate(), exact, plain, a_few_roundings, rests=rests)


def test_large_sums_stay_finite_in_half_precision() -> None:
    case = step(dtype=FP16)
    for name in ("kv", "z"):
        case.t[name] *= 1e6
    case.check()


@pytest.mark.parametrize("per", ["token", "channel"])
def test_strongest_decay_forgets(per: str) -> None:
    case, fresh = step(decay=per), step(decay=None, start=False, final=True)
    case.t["log_decay"].fill_(-torch.inf)
    found = case(case.t, "triton")
    for name, x in fresh(case.t, "triton").items():
        torch.testing.assert_close(found[name], x)


def test_strides_are_followed() -> None:
    case = step(K=20, V=24, decay="channel")
    t = {name: laid(x, "columns") for name, x in case.t.items()}
    t["q"] = case.t["q"].transpose(0, 1).contiguous().transpose(0, 1)
    found = case(t, "triton")
    assert all(x.is_contiguous() for x in found.values())
    for name, x in case(case.t, "triton").items():
        torch.testing.assert_close(found[name], x)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("index", ["query", "key"])
@pytest.mark.parametrize("strided", [False, True])
def test_in_place_is_the_same(norm: str | None, index: str, strided: bool) -> None:
    case = step(H=6, H_kv=3, K=64, V=150, decay="channel", norm=norm, index=index)  # tiles of columns, one not full
    state = LinearState(laid(case.t["kv"].clone(), "columns" if strided else ""), case.t["z"].clone())
    output, after = attend_step_(
        *(case.t[name].squeeze(2) for name in "qkv"), state, log_decay=case.t["log_decay"].squeeze(2),
        decay_index=index, normalizer=norm, eps=1e-6, out_dtype=FP32,
    )  # fmt: skip
    assert after.kv is state.kv
    assert after.k is state.k
    found = {"output": output.unsqueeze(2), "final kv": after.kv, "final z": after.k}
    exactly = {name: x.double() for name, x in case.t.items()}
    plain = (case(t, "reference") for t in (case.t, {name: moved(x) for name, x in case.t.items()}))
    assert_within(found, case(exactly, "reference"), *plain)


def test_in_place_refuses_what_it_cannot_do() -> None:
    t = {name: x if name in ("kv", "z") else x.squeeze(2) for name, x in step(decay=None).t.items()}
    options = {"log_decay": None, "normalizer": "sum", "eps": 1e-6, "out_dtype": FP32}
    with pytest.raises(RuntimeError, match="no gradient"):
        attend_step_(t["q"].requires_grad_(), t["k"], t["v"], LinearState(t["kv"], t["z"]), **options)
    with pytest.raises(TypeError, match=r"state\.kv must be float32"):
        attend_step_(t["q"], t["k"], t["v"], LinearState(t["kv"].to(BF16), t["z"]), **options)


def test_steps_are_the_causal_sequence() -> None:
    whole = Case(T=9, H_kv=2, causal=True, decay="token", final=True)
    state, outputs = {}, []
    for n in range(9):
        now = {name: x[:, :, n : n + 1] for name, x in whole.t.items()}
        found = step(B=1, start=n > 0, final=True)(now | state, "triton")
        outputs.append(found.pop("output"))
        state = {name.removeprefix("final "): x for name, x in found.items()}
    inputs = ({name: x.double() for name, x in whole.t.items()}, whole.t, {n: moved(x) for n, x in whole.t.items()})
    assert_within({"output": torch.cat(outputs, 2)} | found, *(whole(t, "reference") for t in inputs))


def test_nothing_unwritten_is_read_and_runs_are_bit_equal() -> None:
    step(K=20, V=70).assert_repeats()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@checks(*(step(B=B, H=H, H_kv=H, K=D, V=D, dtype=BF16) for B, H, D in ((64, 32, 128), (1, 32, 128), (256, 16, 64))))
def test_decoding_sizes(case: Case) -> None:
    case.check()
