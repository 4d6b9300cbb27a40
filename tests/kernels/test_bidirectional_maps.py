"""Feature maps inside the bidirectional kernels: outputs, states and every gradient against the maps in fp64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.device import DEVICE
from kernels.mapped_case import Case, budgets, draw, evaluate, plain_ones
from linattn.kernels.bidirectional import config, launch
from linattn.kernels.bidirectional.attend import attend_all
from linattn.kernels.bidirectional.config import Config, can_fuse
from linattn.kernels.bidirectional.library import bidirectional
from linattn.kernels.bidirectional.maps import _summed_table, maps_of
from linattn.kernels.common.support import MAP_CODES
from linattn.ops.maps import Twin
from linattn.ops.shared.types import LinearState
from linattn.testing.poison import poisoned_allocations

MAPS = ["identity", "relu", "elu", "pair_relu", "split_power", "norm_power", "split_expm1", "squares",
        "squares_and_linear", "softmax_pair", "shifted_power", "unit_silu"]  # fmt: skip


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes small shapes take the path of large ones, in several segments."""
    if request.param == "long":
        monkeypatch.setattr(config, "SHORT", -1)
        monkeypatch.setattr(config, "TILES_PER_SEGMENT", 1)
        monkeypatch.setattr(config, "WIDE", dict.fromkeys(config.WIDE, 64 * 64))
    return request.param


on_both_paths = pytest.mark.parametrize("path", ["short", "long"], indirect=True)


def check(case: Case, **options: Any) -> None:
    found, exact = (evaluate(case, how, **options) for how in ("kernel", "exact"))
    assert found.keys() == exact.keys()
    for name, error, allowed in budgets(found, plain_ones(case, **options), exact, case.q.dtype):
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


@pytest.mark.parametrize(
    ("dtype", "path"), [(torch.float32, "short"), (torch.bfloat16, "long")], ids=str, indirect=["path"]
)
@pytest.mark.parametrize("name", MAPS)
def test_every_map(name: str, dtype: torch.dtype, path: str) -> None:
    check(draw(name, dtype, B=1, H=1, H_kv=1, Tq=33, Tk=70))


@on_both_paths
def test_two_flows(path: str) -> None:
    check(draw("split_power", torch.bfloat16, B=2, H=2, H_kv=1, Tq=33, V=32, flows=2))
    check(draw("relu", B=1, H=2, H_kv=2, Tq=33, V=20, flows=2, state=True, tokens=True))


def test_flows_that_differ_by_signs_share_a_program() -> None:
    """Without a state to be kept, one program does both flows: parts are exchanged where one side has turned."""
    case = draw("split_power", torch.bfloat16, B=1, H=2, H_kv=1, Tq=17, Tk=33, V=24, flows=2, mask=True, tokens=True)
    check(case, need_state=False)
    check(draw("split_power", B=1, H=1, H_kv=1, Tq=33, Tk=40, V=32, flows=2), need_state=False, normalizer=None)


@on_both_paths
def test_a_constant_feature(path: str) -> None:
    check(draw("squares", B=1, H=2, H_kv=1, Tq=33, constant=True), normalizer=None)
    check(draw("squares_and_linear", torch.bfloat16, B=1, H=1, H_kv=1, constant=True, state=True))
    check(draw("squares", B=1, H=1, H_kv=1, V=32, Tk=40, flows=2, constant=True, state=True, mask=True))


@pytest.mark.parametrize(("heads", "path"), [("own", "long"), ("shared", "short"), ("one", "long")], indirect=["path"])
def test_grouped_heads_share_or_own_their_parameters(heads: str, path: str) -> None:
    check(draw("pair_relu", B=1, H=4, H_kv=2, Tq=17, Tk=40, heads=heads, tokens=True))
    check(draw("split_power", B=2, H=2, H_kv=1, Tq=17, Tk=40, heads=heads, flows=2, batch=True))


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, "short") for name in ("elu", "unit_silu")]
    + [(name, "long") for name in ("shifted_power", "norm_power", "unit_silu")],
    indirect=["path"],
)
def test_masked_keys_may_hold_nan(name: str, path: str) -> None:
    check(draw(name, B=2, H=2, H_kv=1, Tq=17, Tk=60, mask=True, state=True, tokens=True))


