"""Attention with turned features by kernels against fp64: output and every gradient, alone and in layers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import BF16, FP32, assert_within, moved
from kernels.case import PAIRS, Case, checks
from kernels.device import DEVICE
from linattn import linear_attention
from linattn.kernels import linear as triton_linear
from linattn.layers import Attention
from linattn.ops.maps import Relu, Squares

# Grouped heads behind a prefix, one head of channels that fill no tile, reduced keys.
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"H": 4, "H_kv": 2, "plane": (7, 11), "prefix": 1},
    "wide": {"H": 1, "H_kv": 1, "K": 96, "V": 96, "plane": (3, 7)},
    "reduced": {"H": 2, "H_kv": 2, "K": 32, "V": 32, "plane": (5, 7), "stride": 2, "prefix": 2},
}


def turned(**options: Any) -> Case:
    return Case(**{"B": 2, "H": 2, "H_kv": 2, "plane": (5, 7), "layout": "tokens", "offset": 0.5} | options)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries of the calls that the kernels of turned features served."""
    found, right = [], triton_linear.attend_turned

    def listening(q: Tensor, *args: Any) -> Any:
        found.append(q)
        return right(q, *args)

    monkeypatch.setattr(triton_linear, "attend_turned", listening)
    return found


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("mask", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "features"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [None, "relu", "elu", *PAIRS])
def test_values_and_gradients(
    name: str | None, shape: str, blocks: bool, mask: bool, dtype: torch.dtype, served: list[Tensor]
) -> None:
    turned(map=name, dtype=dtype, blocks=blocks, mask=mask, **SHAPES[shape]).check()
    assert len(served) == 1


@pytest.mark.parametrize("name", ["nala", "mirror", "pola_plus"])
def test_zeros_among_the_inputs(name: str) -> None:
    """Queries and keys without any feature: outputs are 0, and gradients finite."""
    case = turned(map=name)
    case.t["q"][:, :, 0], case.t["k"][:, :, 1] = 0, 0
    assert not case.check()["output"][:, :, 0].any()


def test_all_keys_masked() -> None:
    case = turned(map="nala", mask=True)
    case.key_mask[0] = False
    found = case.evaluate()
    assert all(x.isfinite().all() for x in found.values())
    assert not any(found[name][0].any() for name in ("d q", "d k", "d v"))
    q, k, v = (case.t[name].nan_to_num() for name in "qkv")
    options = {"feature_map": case.maps, "rotate": case.rotation, "key_mask": case.key_mask, "impl": "triton"}
    output = linear_attention(q, k, v, **options)
    assert not output[0].any()
    assert output[1].any()


@checks(*(turned(map=name, H=4, plane=(9, 11), dtype=BF16) for name in ("nala", "pola_plus", "mirror")))
def test_repeated_to_the_bit(case: Case) -> None:
    case.assert_repeats()


OTHERS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "decay": {"log_decay": torch.tensor([-0.1, -0.2])},
    "weights of keys": {"log_input": torch.linspace(-1, 0, 70).reshape(1, 2, 35).expand(2, 2, 35)},
    "packed": {"cu_seqlens": torch.tensor([0, 20, 35])},
    "no normaliser": {"normalizer": None},
    "other normaliser": {"normalizer": "abs_max_one"},
    "own denominator": {"norm_features": True},
    "a constant feature": {
        "feature_map": Squares(torch.tensor(0.5, device=DEVICE), None, torch.tensor(0.7, device=DEVICE), 15)
    },
    "any function": {"rotate": lambda phi, psi: (phi, -psi)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_go_the_long_way(name: str, served: list[Tensor]) -> None:
    """Kernels serve them too, with features that are turned in PyTorch."""
    case = turned(map="relu", B=1 if name == "packed" else 2)
    q, k, v = (case.t[x] for x in "qkv")
    options = {"feature_map": Relu(), "rotate": case.rotation} | OTHERS[name]
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    if name == "own denominator":
        options["norm_features"] = (q.exp(), k.exp())
    if name == "a constant feature":  # 16 with it
        q, k = q[..., :15], k[..., :15]
    found = linear_attention(q, k, v, impl="triton", **options)
    expected = linear_attention(q, k, v, impl="reference", **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not served


def test_half_precision_goes_the_long_way(served: list[Tensor]) -> None:
    """A query over its row sum of many large keys would be below the smallest number of fp16."""
    case = turned(plane=(30, 40), map="relu")
    q, k, v = (x.half() for x in (case.t["q"], 50 * case.t["k"], case.t["v"]))
    options: dict[str, Any] = {"feature_map": Relu(), "rotate": case.rotation}
    found = linear_attention(q, k, v, impl="triton", **options).double()
    exact = linear_attention(q.double(), k.double(), v.double(), impl="reference", **options)
    assert (found - exact).abs().max() <= 4 * torch.finfo(torch.float16).eps * exact.abs().max()
    assert not served


def test_another_plane_is_refused() -> None:
    case = turned(map="relu")
    q, k, v = (case.t[name][:, :, :-1] for name in "qkv")
    with pytest.raises(ValueError, match="q has length 34, but rotate has 35"):
        linear_attention(q, k, v, feature_map=Relu(), rotate=case.rotation, impl="triton")


def layer(name: str, impl: str, **options: Any) -> Attention:
    torch.manual_seed(0)
    built = Attention(32, 2, name, impl=impl, num_prefix_tokens=1, **options)
    with torch.no_grad():
        for parameter in built.mechanism.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return built.to(DEVICE)


def run(attention: Attention, x: Tensor, key_mask: Tensor | None) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    out = attention(x, spatial_shape=(3, 5), key_mask=key_mask)
    if key_mask is not None:
        out = out * key_mask.unsqueeze(-1)  # padding has no output
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    leaves = {"x": x} | dict(attention.named_parameters())
    grads = torch.autograd.grad(out, list(leaves.values()), seed)
    return {"output": out.detach()} | {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("rotary", ["blocks", "features"])
@pytest.mark.parametrize("name", ["nala", "pola_plus", "rala", "mirror", "relu", "elu"])
def test_layers(name: str, rotary: str, masked: bool, served: list[Tensor]) -> None:
    """With rotary positions, against the same layer in plain PyTorch."""
    options: dict[str, Any] = {"rotary": rotary} | ({} if name == "mirror" else {"num_kv_heads": 1})
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    key_mask = None
    if masked:
        key_mask = torch.ones(2, 16, dtype=torch.bool, device=DEVICE)
        key_mask[0, 11:] = False
    found = run(layer(name, "triton", **options), x, key_mask)
    assert len(served) == 1
    plain = layer(name, "chunked", **options)
    exact = copy.deepcopy(plain).double()
    others = [run(plain, x, key_mask), *(run(exact, moved(x, seed), key_mask) for seed in (3, 4))]
    assert_within(found, run(exact, x.double(), key_mask), *others)
    assert len(served) == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("D", [32, 64, 96])
@pytest.mark.parametrize("name", [None, "nala", "pola_plus", "mirror"])
def test_large(name: str | None, D: int, dtype: torch.dtype) -> None:
    """Stages of a pyramid; the specification needs the square of the length, in fp64 the chunked form is as good."""
    turned(map=name, dtype=dtype, H=4, K=D, V=D, plane=(56, 56), prefix=1, spec="chunked").check()
