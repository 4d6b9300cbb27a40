"""The launch of the bidirectional kernels: configs, segments, the operator and the way past it, and large shapes."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.bidirectional_case import check, inputs, on_all_paths, take_path
from kernels.device import DEVICE
from linattn.kernels.bidirectional import config, launch
from linattn.kernels.bidirectional.attend import attend_all
from linattn.kernels.bidirectional.config import Config
from linattn.kernels.bidirectional.library import bidirectional

CONFIGS = [Config(16, 4, 1), Config(32, 4, 2, split=False), Config(64, 8, 3, registers=168, programs=2)]


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take_path(request.param, monkeypatch)
    return request.param


@on_all_paths
@pytest.mark.parametrize("settings", CONFIGS)
def test_every_config_computes_the_same(settings: Config, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "short_config", lambda x, backward=False: settings)
    monkeypatch.setattr(launch, "long_config", lambda x, kernel: settings)
    check(inputs(B=1, H=2, H_kv=1, Tq=40, Tk=130, state=True), with_state=True)


@pytest.mark.parametrize(("rows", "tiles"), [(128, 49), (96, 256), (12, 1094), (1, 5000), (500, 60), (2000, 20)])
@pytest.mark.parametrize("programs", [3, 4])
def test_segments_give_all_multiprocessors_the_same(rows: int, tiles: int, programs: int) -> None:
    processors = 132
    segments = config._segments(rows, tiles, max(1, tiles // 8), programs, processors)
    most = -(-rows * segments // processors) * -(-tiles // segments)
    # One program more than the others have, or tiles that are no multiple: at most a tenth where there is a choice.
    assert most <= 1.1 * rows * tiles / processors + (tiles if rows >= processors else 0)
    assert segments == 1 or rows * segments <= programs * processors


@pytest.mark.parametrize("path", ["short", "long"], indirect=True)
def test_operator_is_registered_properly(path: str) -> None:
    case = inputs(B=1, Tq=10, Tk=10, state=True)
    start = torch.cat([case["initial"].kv.flatten(2), case["initial"].k], -1).requires_grad_()
    leaves = [case[name].requires_grad_() for name in "qkv"]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    maps = *[None] * 6, -1, -1, 1, 1
    options = 1, 1e-6, torch.float32
    torch.library.opcheck(bidirectional, (*leaves, None, None, start, *options, True, *maps), test_utils=tests)
    torch.library.opcheck(bidirectional, (*leaves, None, None, None, *options, False, *maps), test_utils=tests[:3])


def test_the_gradient_of_a_state_that_was_not_stored_is_not_read() -> None:
    """A caller that sums all outputs hands over an empty gradient with it, which lies nowhere."""
    leaves = [inputs(B=1, Tq=10, Tk=10)[name].requires_grad_() for name in "qkv"]
    options = None, None, None, 1, 1e-6, torch.float32, False, *[None] * 6, -1, -1, 1, 1
    output, state = bidirectional(*leaves, *options)
    assert state.numel() == 0
    with_state = torch.autograd.grad([output.sum(), state.sum()], leaves)
    output, _ = bidirectional(*leaves, *options)
    assert all(torch.equal(a, b) for a, b in zip(with_state, torch.autograd.grad(output.sum(), leaves), strict=True))


def test_compiles_into_one_graph() -> None:
    case = inputs(B=1, Tq=20, Tk=20)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_all(q.relu(), k.relu(), v, normalizer="sum", eps=1e-6, out_dtype=v.dtype)[0]

    leaves = [case[name].requires_grad_() for name in "qkv"]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    eager = call(*leaves)
    assert torch.equal(compiled, eager)
    for a, b in zip(torch.autograd.grad(compiled.sum(), leaves), torch.autograd.grad(eager.sum(), leaves), strict=True):
        assert torch.equal(a, b)


def test_the_direct_way_is_the_operator() -> None:
    """Eager calls go past the dispatcher; where a mode watches, the operator is called."""
    case = inputs(B=1, Tq=20, Tk=20)
    leaves = [case[name].requires_grad_() for name in "qkv"]
    options = {"normalizer": "sum", "eps": 1e-6, "out_dtype": torch.float32}
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **kwargs or {})

    direct, _ = attend_all(*leaves, **options)
    grads = torch.autograd.grad(direct.sum(), leaves)
    with Watch():
        watched, _ = attend_all(*leaves, **options)
        again = torch.autograd.grad(watched.sum(), leaves)
    assert torch.equal(direct, watched)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert {"linattn.bidirectional.default", "linattn.bidirectional_backward.default"} <= set(seen)
    with torch.no_grad():
        assert torch.equal(attend_all(*leaves, **options)[0], direct)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is too slow for these shapes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("B", "H", "H_kv", "T", "K", "V"),
    [(8, 6, 6, 196, 64, 64), (2, 4, 2, 1000, 128, 128), (1, 2, 2, 2000, 64, 64), (1, 2, 1, 700, 256, 256),
     (2, 2, 2, 300, 128, 64), (1, 2, 2, 600, 100, 36), (1, 1, 1, 600, 32, 256)],
)  # fmt: skip
def test_large_shapes(dtype: torch.dtype, B: int, H: int, H_kv: int, T: int, K: int, V: int) -> None:
    check(inputs(dtype, B, H, H_kv, T, T, K, V, state=True), with_state=True)
    check(inputs(dtype, B, H, H_kv, T, T, K, V))
