"""``linear_attention(impl="triton")``: every option of a call reaches a kernel and gives what the definition gives."""

from typing import Any

import pytest
import torch

from kernels.budget import BF16, FP16, FP32, assert_within, check
from kernels.case import Case, checks
from kernels.device import DEVICE
from linattn import create_mechanism, explain, linear_attention
from linattn.kernels import linear
from linattn.ops.linear.call import LinearCall
from linattn.ops.maps import EluPlusOne, TaylorExp, UnitSilu
from linattn.testing import check_forms, check_padding, subject_of

DECAYS = [None, "head", "token", "channel"]
SERVED = [(causal, decay) for causal in (True, False) for decay in DECAYS if causal or decay != "channel"]
# Kernels take no fp64, so the contracts are held in fp32: the same as on a GPU, in the interpreter.
PLACE = {"device": DEVICE, "dtype": FP32, "impls": ("triton",)}


def call(**options: Any) -> Case:
    return Case(**{"B": 1 if "cu" in options else 2, "T": 18} | options)


@checks(
    *(call(causal=causal, decay=decay, norm=norm, map="elu" if norm else None)
      for causal, decay in SERVED for norm in ("sum", "abs_max_one", None)),
    *(call(causal=causal, decay=decay, own_norm=True, start=causal) for causal in (True, False)
      for decay in (None, "token")),
    # No program holds their state: the gradient of a numerator, in fp32, meets queries of 16 bits.
    *(call(K=192, V=96, dtype=dtype, own_norm=True) for dtype in (BF16, FP16)),
    # Weights of keys, inside the kernels that take them, before the others; of features of a map alike.
    *(call(causal=causal, decay=decay, weighed=True, own_norm=True, start=True, signed=True)
      for causal, decay in ((True, "token"), (True, "channel"), (False, None))),
    *(call(causal=causal, decay=decay, weighed=True, mask=True, map="elu")
      for causal, decay in ((True, "token"), (True, "channel"), (False, None))),
    *(call(causal=True, T=1, decay=decay, weighed=True, start=True, norm=None) for decay in ("token", "channel")),
    *(call(causal=True, decay=decay, index=index, start=True, map="elu") for decay in (None, "token", "channel")
      for index in ("query", "key")),
    call(start=True, map="elu"),
    *(call(causal=causal, decay=decay, mask=True, map="elu") for causal, decay in SERVED),
    *(call(causal=causal, decay=decay, start=causal, map="elu", cu=(0, 4, 4, 18)) for causal in (True, False)
      for decay in (None, "token")),
    # Odd widths of 16 bits are filled up with columns of zeros, which come off again.
    *(call(causal=True, decay=decay, K=20, V=9, dtype=BF16, start=True, map="elu")
      for decay in (None, "token", "channel")),
    *(call(decay=decay, K=20, V=9, dtype=BF16, map="elu") for decay in (None, "token")),
    # A map that looks along a row: columns that fill a tile up have a value of their own, 1/2, and belong to no length.
    *(call(causal=causal, decay=decay, K=K, dtype=dtype, mask=mask, map="lion")
      for causal, decay in ((True, None), (True, "token"), (True, "channel"), (False, "token"))
      for K, dtype, mask in ((20, BF16, True), (48, FP32, False), (24, FP16, True), (20, FP32, True))),
)  # fmt: skip
def test_every_option(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("width", [16, 20])
def test_padding_before_a_map_that_looks_along_a_row(width: int) -> None:
    """Inside the kernels of attention and before them: what padding holds is not seen, and gets no gradient."""
    case, found = call(K=width, map="lion", mask=True), []
    padding = ~case.key_mask[:, None, :, None]
    for hidden in (0.0, torch.nan):
        leaves = {name: x.masked_fill(padding, hidden) for name, x in case.t.items() if name != "q"}
        leaves = {name: x.requires_grad_() for name, x in ({"q": case.t["q"]} | leaves).items()}
        out = linear_attention(**leaves, feature_map=UnitSilu(), key_mask=case.key_mask, impl="triton")
        found.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
        assert not any(x.masked_fill(~padding, 0).any() for x in found[-1][2:])
    assert all(torch.equal(zeros, nans) for zeros, nans in zip(*found, strict=True))


@pytest.mark.parametrize("causal", [True, False])
def test_a_map_without_a_twin_hands_over_its_features(causal: bool) -> None:
    assert TaylorExp().twin() is None
    options = {"causal": causal, "feature_map": TaylorExp()}
    check(lambda t, impl: {"output": linear_attention(**t, **options, impl=impl)}, call(K=4, norm=None).t)


def test_dtypes_that_autocast_mixes() -> None:
    q, k, v = (call(norm=None).t[name] for name in "qkv")
    q = q.to(BF16)
    with torch.autocast(DEVICE, dtype=BF16):
        found = linear_attention(q, k, v, feature_map=EluPlusOne(), impl="triton")
    assert found.dtype == BF16
    exact = linear_attention(q.double(), k.double(), v.double(), feature_map=EluPlusOne(), impl="reference")
    assert_within({"output": found}, {"output": exact}, {"output": exact.to(BF16)})


@pytest.mark.parametrize("name", ["elu", "pola", "mirror"])
def test_mechanisms_in_the_contract_of_forms(name: str) -> None:
    """Their maps inside the kernel, grouped heads too where a mechanism has them."""
    assert check_forms(subject_of(name, {"causal": False}, head_dim=16, **PLACE), lengths=(33,))


def test_a_mechanism_with_a_decay_in_the_contract_of_padding() -> None:
    assert check_padding(subject_of("retention", {"bidirectional": False}, head_dim=16, num_heads=1, **PLACE))


@pytest.mark.parametrize(("name", "options"), [
    ("elu", {}), ("lion", {"decay": "none"}), ("lion", {"decay": "selective"}), ("mlstm", {}),
    ("gated", {"gate": "channel"}),
], ids=str)  # fmt: skip
def test_mechanisms_decode_with_the_state_of_a_kernel(name: str, options: dict[str, str]) -> None:
    """Prefill by kernels, then step by step: as the whole."""
    torch.manual_seed(0)
    mechanism = create_mechanism(name, num_heads=2, head_dim=20, causal=True, impl="triton", **options).to(DEVICE)
    q, k, v = torch.randn(3, 1, 2, 12, 20).to(DEVICE).unbind()
    x = torch.randn(1, 12, 40).to(DEVICE) if mechanism.info.uses_input else None
    whole = mechanism(q, k, v, x=x)
    output, state = mechanism.with_state(q[:, :, :9], k[:, :, :9], v[:, :, :9], x=None if x is None else x[:, :9])
    torch.testing.assert_close(output, whole[:, :, :9], rtol=1e-5, atol=1e-5)
    for t in range(9, 12):
        x_t = None if x is None else x[:, t]
        output, state = mechanism.step(q[:, :, t], k[:, :, t], v[:, :, t], state, x=x_t)
        torch.testing.assert_close(output, whole[:, :, t], rtol=1e-5, atol=1e-5)


LION: dict[str, dict[str, Any]] = {
    "none": {"decay": "none"},
    "fixed": {"decay": "fixed"},
    "selective": {"decay": "selective"},
    "snake": {"decay": "selective", "order": "snake"},
    "snake, no normaliser": {"decay": "fixed", "order": "snake", "normalizer": None},
    "causal": {"decay": "selective", "causal": True},
    "causal, by channel": {"decay": "fixed", "decay_per": "channel", "causal": True},
}


@pytest.mark.parametrize("features", ["silu", "elu"])
@pytest.mark.parametrize("name", LION)
def test_kernels_make_the_features_of_lion(name: str, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handed its map, and give what the definition gives."""
    noise = torch.Generator().manual_seed(0)
    tensors = {x: torch.randn(2, 2, 12, 20, generator=noise).to(DEVICE) for x in "qkv"}
    tensors["x"] = torch.randn(2, 12, 40, generator=noise).to(DEVICE)
    made: list[type] = []
    for own in (UnitSilu, EluPlusOne):
        real = own.__call__
        monkeypatch.setattr(own, "__call__", lambda m, x, real=real, own=own: made.append(own) or real(m, x))

    def run(t: dict[str, torch.Tensor], impl: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        mechanism = create_mechanism("lion", num_heads=2, head_dim=20, features=features, impl=impl, **LION[name])
        before = len(made)
        out = mechanism.to(t["q"])(t["q"], t["k"], t["v"], x=t["x"], spatial_shape=(3, 4))
        assert (len(made) > before) == (impl != "triton")
        return {"output": out}

    check(run, tensors)


def test_what_no_kernel_serves_is_explained() -> None:
    """A decay per channel both ways; the map changes nothing about it."""
    q = torch.randn(1, 2, 12, 16, device=DEVICE)
    options = {"log_decay": -torch.rand(1, 2, 12, 16, device=DEVICE), "feature_map": UnitSilu(), "impl": "triton"}
    assert explain(q, q, q, causal=True, **options).impl == "triton"
    with pytest.raises(ValueError, match="a decay per channel has a causal kernel only"):
        explain(q, q, q, **options)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("causal", "decay"), SERVED)
def test_nothing_is_refused_that_a_kernel_serves(causal: bool, decay: str | None, dtype: torch.dtype) -> None:
    """With all that may be learned."""
    t = {name: x.requires_grad_() for name, x in call(decay=decay, dtype=dtype, own_norm=True).t.items()}
    q, k, v, options = t["q"], t["k"], t["v"], {"causal": causal, "log_decay": t.get("log_decay")}
    for more in ({}, {"normalizer": None}, {"norm_features": (t["norm_q"], t["norm_k"])}):
        assert linear.against(LinearCall(q, k, v, **options, **more)) == ""
