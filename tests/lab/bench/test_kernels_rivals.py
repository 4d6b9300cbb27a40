"""Rivals are called in their own layouts, scales and gates, and every family of cases has a right form."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from linattn.lab.bench.kernels.bound import Contender, values
from linattn.lab.bench.kernels.cases import CASES
from linattn.lab.bench.kernels.check import Truth
from linattn.lab.bench.kernels.contenders import make_contenders
from linattn.lab.bench.kernels.problems import bind_form, draw

from linattn.ops.exponential.api import exponential_attention
from linattn.ops.linear.api import linear_attention, linear_attention_with_state
from linattn.ops.shared.types import LinearState

CPU = torch.device("cpu")
CASES_BY_NAME = {case.name: case for case in CASES}


def fake(monkeypatch, module, **functions):
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, function in functions.items():
        monkeypatch.setattr(sys.modules[module], name, function, raising=False)


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def fla_attention(q, k, v, scale, g=None, normalize=False, **options):
    """What fla's functions are documented to compute, in their layout."""
    q, k, v = heads_first(q, k, v)
    decay = None if g is None else g.transpose(1, 2)
    normalizer = "sum" if normalize else None
    out = linear_attention(q * scale, k, v, causal=True, log_decay=decay, normalizer=normalizer, impl="reference")
    return out.transpose(1, 2), None


def fla_retention(q, k, v, scale):
    g = (1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float32))).log()
    return fla_attention(q, k, v, scale, g.expand(*q.shape[:3]))


def fla_step(q, k, v, scale, initial_state, output_final_state):
    state = LinearState(initial_state, torch.zeros_like(initial_state[..., 0]))
    q, k, v = heads_first(q, k, v)
    out, state = linear_attention_with_state(q * scale, k, v, initial_state=state, causal=True, normalizer=None)
    return out.transpose(1, 2), state.kv


def fla_convolution(x, weight, bias, residual):
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[2])
    return y.transpose(1, 2) + residual, None


def mlstm_exponential(q, k, v, i, f, chunk_size, autocast_kernel_dtype):
    return exponential_attention(q, k, v, log_input=i, log_decay=F.logsigmoid(f), impl="reference")


def mlstm_sigmoid(q, k, v, i, f, normalize, chunk_size, autocast_kernel_dtype):
    k = k * i.sigmoid().unsqueeze(-1) * q.shape[-1] ** -0.5
    return linear_attention(q, k, v, causal=True, log_decay=F.logsigmoid(f), normalizer=None, impl="reference")


RIVALS = {
    "causal-4096": ("fla.ops.linear_attn", {"chunk_linear_attn": fla_attention}),
    "causal-norm-4096": ("fla.ops.linear_attn", {"chunk_linear_attn": fla_attention}),
    "causal-token-4096": ("fla.ops.simple_gla", {"fused_chunk_simple_gla": fla_attention}),
    "causal-channel-4096": ("fla.ops.gla", {"chunk_gla": fla_attention}),
    "causal-head-4096": ("fla.ops.retention", {"chunk_retention": fla_retention}),
    "step-64": ("fla.ops.simple_gla", {"fused_recurrent_simple_gla": fla_step}),
    "convolution-4096": ("fla.modules.convolution", {"causal_conv1d": fla_convolution}),
    "exponential-4096": (
        "mlstm_kernels.torch.chunkwise.triton_xl_chunk", {"mlstm_chunkwise__xl_chunk": mlstm_exponential},
    ),
    "sigmoid-wide": (
        "mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging", {"mlstm_siging_chunkwise__xl_chunk": mlstm_sigmoid},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIVALS)
def test_layouts_scales_and_gates_of_rivals_are_converted_rightly(name, monkeypatch):
    module, functions = RIVALS[name]
    fake(monkeypatch, module, **functions)
    case = CASES_BY_NAME[name].resized(2, 3, 128, 8, tag="small")
    (rival,) = [c for c in make_contenders(case) if c.name.startswith(("fla", "mlstm"))]
    truth = Truth(case, CPU, torch.float32, 0)
    verdict = truth.check(rival, backward=case.backward)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", ["exponential-wide", "sigmoid-4096", "lion-16384", "step-64", "mirror-196"])
def test_forms_are_right_in_every_family(name):
    case = CASES_BY_NAME[name].resized(1, 2, 70, 8, tag="small")
    truth = Truth(case, CPU, torch.bfloat16, 0)
    ours = Contender("form", bind_form("recurrent" if case.family == "step" else "chunked"))
    assert truth.check(ours, backward=case.backward).ok


def test_parameters_of_a_mechanism_get_gradients():
    case = CASES_BY_NAME["pola-196"].quick()
    tensors = draw(case, CPU, torch.float32, 0)
    found = values(bind_form("chunked")(case, tensors), torch.ones_like(tensors["v"]))
    assert {"gradient of parameter power", "gradient of parameter scale"} < found.keys()
