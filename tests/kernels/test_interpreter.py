"""The interpreter in a hurry leaves Triton as it was, and computes what it did."""

from dataclasses import replace

import pytest
import torch

from kernels.device import DEVICE

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled where there is a GPU")


@triton.jit
def twice(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 0, x + x, 2 * x)


@triton.jit
def kernel(source, target, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(source + at, mask=at < n, other=0.0)
    tl.store(target + at, twice(twice(x)), mask=at < n)


def test_device_functions_see_the_language_and_it_is_left_as_it_was() -> None:
    before = {name: getattr(tl, name) for name in ("load", "arange", "program_id", "where")}
    x = torch.randn(20)
    for dtype in (torch.float32, torch.bfloat16):
        found = torch.full((20,), torch.nan, dtype=dtype)
        kernel[(2,)](x, found, 20, 16)
        torch.testing.assert_close(found.float(), 4 * x, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert {name: getattr(tl, name) for name in before} == before


@triton.jit
def outer(source, target, SIZE: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    i, j = tl.arange(0, SIZE), tl.arange(0, WIDE)
    x, y = tl.load(source + i), tl.load(source + j).to(tl.bfloat16)
    product = x[:, None] * y[None, :].to(tl.float32)
    product += 16 * product.shape[0] + product.shape[1]
    tl.store(target + i[:, None] * WIDE + j[None, :], product + x[:, None] - y[None, :])


@pytest.mark.parametrize(("size", "wide"), [(8, 4), (4, 8), (8, 8)])
def test_shapes_and_types_are_those_of_each_value(size: int, wide: int) -> None:
    """The same sizes in another order, or of another type, are another description."""
    x = torch.randint(-8, 8, (8,)).float()  # products and sums of these are exact
    found = torch.full((size, wide), torch.nan)
    outer[(1,)](x, found, size, wide)
    rows, columns = x[:size, None], x[None, :wide]
    assert torch.equal(found, rows * columns + 16 * size + wide + rows - columns)


@triton.jit
def uneven(target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(target + tl.arange(0, 4), tl.sum(tl.zeros((4, SIZE), dtype=tl.float32), 1))


def test_a_shape_that_triton_refuses_is_refused_every_time() -> None:
    target = torch.ones(4)
    uneven[(1,)](target, 2)
    assert not target.count_nonzero()
    for _ in range(2):
        with pytest.raises(Exception, match="power of 2"):
            uneven[(1,)](target, 3)


@triton.jit
def count_on(target, start):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)
    tl.store(target + at, at + start)


def test_an_overflow_is_told_where_debugging_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import interpreter_builder

    target, last = torch.zeros(4, dtype=torch.int32), 2**31 - 1
    count_on[(1,)](target, last - 3)
    assert target.tolist() == [last - 3, last - 2, last - 1, last]
    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
    count_on[(1,)](target, last - 3)
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        count_on[(1,)](target, last - 2)
