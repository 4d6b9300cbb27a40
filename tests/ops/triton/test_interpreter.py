"""The interpreter in a hurry leaves Triton as it was, and computes what it did."""

import pytest
import torch

from ops.triton.device import DEVICE

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
