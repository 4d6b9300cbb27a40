"""Attention that sees every key, by kernels: every path, map and option against fp64."""

from typing import Any

import pytest
import torch

from kernels.budget import BF16, FP16, FP32, assert_within
from kernels.case import Case, checks
from kernels.device import DEVICE
from linattn import create_mechanism, linear_attention
from linattn.kernels.bidirectional import config, launch
from linattn.kernels.bidirectional.config import Config, can_fuse
from linattn.ops.maps import Twin

PATHS = ["short", "long", "wide"]
PACKED = (0, 1, 1, 65, 105, 105)  # sequences of one token, of none, of exactly a tile and of more
gpu = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow for these shapes")


def call(*, H: int = 1, T: int = 70, offset: float = 0.5, **options: Any) -> Case:
    return Case(H=H, T=T, offset=offset, **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("norm", ["sum", "abs_max_one", None])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_every_path_dtype_and_normaliser(path: str, norm: str | None, dtype: torch.dtype) -> None:
    call(dtype=dtype, norm=norm, path=path).check()


@checks(
    *(call(path=path, **options) for path in PATHS for options in (
        {"B": 2, "H": 2, "T": 40, "Tk": 90, "norm": "abs_max_one", "start": True},
        {"T": 33, "Tk": 65, "K": 20, "V": 12, "H": 2},
        {"T": 33, "Tk": 65, "K": 7, "V": 33, "H": 2},
        # Normalised, a single feature cancels from every output: nothing of dq is left to be compared.
        {"T": 33, "Tk": 65, "K": 1, "V": 1, "H": 2, "norm": None},
        {"H": 4, "H_kv": 2, "start": True},
        {"H": 4, "H_kv": 2, "norm": None, "start": True},
        {"H": 2, "H_kv": 2, "Tk": 9, "start": True},
        {"B": 2, "H": 2, "T": 40, "Tk": 90, "start": True, "mask": True},
        {"H": 2, "cu": PACKED, "start": True},
        {"cu": PACKED, "mask": True},
        {"H": 2, "H_kv": 2, "layout": "tokens"},
        {"H": 2, "H_kv": 2, "layout": "columns"},
        {"T": 1, "start": True},
        {"dtype": BF16, "scale": 0.5, "offset": 4.0, "Tk": 128},  # rounding the state to bf16 would drown dq
        {"dtype": FP16, "scale": 100.0},  # sums beyond its range
        {"T": 5, "Tk": 500, "final": True},
    )),
    call(dtype=BF16, T=66, Tk=80, K=64, V=64),
    call(dtype=BF16, T=66, Tk=80, K=128, V=64),
    call(dtype=BF16, T=66, Tk=80, K=128, V=128, path="long"),
    call(dtype=BF16, T=66, Tk=80, K=256, V=200, path="wide"),
    call(dtype=FP16, Tk=600, offset=4.0, path="long"),
)  # fmt: skip
def test_values_and_gradients(case: Case) -> None:
    case.check()


MAPS = ["relu", "elu", "mirror", "pair_relu_one", "split_power", "pola", "nala", "split_expm1", "pola_plus", "squares",
        "squares_and_linear", "hedgehog", "focused", "lion", "nala_masked", "pola_plus_masked"]  # fmt: skip


@pytest.mark.parametrize(("dtype", "path"), [(FP32, "short"), (BF16, "long")], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_every_map(name: str, dtype: torch.dtype, path: str) -> None:
    # Under a normaliser nearly nothing is left of the gradient of a number that all features of a query share.
    norm = None if name.startswith("squares") else "sum"
    call(dtype=dtype, B=2, T=33, Tk=70, map=name, norm=norm, path=path).check()


@checks(
    *(call(path=path, **options) for path in ("short", "long") for options in (
        {"map": "pola", "dtype": BF16, "B": 2, "H": 2, "T": 33, "V": 32, "final": True},
        {"map": "pola_plus", "H": 2, "H_kv": 2, "T": 33, "V": 20, "start": True},
        {"map": "squares", "H": 2, "T": 33, "norm": None},
        {"map": "squares_and_linear", "dtype": BF16, "start": True},
        {"map": "pola_plus", "V": 32, "Tk": 40, "start": True, "mask": True},
        {"map": "squares", "T": 1, "start": True},
        {"map": "mirror", "B": 2, "H": 2, "H_kv": 2, "layout": "tokens"},
        {"map": "mirror", "B": 2, "H": 2, "H_kv": 2, "layout": "columns"},
        {"map": "lion", "B": 2, "H": 2, "T": 17, "Tk": 60, "mask": True, "start": True},
        {"map": "elu", "B": 2, "H": 2, "T": 17, "Tk": 60, "mask": True, "start": True},
    )),
    *(call(path="long", B=2, H=2, T=17, Tk=60, mask=True, start=True, map=name) for name in ("focused", "nala")),
    *(call(B=2, H=4, H_kv=2, T=17, Tk=40, map="mirror", heads=heads) for heads in ("own", "shared")),
    *(call(H=2, T=17, Tk=40, map="pola", heads=heads, path="long", final=True) for heads in ("own", "shared", "one")),
    # One program does both flows: parts are exchanged where one side has turned.
    call(map="pola", dtype=BF16, H=2, T=17, Tk=33, V=24, mask=True),
    call(map="pola", T=33, Tk=40, V=32, norm=None),
    call(map="pair_relu_one", H=2, cu=PACKED, path="long", start=True),
    call(map="squares", cu=PACKED, path="long", start=True, mask=True),
)  # fmt: skip
def test_maps_with_every_option(case: Case) -> None:
    case.check()


@pytest.fixture
def only_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of both flows come from one program: nothing else may serve them."""

    def refuse(*_: Any) -> None:
        raise AssertionError("gradients of one flow were asked for")

    for name in ("launch_backward", "query_grad", "key_grad", "backward_wide"):
        monkeypatch.setattr(launch, name, refuse)


JOINED = {"map": "pola", "dtype": FP16, "T": 33, "V": 64}


@checks(
    *(call(**JOINED | {"path": path} | options) for path in ("short", "long") for options in (
        {"B": 2, "H": 2, "T": 49, "Tk": 70, "heads": "own"},
        {"dtype": BF16, "H": 2, "Tk": 70},
        {"norm": None, "H": 2, "Tk": 70, "seed": 1},
        {"norm": "abs_max_one", "H": 2, "Tk": 70, "seed": 1},
        {"B": 2, "Tk": 40, "heads": "one", "mask": True},
        {"H": 2, "H_kv": 2, "Tk": 40, "layout": "columns"},
        # Of a single query and few keys a normaliser leaves little of the keys' gradients but rounding.
        {"T": 1, "Tk": 3, "norm": None},
        {"T": 3, "Tk": 2},
    )),
    call(**JOINED | {"path": "long", "cu": PACKED}),
)  # fmt: skip
def test_gradients_of_both_flows_by_one_program(case: Case, only_joined: None) -> None:
    case.check()


@checks(*(call(**JOINED, Tk=70, path=path) for path in ("short", "long")))
@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_zeros_have_gradients_of_zero(case: Case, power: float, only_joined: None) -> None:
    """Whatever the slope is there: 0, one or none."""
    case = call(**JOINED, Tk=70, path=case.path)  # whose tensors are its own
    case.t["q"][..., ::3, :], case.t["k"][..., ::3, :] = 0, 0
    for side in "qk":
        case.t[f"map {side} 0"].fill_(power)
    found = case.evaluate()
    for name in ("d q", "d k"):
        assert found[name].isfinite().all()
        assert not found[name][..., ::3, :].any()
        assert found[name][..., 1::3, :].any()


def test_the_learned_numbers_of_the_mechanism(only_joined: None) -> None:
    """Power and scale of pola meet both flows and both sides; their gradients are those of its plain form in fp64."""
    torch.manual_seed(0)
    numbers = [x.to(DEVICE, BF16) for x in (*torch.randn(3, 1, 2, 21, 64), *torch.randn(2, 2, 64))]
    seed = torch.randn(1, 2, 21, 64, device=DEVICE).to(BF16)

    def gradients(impl: str, exactly: bool = False) -> dict[str, torch.Tensor]:
        pola = create_mechanism("pola", num_heads=2, head_dim=64, impl=impl).to(DEVICE)
        leaves = [(x.double() if exactly else x).clone().requires_grad_() for x in numbers]
        pola.power, pola.scale = (torch.nn.Parameter(x) for x in leaves[3:])
        learned = [*leaves[:3], pola.power, pola.scale]
        found = torch.autograd.grad(pola(*leaves[:3]), learned, seed.to(leaves[0].dtype))
        return dict(zip(("q", "k", "v", "power", "scale"), found, strict=True))

    assert_within(gradients("triton"), gradients("reference", True), gradients("chunked"))


CONFIGS = [Config(16, 4, 1), Config(32, 4, 2, split=False), Config(64, 8, 3, registers=168, programs=2)]


@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", [None, "pola_plus", "squares"])
def test_every_config(settings: Config, path: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "short_config", lambda x, backward=False: settings)
    monkeypatch.setattr(launch, "long_config", lambda x, kernel: settings)
    norm = None if name == "squares" else "sum"
    call(H=2, T=40, Tk=130, V=32, norm=norm, start=True, map=name, path=path).check()


@checks(
    *(call(dtype=BF16, Tk=130, K=20, V=12, H=2, start=True, path=path) for path in PATHS),
    *(call(dtype=BF16, T=40, Tk=130, B=2, H=2, map="mirror", start=True, path=path) for path in PATHS[:2]),
    *(call(**JOINED, Tk=40, path=path) for path in PATHS[:2]),
)
def test_memory_is_written_before_it_is_read_and_runs_repeat(case: Case) -> None:
    case.assert_repeats()


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("name", ["elu", "hedgehog", "lion"])
def test_masked_keys_get_no_gradient(name: str, path: str) -> None:
    """Though a row of zeros has features, and the row sum a gradient."""
    case = call(T=17, Tk=60, map=name, mask=True, path=path)
    found = case.evaluate()["d k"]
    assert torch.equal(found.abs().sum((0, 1, 3)) > 0, case.key_mask[0])


@pytest.mark.parametrize("path", PATHS[:2])
def test_a_state_is_handed_over(path: str) -> None:
    """Keys cut in two: the state after the first part, handed on, gives what all of them give."""
    case = call(H=2, H_kv=2, T=9, Tk=90, map="squares_and_linear", final=True, path=path)
    t, whole = case.t, case.evaluate()["output"]
    first = case(t | {"k": t["k"][:, :, :37], "v": t["v"][:, :, :37]}, "triton")
    rest = call(H=2, H_kv=2, T=9, Tk=53, map="squares_and_linear", start=True)
    given = {"kv": first["final kv"], "z": first["final z"], "k": t["k"][:, :, 37:], "v": t["v"][:, :, 37:]}
    torch.testing.assert_close(rest(t | given, "triton")["output"], whole, atol=1e-5, rtol=1e-5)


def test_broadcast_gradients() -> None:
    t = {name: x.requires_grad_() for name, x in call(B=2).t.items()}
    found, exact = (torch.autograd.grad(linear_attention(**t, impl=i).sum(), t.values()) for i in ("triton", "chunked"))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "tiles"), [(128, 49), (96, 256), (12, 1094), (1, 5000), (500, 60), (2000, 20)])
@pytest.mark.parametrize("programs", [3, 4])
def test_segments_give_all_multiprocessors_the_same(rows: int, tiles: int, programs: int) -> None:
    processors = 132
    segments = config._segments(rows, tiles, max(1, tiles // 8), programs, processors)
    most = -(-rows * segments // processors) * -(-tiles // segments)
    # One program more than the others have, or tiles that are no multiple: at most a tenth where there is a choice.
    assert most <= 1.1 * rows * tiles / processors + (tiles if rows >= processors else 0)
    assert segments == 1 or rows * segments <= programs * processors


def test_who_may_be_fused() -> None:
    q = v = torch.empty(1, 2, 4000, 64, dtype=BF16)
    one, two, flows = Twin("relu", 1), Twin("softmax_pair", 2), Twin("split_power", 2, 2)
    wide = torch.empty(1, 1, 4000, 128, dtype=BF16)
    # Not: no power of two; maps of other widths; flows of half channels; 256 x 128 numbers of a state; fp32 of 64 x 64.
    for x, y, maps, fused in (
        (q, v, (one, one), True), (q, v, (two, two), True), (q, v, (flows, flows), True),
        (q[..., :48], v, (one, one), False), (q, v, (one, two), False), (q, v[..., :63], (flows, flows), False),
        (wide, wide, (one, one), True), (wide, wide, (two, two), False), (wide, wide, (flows, flows), True),
        (q[:, :, :200].float(), v[:, :, :200].float(), (one, one), True), (q.float(), v.float(), (one, one), False),
        (q[..., :32].float(), v[..., :32].float(), (one, one), True),
    ):  # fmt: skip
        assert can_fuse(x, y, maps) == fused


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("B", "H", "H_kv", "T", "K", "V"),
    [(8, 6, 6, 196, 64, 64), (2, 4, 2, 1000, 128, 128), (1, 2, 2, 2000, 64, 64), (1, 2, 1, 700, 256, 256),
     (2, 2, 2, 300, 128, 64), (1, 2, 2, 600, 100, 36), (1, 1, 1, 600, 32, 256)],
)  # fmt: skip
def test_large_shapes(dtype: torch.dtype, B: int, H: int, H_kv: int, T: int, K: int, V: int) -> None:
    for start in (True, False):
        call(dtype=dtype, B=B, H=H, H_kv=H_kv, T=T, K=K, V=V, start=start).check()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_large_shapes_of_maps(name: str, dtype: torch.dtype) -> None:
    D, narrow = (64, 64) if dtype == BF16 else (32, 16)
    call(dtype=dtype, B=2, H=6, H_kv=6, T=196, K=D, V=D, map=name).check()
    call(dtype=dtype, B=2, H=4, H_kv=2, T=3000, Tk=3136, K=narrow, V=D, map=name, start=True, spec="chunked").check()
