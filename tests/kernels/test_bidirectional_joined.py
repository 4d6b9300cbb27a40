"""Gradients of both flows of split_power by one program: against fp64, and that no other kernel is asked."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.device import DEVICE
from kernels.mapped_case import Case, budgets, draw, evaluate, plain_ones
from linattn import create_mechanism
from linattn.kernels.bidirectional import config, launch
from linattn.kernels.bidirectional.attend import attend_all
from linattn.testing.poison import poisoned_allocations


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes small shapes take the path of large ones, in several segments; nothing else may serve the gradients."""
    if request.param == "long":
        monkeypatch.setattr(config, "SHORT", -1)
        monkeypatch.setattr(config, "TILES_PER_SEGMENT", 1)
        monkeypatch.setattr(config, "WIDE", dict.fromkeys(config.WIDE, 64 * 64))

    def refuse(*_: Any) -> None:
        raise AssertionError("gradients of one flow were asked for")

    for name in ("launch_backward", "query_grad", "key_grad", "backward_wide"):
        monkeypatch.setattr(launch, name, refuse)
    return request.param


on_both_paths = pytest.mark.parametrize("path", ["short", "long"], indirect=True)


def split(dtype: torch.dtype = torch.float16, **options: Any) -> Case:
    sizes = {"B": 1, "H": 1, "H_kv": 1, "Tq": 33, "Tk": 70, "V": 64}
    return draw("split_power", dtype, flows=2, **sizes | options)


def check(case: Case, **options: Any) -> None:
    options |= {"need_state": False}
    found, exact = (evaluate(case, how, **options) for how in ("kernel", "exact"))
    assert found.keys() == exact.keys() >= {"d q", "d k", "d v", "d table_q", "d table_k"}
    for name, error, allowed in budgets(found, plain_ones(case, **options), exact, case.q.dtype):
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"


@pytest.mark.parametrize(
    ("dtype", "path"),
    [(torch.float16, "long"), (torch.bfloat16, "short"), (torch.bfloat16, "long"), (torch.float16, "short")],
    ids=str,
    indirect=["path"],
)
def test_gradients_of_groups_with_tables_of_their_own(dtype: torch.dtype, path: str) -> None:
    check(split(dtype, B=2, H=2, Tq=49, heads="own", batch=True))


@pytest.mark.parametrize(("normalizer", "path"), [(None, "long"), ("abs_max_one", "short")], indirect=["path"])
def test_other_normalizers(normalizer: str | None, path: str) -> None:
    check(split(H=2, heads="shared", seed=1), normalizer=normalizer)


@on_both_paths
def test_masked_keys_may_hold_nan(path: str) -> None:
    check(split(B=2, Tk=40, heads="one", mask=True))


@pytest.mark.parametrize("path", ["long"], indirect=True)
def test_packed_sequences(path: str) -> None:
    """Sequences of one token, of none, of exactly a tile and of more."""
    check(split(cu=(0, 1, 1, 65, 105, 105)))


@on_both_paths
def test_strided_inputs(path: str) -> None:
    case = split(H=2, H_kv=2, Tk=40)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v))
    check(case._replace(q=q.transpose(2, 3).contiguous().transpose(2, 3), k=k, v=v))


@on_both_paths
@pytest.mark.parametrize(("Tq", "Tk"), [(0, 5), (5, 0), (1, 3)])
def test_any_length(path: str, Tq: int, Tk: int) -> None:
    check(split(Tq=Tq, Tk=Tk))


@on_both_paths
def test_memory_is_written_before_it_is_read_and_runs_repeat(path: str) -> None:
    case = split(torch.bfloat16, Tk=40)
    first = evaluate(case, "kernel", need_state=False)
    with poisoned_allocations():
        second = evaluate(case, "kernel", need_state=False)
    for name, x in first.items():
        assert x.isfinite().all(), name
        assert torch.equal(x, second[name]), name


@pytest.mark.parametrize(("power", "path"), [(0.5, "short"), (1.0, "long"), (3.0, "short")], indirect=["path"])
def test_zeros_have_gradients_of_zero(power: float, path: str) -> None:
    """Whatever the slope is there: 0, one or none."""
    case = split()
    for x in (case.q, case.k):
        x[..., ::3, :] = 0
    tables = [torch.stack([torch.full_like(x[:, :, 0], power), x[:, :, 1]], 2) for x in case[5:7]]
    found = evaluate(case._replace(table_q=tables[0], table_k=tables[1]), "kernel", need_state=False)
    for name in ("d q", "d k"):
        assert found[name].isfinite().all()
        assert not found[name][..., ::3, :].any()
        assert found[name][..., 1::3, :].any()


@pytest.mark.parametrize("path", ["short"], indirect=True)
def test_the_learned_numbers_of_the_mechanism(path: str) -> None:
    """Power and scale of pola meet both flows and both sides; their gradients are those of its plain form in fp64."""
    torch.manual_seed(0)
    numbers = [*torch.randn(3, 1, 2, 21, 64), *torch.randn(2, 2, 64)]
    numbers = [x.to(torch.bfloat16).to(DEVICE) for x in numbers]
    seed = torch.randn(1, 2, 21, 64, device=DEVICE).to(torch.bfloat16)

    def gradients(impl: str, exactly: bool = False) -> tuple[Tensor, ...]:
        pola = create_mechanism("pola", num_heads=2, head_dim=64, impl=impl).to(DEVICE)
        leaves = [(x.double() if exactly else x).clone().requires_grad_() for x in numbers]
        pola.power, pola.scale = (torch.nn.Parameter(x) for x in leaves[3:])
        learned = [*leaves[:3], pola.power, pola.scale]
        return torch.autograd.grad(pola(*leaves[:3]), learned, seed.to(leaves[0].dtype))

    every = zip(gradients("triton"), gradients("chunked"), gradients("reference", True), strict=True)
    for found, plain, exact in every:
        error, cost = ((x - exact).abs().max() for x in (found, plain))
        assert error <= 2 * (cost + torch.finfo(torch.bfloat16).eps * exact.abs().max())


def test_gradients_take_no_more_memory_than_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as large as q is made but the three gradients."""
    case = split(torch.bfloat16, Tq=64, Tk=64, D=16)
    made: list[int] = []
    empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *a, **b: made.append((x := empty(*a, **b)).numel()) or x)
    leaves = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    out, _ = attend_all(*leaves, maps=case.twins(), normalizer="sum", eps=1e-6, out_dtype=case.v.dtype)
    made.clear()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert sum(made) == sum(x.numel() for x in grads)
