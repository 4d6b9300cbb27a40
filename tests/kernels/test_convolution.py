"""The short convolution's kernels: output, last inputs and all gradients against the fp64 definition."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import BF16, FP16, FP32, Tensors, assert_repeats, check, evaluate
from kernels.device import DEVICE
from linattn.kernels.convolution.apply import (
    WIDEST,
    convolve,
    convolve_step,
    convolve_step_,
    reason_against_convolution,
)
from linattn.kernels.convolution.library import (
    Walk,
    convolution,
    convolution_backward,
    launch_backward,
    launch_forward,
)
from linattn.kernels.convolution.places import lay_out
from linattn.ops.convolution.api import short_convolution, short_convolution_with_state
from linattn.ops.convolution.call import ConvolutionState
from linattn.ops.convolution.reference import convolve as reference_form

PACKED = (0, 0, 3, 15, 15, 16, 22, 22)
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def some_mask(T: int, B: int = 2) -> Tensor:
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[0, : min(T, 3)] = False
    mask[-1, T // 2 :] = False
    return mask.to(DEVICE)


def make(T: int, *, B: int = 2, C: int = 5, W: int = 4, n: int | None = None, bias: bool = True, state: bool = True,
         dtype: torch.dtype = FP32) -> Tensors:  # fmt: skip
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (B, T, C), "weight": (C, W)} | ({"bias": (C,)} if bias else {})
    shapes |= {"start": (B if n is None else n, W - 1, C)} if state else {}
    return {name: torch.randn(*shape, generator=g).to(DEVICE, dtype) for name, shape in shapes.items()}


def convolved(mask: Tensor | None = None, cu: tuple[int, ...] | None = None, **options: Any) -> Callable[..., Tensors]:
    """The public call."""
    options["cu_seqlens"] = None if cu is None else torch.tensor(cu, dtype=torch.int32, device=DEVICE)

    def call(t: Tensors, impl: str) -> Tensors:
        state = ConvolutionState(t["start"]) if "start" in t else None
        given = {"initial_state": state, "key_mask": mask, "impl": impl}
        output, (last,) = short_convolution_with_state(t["x"], t["weight"], t.get("bias"), **given, **options)
        return {"output": output, "last": last}

    return call


def case(T: int, *, masked: bool = False, cu: tuple[int, ...] | None = None, activation: str | None = "silu",
         residual: bool = False, **sizes: Any) -> Any:  # fmt: skip
    words = {"masked": masked, "cu": cu, "activation": activation, "residual": residual, **sizes}
    name = " ".join([f"T={T}", *(f"{key}={value}" for key, value in words.items() if value)])
    sizes = ({"B": 1, "n": len(cu) - 1} if cu else {}) | sizes
    mask = some_mask(T, sizes.get("B", 2)) if masked else None
    return pytest.param(convolved(mask, cu, activation=activation, residual=residual), make(T, **sizes), id=name)


@pytest.mark.parametrize(("call", "t"), [
    # Of each two options every pair of values: the kernels' branches nest no deeper.
    *(case(13, masked=masked, activation=activation, residual=residual) for masked, activation, residual in
      ((False, None, False), (True, None, True), (False, "silu", True), (True, "silu", False))),
    *(case(T, B=1, masked=masked) for T in (2, 35) for masked in (False, True)),
    *(case(9, B=1, W=W, masked=W in (2, 8)) for W in (1, 2, 3, 8)),
    *(case(6, B=1, C=C, residual=True, activation=None) for C in (1, 33, 300)),
    case(6, bias=False, state=False),
    case(6, bias=False, masked=True),
    case(6, state=False, masked=True),
    case(9, C=16, dtype=BF16, masked=True, residual=True),
    case(9, C=16, dtype=FP16, residual=True),
    *(case(22, cu=PACKED, masked=masked, state=state, W=W, residual=True) for masked, state, W in
      ((False, False, 4), (True, True, 4), (False, True, 1), (True, False, 1))),
    case(1, residual=True),
])  # fmt: skip
def test_values_and_gradients(call: Callable[..., Tensors], t: Tensors) -> None:
    check(call, t, dtype=t["x"].dtype)


@pytest.mark.parametrize(
    ("T", "segment", "group", "masked"), [(11, 5, 4, False), (11, 5, 4, True), (11, 4, 8, False), (5, 3, 1, True)]
)
def test_every_cut_into_segments(T: int, segment: int, group: int, masked: bool) -> None:
    """The launch's own choice needs long sequences; a group may not go beyond a segment forward."""
    t = make(T, B=1)
    places = lay_out(t["x"], 3, some_mask(T, 1), None).table if masked else None
    dy = torch.randn_like(t["x"])
    args = t["x"], t["weight"], t["bias"], t["start"], places, True, True
    expected = convolution(*args, masked, FP32)
    y = torch.zeros_like(expected)
    launch_forward(*args, y, Walk(32, group, -(-segment // group) * group, 1))
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)

    wanted = convolution_backward(dy, *args, masked)
    dx, d_initial = torch.zeros_like(y), torch.full_like(t["start"], torch.nan)
    partial = launch_backward(dy, *args, dx, d_initial, Walk(32, group, segment, 1))
    assert partial.shape[0] > 2
    sums = partial.sum(0)
    for a, b in zip((dx, sums[:4].t(), sums[4], d_initial), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_masked_tokens_reach_nothing() -> None:
    t, mask = make(12), some_mask(12)
    call = convolved(mask, residual=True, activation="silu")
    clean = evaluate(call, t, "triton")
    found = evaluate(call, t | {"x": t["x"].masked_fill(~mask.unsqueeze(-1), torch.nan)}, "triton")
    for name, x in found.items():
        real = mask.unsqueeze(-1) if name == "output" else torch.ones_like(x, dtype=torch.bool)
        assert torch.equal(x.masked_fill(~real, 0), clean[name].masked_fill(~real, 0)), name


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_an_overflow_stays_in_its_sequence() -> None:
    """What walks over a boundary belongs to nobody, whatever it is."""
    call, t = convolved(cu=(0, 5, 12), activation="silu"), make(12, B=1, n=2)
    clean = evaluate(call, t, "triton")
    t["x"][:, 4] = torch.inf
    found = evaluate(call, t, "triton")
    for name in ("output", "d x"):
        assert torch.equal(found[name][:, 5:], clean[name][:, 5:])


def test_strides_are_followed() -> None:
    call, t = convolved(some_mask(10), activation="silu"), make(10, C=8)
    expected = evaluate(call, t, "triton")
    strided = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in t.items()}
    strided["x"] = torch.cat([t["x"]] * 3, dim=-1)[..., 8:16]
    for name, x in evaluate(call, strided, "triton").items():
        assert torch.equal(x, expected[name]), name


def test_it_is_a_form() -> None:
    t, mask = make(15), some_mask(15)
    found = convolve(t["x"], t["weight"], mask, None, t["start"])
    for a, b in zip(found, reference_form(t["x"], t["weight"], mask, None, t["start"]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("W", "state"), [(1, True), (2, False), (4, True), (4, False)])
def test_steps_are_the_sequence(W: int, state: bool) -> None:
    t, options = make(6, W=W, C=7, state=state), {"activation": "silu", "residual": True, "out_dtype": FP32}
    whole = convolved(activation="silu", residual=True)(t, "triton")
    inputs, held = t.get("start"), t["start"].clone() if state else torch.zeros_like(whole["last"])
    for i in range(6):
        output, inputs = convolve_step(t["x"][:, i], t["weight"], t["bias"], inputs, **options)
        in_place = convolve_step_(t["x"][:, i], t["weight"], t["bias"], held, **options)
        for found in (output, in_place):
            torch.testing.assert_close(found, whole["output"][:, i], rtol=1e-6, atol=1e-6)
    assert torch.equal(inputs, whole["last"])
    assert torch.equal(held, whole["last"])


def test_a_step_in_place_has_no_gradient() -> None:
    t = {name: x.requires_grad_() for name, x in make(1).items()}
    with pytest.raises(RuntimeError, match="no gradient"):
        convolve_step_(t["x"][:, 0], t["weight"], t["bias"], t["start"], out_dtype=FP32)


def test_the_output_alone() -> None:
    t = make(3, state=False)
    given = t["x"], t["weight"], t["bias"]
    whole = short_convolution(*given, impl="triton")
    assert torch.equal(whole + t["x"], short_convolution(*given, impl="triton", residual=True))


def test_wide_windows_are_refused_in_words() -> None:
    t = make(3, W=WIDEST + 1)
    assert "9 tokens wide" in reason_against_convolution(t["x"], t["weight"])
    assert reason_against_convolution(t["x"], t["weight"][:, 1:], None) == ""


@pytest.mark.parametrize("masked", [False, True])
def test_nothing_unwritten_is_read_and_runs_are_equal(masked: bool) -> None:
    assert_repeats(convolved(some_mask(8) if masked else None, activation="silu"), make(8))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("call", "t"), [] if DEVICE == "cpu" else [
    case(T, B=B, C=C, dtype=dtype, masked=masked, residual=True) for B, T, C, masked, dtype in (
        (8, 4096, 256, False, BF16), (8, 4096, 256, True, BF16), (1, 30000, 384, False, FP32),
        (1, 30000, 384, True, BF16), (3, 1000, 100, False, BF16), (3, 1000, 100, True, FP32),
    )
])  # fmt: skip
def test_long_sequences(call: Callable[..., Tensors], t: Tensors) -> None:
    check(call, t, dtype=t["x"].dtype)
