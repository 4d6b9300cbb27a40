"""Derivatives beyond one ``backward()``: forward mode, transforms of torch.func, second derivatives."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.func import grad, hessian, jvp, vmap

from linattn import (
    create_mechanism,
    explain,
    exponential_attention,
    hybrid_attention,
    linear_attention,
    list_mechanisms,
    mechanism_info,
    short_convolution,
)
from linattn import kernels as triton
from linattn.kernels.common.support import switched_off
from linattn.ops.hybrid.types import SalientBudget
from linattn.ops.shared.call import choose

# Inside, window is PyTorch's softmax attention, which has no forward mode on a CPU and says so.
LINEAR = [name for name in list_mechanisms(cost="linear") if name != "window"]
# The modules with operators of kernels, such as causal/library.py.
LIBRARIES = sorted(Path(triton.__file__).parent.glob("*/*library.py"))


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 2, 2, 9, 4, dtype=torch.float64, generator=generator)


def ways(name):
    info = mechanism_info(name)
    return [causal for causal in (True, False) if (info.causal if causal else info.bidirectional)]


def assert_agree(f, x, along, out):
    """``<out, J along>`` by forward mode is ``<J' out, along>`` by backward, and ``grad`` gives ``J' out`` too."""
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf, out)
    _, tangent = jvp(f, (x,), (along,))
    torch.testing.assert_close((out * tangent).sum(), (expected * along).sum(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(grad(lambda x: (out * f(x)).sum())(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "causal"), [(name, causal) for name in LINEAR for causal in ways(name)])
def test_forward_mode_and_transforms_agree_with_backward(name, causal):
    """Forward mode takes another form than backward; a lost tangent would be 0."""
    torch.manual_seed(0)
    mechanism = create_mechanism(name, num_heads=2, head_dim=4, causal=causal).double()
    q, k, v, t, u = inputs()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    own = {"x": x} if mechanism_info(name).uses_input else {}

    assert_agree(lambda k: mechanism(q, k, v, **own), k, t, u)


@pytest.mark.parametrize("causal", [True, False])
def test_gates_have_tangents(causal):
    q, k, v, t, u = inputs()
    log_decay = -torch.rand(2, 2, 9, dtype=torch.float64)

    def linear(a):
        return linear_attention(q, k, v, causal=causal, log_decay=a, normalizer=None)

    def exponential(a):
        return exponential_attention(q, k, v, log_input=t[..., 0], log_decay=a)

    for f in (linear, exponential) if causal else (linear,):
        assert_agree(f, log_decay, t[..., 1], u)


@pytest.mark.parametrize("impl", ["auto", "reference", "recurrent", "chunked"])
def test_ops_whose_forms_are_all_plain_pytorch(impl):
    """Without a kernel they have no gradient formula of their own: even the chunked form is not refused."""
    q, k, v, t, u = inputs()
    weight, budget = torch.randn(4, 3, dtype=torch.float64), SalientBudget(1 / 4, 4)

    def convolution(x):
        return short_convolution(x, weight, impl=impl)

    def hybrid(q):
        features = q.exp(), k.exp()
        return hybrid_attention(q, k, v, features=features, window=4, layout="chunks", budget=budget, impl=impl)

    for f, x, along, out in ((convolution, q[:, 0], t[:, 0], u[:, 0]), (hybrid, q, t, u)):
        assert_agree(f, x, along, out)


@pytest.mark.parametrize("causal", [True, False])
def test_vmap_alone_leaves_values_and_backward_as_they_are(causal):
    q, k, v, _, u = inputs()

    def one(q, k, v):
        return linear_attention(q[None], k[None], v[None], causal=causal, normalizer=None, impl="chunked")[0]

    leaf = q.clone().requires_grad_()
    found, expected = vmap(one)(leaf, k, v), linear_attention(leaf, k, v, causal=causal, normalizer=None)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(x, leaf, u)[0] for x in (found, expected))
    torch.testing.assert_close(*gradients)


def test_the_choice_follows_what_differentiates():
    q, k, v, t, _ = inputs()
    seen = []

    def f(q, **options):
        seen.append(explain(q, k, v, **options).impl)
        return q.sum()

    f(q)
    vmap(lambda q: linear_attention(q[None], k[:1], v[:1]))(q)  # is no derivative
    grad(f)(q)
    jvp(f, (q,), (t,))
    with torch.autograd.forward_ad.dual_level():
        f(q)
    f(q)
    assert seen == ["chunked", "reference", "reference", "reference", "chunked"]
    with pytest.raises(ValueError, match=r"impl='chunked' can only be differentiated by backward.*'reference' or"):
        grad(lambda q: f(q, impl="chunked"))(q)
    with pytest.raises(ValueError, match="impl='triton' can only be differentiated by backward"):
        jvp(lambda q: linear_attention(q, k, v, impl="triton"), (q,), (t,))
    assert grad(lambda q: linear_attention(q, k, v, impl="recurrent").sum())(q).abs().sum() > 0


def test_no_kernel_is_taken_where_it_would_lose_a_tangent():
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))  # all that is looked at

    def taken(x):
        seen.extend(choose("auto", on_gpu, lambda: "", own_gradients=own).impl for own in (True, False))
        return x.sum()

    seen: list[str] = []
    taken(torch.ones(2))
    grad(taken)(torch.ones(2))
    assert seen[2:] == ["reference", "chunked"]
    assert seen[:2] == ["triton", "triton"] or switched_off()


@pytest.mark.parametrize("causal", [True, False])
def test_second_derivatives_are_there_or_refused_with_a_way_out(causal):
    q, k, v, _, u = (x[:1, :1, :5] for x in inputs())

    def loss(q, impl="auto"):
        return (u * linear_attention(q, k, v, causal=causal, impl=impl)).sum()

    exact = hessian(loss)(q)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf, "recurrent"), leaf, create_graph=True)
    (row,) = torch.autograd.grad(first.flatten()[3], leaf)
    torch.testing.assert_close(row.flatten(), exact.flatten(0, 3)[3].flatten())
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="impl='reference' and impl='recurrent' have second derivatives"):
        torch.autograd.grad(first.sum(), leaf)


def test_every_operator_of_gradients_says_what_has_second_ones():
    """Otherwise the error would be PyTorch's own, which tells the user to register a formula."""
    for path in LIBRARIES:
        importlib.import_module(f"linattn.kernels.{path.parent.name}.{path.stem}")
    found = [op for name, op in OPDEFS.items() if name.startswith("linattn::") and name.endswith("_backward")]
    assert len(found) == len(LIBRARIES) + 2  # one of each library, and two of the chunked form
    for op in found:
        with pytest.raises(NotImplementedError, match="impl='reference' and impl='recurrent' have second derivatives"):
            op._backward_fn(None)


def test_compiled_transforms_agree_with_plain_ones():
    """The compiler traces through a transform, where an operator it cannot differentiate would lose the tangent."""
    q, k, v, t, _ = inputs()

    def f(q):
        return linear_attention(q, k, v, causal=True)

    def around(q, t):
        return f(q), jvp(f, (q,), (t,))[1], f(q)

    torch._dynamo.reset()
    for ours, plain in zip(torch.compile(around, backend="eager", fullgraph=True)(q, t), around(q, t), strict=True):
        torch.testing.assert_close(ours, plain)
    slope = grad(lambda q: f(q).square().sum())
    torch.testing.assert_close(torch.compile(slope, backend="aot_eager", fullgraph=True)(q), slope(q))
    compiled = torch.compile(f, backend="eager")
    compiled(q)  # what was compiled outside of a transform is not reused inside of one
    torch.testing.assert_close(jvp(compiled, (q,), (t,)), jvp(f, (q,), (t,)))