@on_both_paths
@pytest.mark.parametrize("name", ["elu", "softmax_pair", "unit_silu"])
def test_masked_keys_get_no_gradient(name: str, path: str) -> None:
    """Though a row of zeros has features, and the row sum a gradient."""
    case = draw(name, B=1, H=1, H_kv=1, Tq=17, Tk=60, mask=True)
    assert case.key_mask is not None
    k = case.k.requires_grad_()
    output, _ = attend_all(
        case.q, k, case.v, maps=case.twins(), normalizer="sum", eps=1e-6, key_mask=case.key_mask, out_dtype=k.dtype
    )
    (found,) = torch.autograd.grad(output.square().sum(), k)
    assert torch.equal(found.abs().sum((0, 1, 3)) > 0, case.key_mask[0])


@pytest.mark.parametrize("name", ["pair_relu", "squares"])
@pytest.mark.parametrize("path", ["long"], indirect=True)
def test_packed_sequences(name: str, path: str) -> None:
    """Sequences of one token, of none, of exactly a tile and of more."""
    lengths = (0, 1, 1, 65, 105, 105)
    check(draw(name, B=1, H=2, H_kv=1, cu=lengths, state=True, tokens=True, constant=name == "squares"))
    check(draw(name, B=1, H=1, H_kv=1, cu=lengths, mask=True))


@on_both_paths
def test_a_state_is_handed_over(path: str) -> None:
    """Keys cut in two: the state after the first part, handed on, gives what all of them give."""
    case = draw("squares_and_linear", B=1, H=2, H_kv=2, constant=True, Tq=9, Tk=90)
    options = {"maps": case.twins(), "normalizer": "sum", "eps": 1e-6, "out_dtype": torch.float32, "need_state": True}
    whole, _ = attend_all(case.q, case.k, case.v, **options)
    _, state = attend_all(case.q, case.k[:, :, :37], case.v[:, :, :37], **options)
    output, _ = attend_all(case.q, case.k[:, :, 37:], case.v[:, :, 37:], initial=LinearState(*state), **options)
    torch.testing.assert_close(output, whole, atol=1e-5, rtol=1e-5)


@on_both_paths
@pytest.mark.parametrize(("Tq", "Tk"), [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_any_length(path: str, Tq: int, Tk: int) -> None:
    case = draw("squares", B=1, H=1, H_kv=1, Tq=Tq, Tk=Tk, constant=True, tokens=True, state=True)
    check(case)


@on_both_paths
@pytest.mark.parametrize("settings", [Config(16, 4, 1), Config(32, 4, 2, split=False), Config(64, 8, 3, programs=2)])
def test_every_config_computes_the_same(settings: Config, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "short_config", lambda x, backward=False: settings)
    monkeypatch.setattr(launch, "long_config", lambda x, kernel: settings)
    check(draw("squares", B=1, H=2, H_kv=1, Tq=40, Tk=130, V=32, flows=2, constant=True, tokens=True))


@on_both_paths
def test_memory_is_written_before_it_is_read_and_runs_repeat(path: str) -> None:
    case = draw("pair_relu", torch.bfloat16, B=1, H=2, H_kv=1, Tq=40, Tk=130, flows=2, tokens=True, state=True)
    first = evaluate(case, "kernel")
    with poisoned_allocations():
        second = evaluate(case, "kernel")
    for name, x in first.items():
        assert x.isfinite().all(), name
        assert torch.equal(x, second[name]), name


def test_strided_inputs() -> None:
    """Views of a packed projection, and features that are not contiguous."""
    case = draw("pair_relu", B=1, H=2, H_kv=2)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v))
    check(case._replace(q=q, k=k.transpose(2, 3).contiguous().transpose(2, 3), v=v))


