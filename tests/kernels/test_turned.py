"""Attention with turned features by kernels against fp64: output and every gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.budget import assert_within
from kernels.device import DEVICE
from kernels.turned_case import PAIRS, Case, draw, evaluate
from linattn import linear_attention
from linattn.kernels import linear as triton_linear
from linattn.kernels.common.support import MAP_CODES
from linattn.kernels.maps.turned_library import turned, turned_backward
from linattn.lab.bench.check import watch_choices
from linattn.ops.maps import Relu, Squares
from linattn.testing.poison import poisoned_allocations

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]
# Grouped heads behind a prefix, one head of channels that fill no tile, reduced keys.
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"H": 4, "D": 16, "plane": (7, 11), "prefix": 1},
    "wide": {"B": 1, "H": 1, "H_kv": 1, "D": 96, "plane": (3, 7)},
    "reduced": {"D": 32, "plane": (5, 7), "stride": 2, "prefix": 2},
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries of the calls that the kernels of turned features served."""
    found, right = [], triton_linear.attend_turned

    def listening(q: Tensor, *args: Any) -> Any:
        found.append(q)
        return right(q, *args)

    monkeypatch.setattr(triton_linear, "attend_turned", listening)
    return found


def compare(case: Case, form: str = "reference") -> None:
    dtype = case.q.dtype
    exact = evaluate(case.in_dtype(torch.float64), form)
    plain = [evaluate(case.in_dtype(dtype), "chunked")]
    plain += [evaluate(case.in_dtype(torch.float64, nudge=seed), form) for seed in (3, 4)]
    with poisoned_allocations():
        found = evaluate(case.in_dtype(dtype), "triton")
    assert found["output"].dtype == found["d q"].dtype == dtype
    assert_within(found, exact, *plain, inputs=dtype)


def own_batch(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Maps with numbers of each sequence are drawn for two of them."""
    per_sequence = name in ("mirror", "nala_masked", "pola_plus_masked", "focused")
    return options | {"B": 2} if per_sequence else options


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "features"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients(
    name: str, shape: str, blocks: bool, mask: bool, dtype: torch.dtype, served: list[Tensor]
) -> None:
    compare(draw(name, dtype=dtype, blocks=blocks, mask=mask, **own_batch(name, SHAPES[shape])))
    assert len(served) == 1


def test_zeros_among_the_inputs() -> None:
    """Queries and keys without any feature: outputs are 0, and gradients finite."""
    for name in ("nala", "mirror", "pola_plus"):
        case = draw(name)
        with torch.no_grad():
            case.q[:, :, 0], case.k[:, :, 1] = 0, 0
        compare(case)
        assert not evaluate(case.in_dtype(torch.float32), "triton")["output"][:, :, 0].any()


def test_all_keys_masked() -> None:
    case = draw("nala", mask=True)
    assert case.key_mask is not None
    case.key_mask[0] = False
    found = evaluate(case.in_dtype(torch.float32), "triton")
    assert all(x.isfinite().all() for x in found.values())
    assert not any(found[name][0].any() for name in ("output", "d q", "d k", "d v"))
    assert found["output"][1].any()


@pytest.mark.parametrize("name", ["nala", "pola_plus", "mirror"])
def test_repeated_to_the_bit(name: str) -> None:
    case = draw(name, H=4, plane=(9, 11), dtype=torch.bfloat16)
    first, second = (evaluate(case.in_dtype(torch.bfloat16), "triton") for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["relu", "pola_plus"])
def test_results_lie_as_the_queries(name: str) -> None:
    """Heads of a token side by side: the next projection has nothing to copy."""
    found = evaluate(draw(name).in_dtype(torch.float32), "triton")
    for key in ("output", "d q"):
        assert found[key].transpose(1, 2).is_contiguous()
    assert found["d k"].is_contiguous()


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
    case = draw("relu", B=1 if name == "packed" else 2)
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
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
    case = draw("relu", plane=(30, 40))
    q, k, v = (x.detach().half() for x in (case.q, 50 * case.k, case.v))
    options: dict[str, Any] = {"feature_map": Relu(), "rotate": case.rotation}
    found = linear_attention(q, k, v, impl="triton", **options).double()
    exact = linear_attention(q.double(), k.double(), v.double(), impl="reference", **options)
    assert (found - exact).abs().max() <= 4 * torch.finfo(torch.float16).eps * exact.abs().max()
    assert not served


def test_one_choice_is_heard() -> None:
    case = draw("nala")
    with watch_choices() as choices:
        linear_attention(case.q, case.k, case.v, feature_map=case.maps, rotate=case.rotation, impl="triton")  # type: ignore[arg-type]
    assert [choice.impl for choice in choices] == ["triton"]


def test_another_plane_is_refused() -> None:
    case = draw("relu")
    q, k, v = (x[:, :, :-1] for x in (case.q, case.k, case.v))
    with pytest.raises(ValueError, match="q has length 34, but rotate has 35"):
        linear_attention(q, k, v, feature_map=Relu(), rotate=case.rotation, impl="triton")


@pytest.mark.parametrize(("name", "mask"), [("relu", False), ("nala_masked", True), ("pola_plus", True)])
def test_operator(name: str, mask: bool) -> None:
    """PyTorch's own checks: schema, fake tensors, autograd, ahead-of-time tracing."""
    case = draw(name, H=2, H_kv=1, D=8, plane=(6, 11), mask=mask).in_dtype(torch.float32)  # two tiles
    z = None
    for x, own, key_mask, group in ((case.k, case.maps[1], case.key_mask, 1), (case.q, case.maps[0], None, 2)):
        twin = own.twin() if own is not None else None
        assert twin is not None
        x = x.nan_to_num().detach()
        turns = case.rotation.of_queries(twin.parts * 8, x)
        table, token = (None if p is None else p.detach() for p in (twin.table, twin.token))
        options = (0.01, MAP_CODES[twin.name], twin.parts, twin.flows, group)
        given = (x, z, key_mask, *turns, table, token, *options)
        out, total = turned(*given)
        d_total = None if z is not None else torch.randn_like(total)
        for learns in {False, twin.name == "split_expm1"}:
            torch.library.opcheck(turned_backward, (torch.randn_like(out), d_total, *given, learns))
        learned = [x, z, table if twin.name == "split_expm1" else None, token]
        for tensor in learned:
            if tensor is not None:
                tensor.requires_grad_()
        torch.library.opcheck(turned, given)
        z = total.detach()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("D", [32, 64, 96])
@pytest.mark.parametrize("name", ["none", "nala", "pola_plus", "mirror"])
def test_large(name: str, D: int, dtype: torch.dtype) -> None:
    """Stages of a pyramid; the specification needs the square of the length, in fp64 the chunked form is as good."""
    compare(draw(name, dtype=dtype, H=4, D=D, plane=(56, 56), prefix=1), "chunked")
