"""fp32 inputs on tensor cores: who asks for it, which launches take it, and that tiles of their own give the same."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.causal_case import Case, check, segments
from kernels.device import DEVICE
from linattn import create_mechanism, linear_attention
from linattn.kernels.causal import passes as causal_passes
from linattn.kernels.causal.attend import attend_causal

Seen = list[dict[str, object]]


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The constants of the sweeps and of the walks that make states."""
    seen: Seen = []
    real = causal_passes.launch

    def launch(kernel, programs: int, *args, **constants) -> None:
        if "PREC" in constants:
            seen.append(constants)
        real(kernel, programs, *args, **constants)

    monkeypatch.setattr(causal_passes, "launch", launch)
    return seen


@pytest.fixture
def high() -> Iterator[None]:
    """As training in bf16 sets torch's own products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def run(dtype: torch.dtype = torch.float32, learned: bool = False, T: int = 20, **options) -> Tensor:
    q, k, v = (torch.zeros(1, 2, T, 16, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3))
    a = torch.zeros(1, 2, T, device=DEVICE, requires_grad=True) if learned else None
    out = attend_causal(
        q, k, v, log_decay=a, decay_index="query", normalizer=None, eps=0.0, out_dtype=dtype, **options
    ).output  # fmt: skip
    out.sum().backward()
    return out


@pytest.mark.parametrize(("tf32", "precision"), [(False, "ieee"), (True, "tf32")])
def test_what_the_caller_wants(tf32: bool, precision: str, sweeps: Seen) -> None:
    run(tf32=tf32)
    assert [c["PREC"] for c in sweeps] == [precision] * 4


def test_all_digits_whatever_torch_is_set_to(sweeps: Seen, high: None) -> None:
    q = torch.zeros(1, 1, 8, 16, device=DEVICE, requires_grad=True)
    linear_attention(q, q, q, causal=True, normalizer=None, impl="triton").sum().backward()
    assert [c["PREC"] for c in sweeps] == ["ieee"] * 4


def test_gradients_of_a_learned_decay_are_made_of_parts(sweeps: Seen) -> None:
    """Forward one sweep; backward dq and dk in three products of parts, dv in one."""
    run(learned=True, tf32=True)
    assert [c["PREC"] for c in sweeps] == ["tf32", "tf32x3", "tf32x3", "tf32"]
    sweeps.clear()
    with segments(2):
        run(learned=True, tf32=True, T=300)
    # States: forward, again in backward, and of gradients.
    assert [c["PREC"] for c in sweeps if "Y" in c] == ["tf32", "tf32x3", "tf32x3"]


def test_other_dtypes_have_no_choice(sweeps: Seen) -> None:
    run(torch.float16, tf32=False)
    assert {c["PREC"] for c in sweeps} == {"tf32"}
    sweeps.clear()
    run(torch.bfloat16, tf32=True)
    assert {c["num_warps"] for c in sweeps} == {4}


@pytest.mark.parametrize("options", [
    {"norm": None, "K": 20, "V": 24, "H_kv": 2, "decay": "token", "weighed": True},
    {"norm": "sum", "K": 16, "V": 144, "decay": "token", "state": True},
    {"norm": None, "K": 80, "V": 160, "H_kv": 1, "mask": True},
    {"norm": "sum", "K": 128, "V": 72, "H": 1, "decay": "head", "index": "key"},
])  # fmt: skip
def test_tiles_of_their_own(options: dict) -> None:
    """Widths that are padded, features in two parts, narrower tiles where dots are made."""
    check(Case(T=40, tf32=True, **options))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="large shapes take a GPU")
@pytest.mark.parametrize(("K", "V"), [(16, 16), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (1, 33)])
@pytest.mark.parametrize("options", [
    {"norm": None}, {"norm": "sum"}, {"norm": None, "decay": "token", "weighed": True},
    {"norm": "abs_max_one", "decay": "head"}, {"norm": None, "state": True, "mask": True},
])  # fmt: skip
def test_every_width(K: int, V: int, options: dict) -> None:
    if options["norm"] == "sum":
        K = max(K, 2)  # one feature cancels in the quotient: its gradient is 0, and what is found is rounding alone
    check(Case(B=2, H=4, H_kv=2, T=700, K=K, V=V, tf32=True, **options))


def test_features_without_a_gradient_cost_no_walk(sweeps: Seen) -> None:
    one, v = torch.ones(1, 1, 8, 1, device=DEVICE), torch.zeros(1, 1, 8, 16, device=DEVICE, requires_grad=True)
    out = attend_causal(
        one, one, v, log_decay=None, decay_index="query", normalizer=None, eps=0.0, out_dtype=v.dtype
    ).output  # fmt: skip
    out.sum().backward()
    assert [(c["X"], c["REVERSE"]) for c in sweeps] == [(1, False), (1, True)]  # the output, and dv


@pytest.mark.parametrize("names", ["v", "qv", "kv", "va", "vi", "v, state"])
def test_gradients_of_some_inputs(names: str) -> None:
    """The same as beside all others: of v alone, and of gates and states, whose walks they share."""
    state = "state" in names
    case = Case(H_kv=2, decay="token", weighed=True, state=state, T=40)

    def gradients(which: str) -> dict[str, Tensor]:
        leaves = {n: getattr(case, n).detach().requires_grad_(n in which.partition(",")[0]) for n in "qkvai"}
        kv, z = (x.detach().requires_grad_(state) for x in case.initial) if state else (None, None)
        out = attend_causal(
            leaves["q"], leaves["k"], leaves["v"], log_decay=leaves["a"], log_input=leaves["i"], decay_index="query",
            normalizer="sum", eps=1e-6, out_dtype=torch.float32, initial=type(case.initial)(kv, z) if state else None,
        ).output  # fmt: skip
        wanted = {n: x for n, x in (*leaves.items(), ("kv", kv), ("z", z)) if x is not None and x.requires_grad}
        return dict(zip(wanted, torch.autograd.grad(out, list(wanted.values()), case.d_out), strict=True))

    everything = gradients("qkvai")
    for name, grad in gradients(names).items():
        torch.testing.assert_close(grad, everything[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["bf16", "autocast", "fp32"])
def test_zeros_multiplies_features_in_tf32(how: str, sweeps: Seen, high: None) -> None:
    """Inputs in 16 bits and autocast, but never its sums over tokens; fp32 stays exact, whatever torch does."""
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    mechanism = create_mechanism("zeros", num_heads=1, head_dim=16, causal=True, impl="triton").to(DEVICE, dtype)
    q = torch.zeros(1, 1, 8, 16, dtype=dtype, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=how == "autocast"):
        out = mechanism(q, q, q, x=torch.zeros(1, 8, 16, dtype=dtype, device=DEVICE))
    out.float().sum().backward()
    found = [(c["X"], c["PREC"]) for c in sweeps]
    assert {precision for X, precision in found if X == 1} == {"ieee"}
    assert {precision for X, precision in found if X > 1} == {"ieee" if how == "fp32" else "tf32"}
    assert len(found) == 4 + 2 + 6  # forward; backward of sums; of features


@pytest.mark.parametrize("how", ["mask", "state", "one token"])
def test_zeros_stays_exact_where_it_cannot_centre(how: str, sweeps: Seen, high: None) -> None:
    """See ``centred``: sums of tf32 that are not leave more noise than bf16 does."""
    mechanism = create_mechanism("zeros", num_heads=1, head_dim=16, causal=True, impl="triton").to(DEVICE).bfloat16()
    T = 1 if how == "one token" else 8
    q, x = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((1, 1, T, 16), (1, T, 16)))
    if how == "state":
        mechanism.with_state(q, q, q, x=x)
    else:
        mask = torch.ones(1, T, dtype=torch.bool, device=DEVICE) if how == "mask" else None
        mechanism(q, q, q, x=x, key_mask=mask)
    assert {c["PREC"] for c in sweeps} == {"ieee"}