def test_who_may_be_fused() -> None:
    q, v = torch.empty(1, 2, 4000, 64, dtype=torch.bfloat16), torch.empty(1, 2, 4000, 64, dtype=torch.bfloat16)
    one, two, flows = Twin("relu", 1), Twin("softmax_pair", 2), Twin("split_power", 2, 2)
    for twin in (one, two, flows):
        assert can_fuse(q, v, (twin, twin))
    assert not can_fuse(q[..., :48], v, (one, one))  # no power of two
    assert not can_fuse(q, v, (one, two))
    assert not can_fuse(q, v[..., :63], (flows, flows))
    wide = torch.empty(1, 1, 4000, 128, dtype=torch.bfloat16)
    assert can_fuse(wide, wide, (one, one))
    assert not can_fuse(wide, wide, (two, two))  # 256 x 128 numbers of a state
    assert can_fuse(wide, wide, (flows, flows))
    assert can_fuse(q[:, :, :200].float(), v[:, :, :200].float(), (one, one))
    assert not can_fuse(q.float(), v.float(), (one, one))
    assert can_fuse(q[..., :32].float(), v[..., :32].float(), (one, one))


def test_maps_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="agree in parts"):
        maps_of((Twin("relu", 1), Twin("softmax_pair", 2)))
    case = draw("pair_relu", B=1, H=2, H_kv=2)
    table = case.table_q[:, :1].expand(1, 3, 2, 16)
    twins = case.twins()
    with pytest.raises(ValueError, match="3 heads fits neither 2 nor 2"):
        attend_all(
            case.q, case.k, case.v, maps=(twins[0]._replace(table=table), twins[1]),
            normalizer="sum", eps=1e-6, out_dtype=torch.float32,
        )  # fmt: skip


def test_operator_is_registered_properly() -> None:
    case = draw("squares", B=1, H=2, H_kv=1, Tq=10, Tk=10, constant=True, tokens=True)
    leaves = [getattr(case, name).requires_grad_() for name in ("q", "k", "v")]
    sides = [x.requires_grad_() for twin in case.twins() for x in (twin.table, twin.token, twin.constant)]
    code = MAP_CODES["squares"]
    arguments = (*leaves, None, None, None, 1, 1e-6, torch.float32, True, *sides, code, code, 1, 1)
    torch.library.opcheck(bidirectional, arguments)


def test_compiles_into_one_graph() -> None:
    case = draw("pair_relu", B=1, H=1, H_kv=1, Tq=20, Tk=20)

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        twin = Twin("pair_relu", 1, table=table)
        return attend_all(q, k, v, maps=(twin, twin), normalizer="sum", eps=1e-6, out_dtype=v.dtype)[0]

    leaves = [getattr(case, name).requires_grad_() for name in ("q", "k", "v", "table_q")]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    eager = call(*leaves)
    assert torch.equal(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_a_second_derivative_is_refused() -> None:
    case = draw("relu", B=1, H=1, H_kv=1, Tq=5, Tk=5)
    q = case.q.requires_grad_()
    output, _ = attend_all(q, case.k, case.v, maps=case.twins(), normalizer="sum", eps=1e-6, out_dtype=torch.float32)
    (grad,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"gradients of kernels cannot be .*impl='reference'"):
        grad.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow for these shapes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_large_shapes(name: str, dtype: torch.dtype) -> None:
    D = 64 if dtype == torch.bfloat16 else 32
    check(draw(name, dtype, B=8, H=6, H_kv=6, Tq=196, Tk=196, D=D, V=D))
    narrow = D if dtype == torch.bfloat16 else 16
    check(draw(name, dtype, B=2, H=4, H_kv=2, Tq=3000, Tk=3136, D=narrow, V=D, state=True))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("heads", ["one", "flows", "key heads", "query heads"])
def test_parts_of_a_table_are_added_where_it_is_shared(batch, heads):
    """Against autograd through a table that is expanded to everything that reads it."""
    segments, N, H_kv, flows, G, F = 2, 3, 2, 2, 3, 5
    parts = torch.randn(segments, N, H_kv, flows, G, 2, F, dtype=torch.float64)
    # A query head is h G + g, and its flows stand side by side.
    sizes = {"one": (1, 1, 1), "flows": (1, 1, flows), "key heads": (H_kv, 1, flows), "query heads": (H_kv, G, flows)}
    table = torch.randn(batch, math.prod(sizes[heads]), 2, F, dtype=torch.float64, requires_grad=True)
    read = table.unflatten(1, sizes[heads]).transpose(2, 3).expand(segments, N, H_kv, flows, G, 2, F)
    (expected,) = torch.autograd.grad(read, table, parts)
    torch.testing.assert_close(_summed_table(parts, table.shape), expected)
