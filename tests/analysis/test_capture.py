"""Captured calls are the calls that were made, and the model is left as it was."""

import pytest
import torch
from torch import nn

from linattn import create_mechanism
from linattn.analysis.capture import capture
from linattn.models.vision import VisionTransformer, create_vit


def vit(mechanism: str = "relu", **options) -> VisionTransformer:
    torch.manual_seed(0)
    return create_vit("digits", mechanism, **{"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 2} | options)


def state(model: nn.Module) -> list[tuple[bool, int]]:
    """Modes and hooks."""
    return [(module.training, len(module._forward_pre_hooks)) for module in model.modules()]


def test_calls_are_those_of_the_layers():
    model = vit("gated", drop_rate=0.5, drop_path_rate=0.5).train()
    model.blocks[0].eval()  # a frozen part stays frozen
    before = state(model)
    images = torch.randn(3, 1, 8, 12)
    first, second = capture(model, images)
    assert state(model) == before
    assert (first.name, second.name) == ("blocks.0.attn", "blocks.1.attn")
    assert (first.grid, first.key_grid) == ((4, 6), (4, 6))
    with torch.no_grad():
        x = model.eval()._add_positions(*model.patch_embed(images))
        block = model.blocks[0]
        layer_input = block.norm1(x)
        expected = block.attn(layer_input)
        out = first.mechanism(first.q, first.k, first.v, **first.kwargs)
        torch.testing.assert_close(block.attn.proj(out.transpose(1, 2).flatten(2)), expected)
        torch.testing.assert_close(first.kwargs["x"], layer_input)
    assert not any(t.requires_grad for t in (first.q, first.k, first.v, first.kwargs["x"]))


def test_reduced_keys_have_their_own_plane():
    model = vit(attention={"spatial_reduction": 2}, global_pool="avg")
    call = capture(model, torch.randn(1, 1, 8, 12))[0]
    assert (call.grid, call.key_grid) == ((4, 6), (2, 3))
    assert (call.q.shape[2], call.k.shape[2]) == (24, 6)


def test_a_model_that_raises_is_put_back():
    model = vit().train()
    before = state(model)
    model.blocks[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture(model, torch.randn(1, 1, 8, 8))
    assert state(model) == before


def test_compiled_models_are_looked_into_without_compiling_again():
    model, images, graphs = vit().eval(), torch.randn(2, 1, 8, 8), []
    expected = capture(model, images)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model.blocks = nn.ModuleList(torch.compile(block, backend=backend) for block in model.blocks)
    for compiled in (model, torch.compile(model, backend=backend)):
        with torch.no_grad():
            compiled(images)
            before = len(graphs)
            found = capture(compiled, images)
            compiled(images)
        assert len(graphs) == before > 0
        assert [call.name for call in found] == ["blocks.0.attn", "blocks.1.attn"]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.q, other.q)


def test_a_mechanism_alone_and_a_model_without_one():
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = create_mechanism("elu", num_heads=1, head_dim=4)

        def forward(self, x):
            return self.mix(x, k=x, v=x, key_mask=torch.ones(1, 3, dtype=torch.bool))

    (call,) = capture(Alone(), torch.randn(1, 1, 3, 4))
    assert (call.name, call.grid) == ("mix", None)
    with pytest.raises(ValueError, match="mix was called with key_mask"):
        call.map_arguments()
    with pytest.raises(ValueError, match="Linear called no linattn mechanism"):
        capture(nn.Linear(2, 2), torch.randn(1, 2))
