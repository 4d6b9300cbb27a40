"""Who gets kernels: on a GPU everyone whose call they serve, elsewhere who names them; all others are told why not."""

import re
from types import SimpleNamespace

import pytest
import torch

from kernels.device import DEVICE
from linattn import explain, exponential_attention, linear_attention, short_convolution
from linattn.kernels import linear
from linattn.kernels.common import support
from linattn.ops.linear.call import LinearCall
from linattn.ops.shared.call import choose

ON_GPU = SimpleNamespace(device=torch.device("cuda"))
ON_CPU = SimpleNamespace(device=torch.device("cpu"))


def inputs(dtype=torch.float32, width=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 40, width, generator=generator).to(DEVICE, dtype) for _ in range(3)]


def never():
    raise AssertionError("kernels were asked for")


def test_auto_takes_kernels_on_a_gpu_and_says_what_keeps_it_from_them(monkeypatch):
    monkeypatch.delenv(support.SWITCH, raising=False)
    assert choose("auto", ON_GPU, lambda: "").impl == "triton"
    refused = choose("auto", ON_GPU, lambda: "the moon is full")
    assert refused.impl == "chunked"
    assert "no kernel: the moon is full" in refused.reason
    assert choose("auto", ON_GPU, lambda: "the moon is full", one_token=True).impl == "recurrent"


def test_auto_leaves_the_interpreter_alone():
    assert choose("auto", ON_CPU, never).impl == "chunked"
    assert choose("auto", ON_CPU, never, one_token=True).impl == "recurrent"


def test_the_environment_keeps_auto_from_kernels_but_not_who_names_them(monkeypatch):
    monkeypatch.setenv("LINATTN_TRITON", "0")
    choice = choose("auto", ON_GPU, never)
    assert choice.impl == "chunked"
    assert "LINATTN_TRITON=0 turns kernels off" in choice.reason
    assert choose("triton", ON_GPU, lambda: "").impl == "triton"
    monkeypatch.setenv("LINATTN_TRITON", "1")
    assert choose("auto", ON_GPU, lambda: "").impl == "triton"


def test_what_auto_does_here():
    expected = "triton" if DEVICE == "cuda" else "chunked"
    q, k, v = inputs()
    gate = torch.zeros(2, 2, 40, device=DEVICE)
    assert explain(q, k, v).impl == expected
    assert explain(q, k, v, causal=True, log_decay=gate).impl == expected
    assert explain(q, k, v, op=exponential_attention, log_input=gate, log_decay=gate).impl == expected
    assert explain(q[:, 0], torch.ones(16, 4, device=DEVICE), op=short_convolution).impl == expected
    with pytest.raises(ValueError, match="op must be one of the functions linear_attention, exponential_attention"):
        explain(q, k, v, op=torch.matmul)


def test_what_has_no_kernel_is_refused_with_the_reason():
    q, k, v = inputs()
    both_ways = {"log_decay": torch.full_like(k, -0.1)}
    with pytest.raises(ValueError, match="a decay per channel has a causal kernel only"):
        linear_attention(q, k, v, impl="triton", **both_ways)
    assert explain(q, k, v, **both_ways).impl == "chunked"


def test_widths_and_dtypes_that_kernels_do_not_take():
    with pytest.raises(ValueError, match="up to 256 features"):
        linear_attention(*inputs(width=300), impl="triton")
    with pytest.raises(ValueError, match=r"float32, bfloat16 and float16, got torch\.float64"):
        linear_attention(*inputs(torch.float64), impl="triton")
    gate = torch.zeros(2, 2, 40, device=DEVICE)
    with pytest.raises(ValueError, match="up to 256 features"):
        exponential_attention(*inputs(width=300), log_input=gate, log_decay=gate, impl="triton")
    with pytest.raises(ValueError, match="9 tokens wide"):
        short_convolution(inputs()[0][:, 0], torch.ones(16, 9, device=DEVICE), impl="triton")


@pytest.mark.parametrize(
    ("triton", "capability", "words"),
    [
        (None, (9, 0), "not installed"),
        (
            (3, 5),
            (9, 0),
            r"Triton 3\.5 for compute capability 9\.0 is refused: the kernels were proved from Triton 3\.6",
        ),
        ((3, 5), None, r"Triton 3\.5 is refused"),
        ((3, 6), (7, 5), "Ampere"),
        ((3, 9), (7, 0), "Ampere"),
        ((3, 7), (9, 0), "reads outside of shared memory"),
        ((3, 7), (8, 0), ""),
        ((3, 7), None, ""),
        ((3, 6), (9, 0), ""),
        ((3, 6), (8, 0), ""),
        ((3, 9), (10, 0), ""),
        ((3, 9), (12, 0), ""),
    ],
)
def test_compilers_that_are_known_to_be_wrong_are_refused(triton, capability, words):
    reason = support.reason_against_compiler(triton, capability)
    if words:
        assert re.search(words, reason), reason
    else:
        assert reason == ""


def test_a_refused_compiler_reaches_the_caller(monkeypatch):
    monkeypatch.setattr(support, "TRITON", (3, 5))
    with pytest.raises(ValueError, match=r"Triton 3\.5.* is refused"):
        linear_attention(*inputs(), impl="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_every_dtype_is_served_with_all_that_may_be_learned(dtype, causal):
    features = (torch.zeros(2, 2, 40, 16, device=DEVICE),) * 2
    learned = torch.zeros(2, requires_grad=True, device=DEVICE)
    decays = {"log_decay": learned}, {"log_decay": learned, "normalizer": None}
    for options in ({}, *decays, {"norm_features": features}):
        assert linear.against(LinearCall(*inputs(dtype), causal=causal, **options)) == ""
