"""Other attention in timm's models: what stays, what is said, and where it starts."""

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from tests.models.vision.timm_cases import FAMILIES, VIT, build, pictures  # noqa: E402

from linattn.convert.adapters.timm import window_parts  # noqa: E402
from linattn.convert.vision import biased_zeros  # noqa: E402
from linattn.mechanisms.zeros_softmax import ZerosSoftmax  # noqa: E402
from linattn.models.vision import convert  # noqa: E402

BIASED = ("beit", "swin")


def options_for(family, mechanism):
    """Gates for every key need a key for every token."""
    return {"reduction": "drop"} if family == "pvt" and mechanism == "lion" else {}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_keeps_the_logits(family, fused):
    """timm's fused and unfused attention alike; a relative position bias is held too."""
    model = build(family)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    with torch.no_grad():
        wanted = model(pictures())
        converted, report = convert(model, "softmax")
        assert converted is model
        torch.testing.assert_close(model(pictures()), wanted, rtol=1e-5, atol=1e-5)
    assert not report.dropped
    assert not report.initialised
    assert len(report.changed) == sum(type(m).__module__.startswith("linattn.") and hasattr(m, "plan")
                                      for m in model.modules())  # fmt: skip


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "pvt"])
def test_zeros_softmax_starts_there_and_has_gates_to_learn(family):
    model = build(family)
    with torch.no_grad():
        wanted = model(pictures())
    model, report = convert(model, "zeros_softmax")
    out = model(pictures())
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert not report.dropped
    out.square().sum().backward()
    for name in report.initialised:
        assert model.get_parameter(name).grad.any(), name


@pytest.mark.parametrize("mechanism", ["mirror", "lion"])
@pytest.mark.parametrize("family", FAMILIES)
def test_linear_attention_learns_reloads_and_keeps_every_weight_it_can(family, mechanism):
    options = options_for(family, mechanism)
    before = build(family)
    theirs = {name: value.clone() for name, value in before.state_dict().items()}
    model, report = convert(before, mechanism, **options)
    own = dict(model.named_parameters())
    changed = tuple(f"{name}." for name in report.changed)
    assert set(report.kept) | set(report.initialised) == {name for name in own if name.startswith(changed)}
    assert set(report.initialised) == {name for name in own if ".mechanism." in name}
    assert set(theirs) - set(model.state_dict()) == {n for n in report.dropped if n in theirs}
    for name, value in model.state_dict().items():
        if ".mechanism." not in name:
            assert torch.equal(value, theirs[name]), name
    tables = [name for name in report.dropped if "relative_position" in name]
    assert bool(tables) == (family in BIASED)
    out = model.train()(pictures())
    out.square().sum().backward()
    silent = [n for n, p in own.items() if p.grad is None or not p.grad.isfinite().all()]
    assert not silent
    fresh, _ = convert(build(family), mechanism, **options)
    with torch.no_grad():
        for p in fresh.parameters():
            p.zero_()
    fresh.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(fresh.eval()(pictures()), model.eval()(pictures()), rtol=0, atol=0)


def test_layers_by_number_and_by_name():
    model, report = convert(build("vit", depth=4), "relu", layers=[0, -1])
    assert list(report.changed) == ["blocks.0.attn", "blocks.3.attn"]
    assert report.left == ["blocks.1.attn", "blocks.2.attn"]
    assert [hasattr(block.attn, "mechanism") for block in model.blocks] == [True, False, False, True]
    _, report = convert(build("swin"), "relu", layers=["layers.0.*"])
    assert len(report.changed) == len(report.left) == 2


def test_the_report_can_be_read():
    lines = str(convert(build("beit"), "mirror").report).splitlines()
    assert "  changed      blocks.*.attn: Attention -> mirror (2)" in lines
    assert convert(build("siglip"), "relu").report.left == ["attn_pool"]
    _, report = convert(build("vit", attn_drop_rate=0.1), "relu")
    assert "dropout 0.1 is of weights" in report.dropped["blocks.0.attn.attn_drop"]


def test_a_bias_that_all_layers_share():
    shared = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
    with torch.no_grad():
        wanted = build("beit", **shared)(pictures())
        kept, report = convert(build("beit", **shared), "softmax")
        torch.testing.assert_close(kept(pictures()), wanted, rtol=1e-5, atol=1e-5)
    assert not report.dropped
    model, report = convert(build("beit", **shared), "relu", layers=[0])
    assert model.rel_pos_bias is not None  # the other layer has it still
    model, report = convert(build("beit", **shared), "relu")
    assert model.rel_pos_bias is None
    assert list(report.dropped) == ["rel_pos_bias.relative_position_bias_table"]


def test_shifted_windows_do_not_leak():
    """What a shift brings together from opposite edges stays apart, also without a mask of scores."""
    model, _ = convert(build("swin").double(), "relu", layers=[1])
    layer = model.layers[0].blocks[1].attn
    mask = model.layers[0].blocks[1].attn_mask.double()
    windows = mask.shape[0]
    x = torch.randn(windows, 4, 8, dtype=torch.float64)
    parts = window_parts(mask)
    assert parts.max() == 3
    assert torch.equal(parts.unsqueeze(-1) == parts.unsqueeze(-2), mask == 0)
    out = layer(x, mask)
    for window in range(windows):
        for part in parts[window].unique():
            own = parts[window] == part
            alone = layer(x[window : window + 1, own])
            torch.testing.assert_close(out[window, own], alone[0], rtol=1e-5, atol=1e-5)  # eps counts keys


def test_zeros_with_a_bias_is_its_formula():
    """Against the mechanism itself where the bias is 0, and any gates; a hidden key is as good as absent."""
    torch.manual_seed(0)
    zeros = ZerosSoftmax(2, 4, input_dim=8).double()
    nn.init.normal_(zeros.gate_map.weight)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64).unbind()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found = biased_zeros(zeros, q, k, v, x, torch.zeros(1, 1, 5, 5, dtype=torch.float64), 0.0)
    torch.testing.assert_close(found, zeros(q, k, v, x=x), rtol=1e-10, atol=1e-10)
    for hidden in (-100.0, -torch.inf):
        bias = torch.zeros(1, 1, 5, 5, dtype=torch.float64).index_fill(3, torch.tensor([1]), hidden)
        key_mask = torch.tensor([[True, False, True, True, True]]).expand(2, -1)
        wanted = zeros(q, k, v, x=x, key_mask=key_mask)[:, :, key_mask[0]]  # the gates of a masked token are wiped
        found = biased_zeros(zeros, q, k, v, x, bias, 0.0)[:, :, key_mask[0]]
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_larger_windows_after_conversion():
    """timm's own ``set_input_size``."""
    theirs, mine = build("swin"), convert(build("swin"), "softmax").model
    for each in (theirs, mine):
        each.set_input_size((48, 48), window_size=3)
    torch.testing.assert_close(mine(pictures(48)), theirs(pictures(48)), rtol=1e-4, atol=1e-5)


def test_masks_and_rotary_options():
    model, _ = convert(build("vit"), "relu", layers=[0])
    layer, x = model.blocks[0].attn, torch.randn(2, 17, 16)
    seen = torch.rand(2, 17) > 0.3
    cut = layer(x.masked_fill(~seen.unsqueeze(-1), 7.0), attn_mask=seen[:, None, None])
    torch.testing.assert_close(cut[seen], layer(x, attn_mask=seen[:, None, None])[seen])
    with pytest.raises(ValueError, match="attn_mask can be padding only"):
        layer(x, attn_mask=torch.zeros(17, 17))
    with pytest.raises(ValueError, match="called with is_causal=True"):
        layer(x, is_causal=True)
    outputs = [convert(build("eva"), "relu", rotary=r).model(pictures()) for r in ("inputs", "features")]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4


class Strange(nn.Module):
    """A model with attention of its own beside a known one."""

    def __init__(self):
        super().__init__()
        self.one = timm.layers.Attention(16, 2)
        self.two = nn.MultiheadAttention(16, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convert(nn.Linear(2, 2), "relu"), "Linear has no attention, which is not known here. Known: timm"),
        (lambda: convert(Strange(), "relu"), r"MultiheadAttention \(two\).*layers=\[...\] converts the known ones"),
        (lambda: convert(timm.create_model("vit_tiny_patch16_224", **VIT, block_fn=timm.models.vision_transformer
                         .ParallelScalingBlock), "relu"), "ParallelScalingBlock .*is not known here"),
        (lambda: convert(build("vit"), "relu", layers=[]), "nothing to change: layers is empty"),
        (lambda: convert(build("vit"), "relu", layers=[2]), "layers has 2, but the model's are 0 to 1"),
        (lambda: convert(build("vit"), "relu", layers=["head*"]), "layers has 'head"),
        (lambda: convert(convert(build("vit"), "relu").model, "relu"), "converted already"),
        (lambda: convert(build("vit"), "none"), "mechanism must be one of"),
        (lambda: convert(build("vit"), "relu", rotary="all"), "rotary: must be one of inputs, features"),
        (lambda: convert(build("pvt"), "zeros_softmax"), "use reduction='drop'"),
    ],
)  # fmt: skip
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_refusal_changes_nothing():
    model = build("pvt")
    with pytest.raises(ValueError, match="use reduction='drop'"):
        convert(model, "lion")
    with pytest.raises(TypeError, match="has no option 'mirrors'"):
        convert(model, "mirror", mirrors=2)
    with pytest.raises(TypeError, match="must not hold 'num_heads'"):
        convert(model, "mirror", num_heads=2)
    with torch.no_grad():
        torch.testing.assert_close(model(pictures()), build("pvt")(pictures()), rtol=0, atol=0)
    only_known, report = convert(Strange(), "relu", layers=["one"])
    assert list(report.changed) == ["one"]
    assert isinstance(only_known.two, nn.MultiheadAttention)


@pytest.mark.parametrize("order", ["snake", "agent"])
def test_planes_of_models_that_take_any_size(order):
    """16 tokens are 4 x 4 or 2 x 8; a model that was built for the plane it sees says what is right."""
    mechanism, options = (
        ("agent", {"num_agents": 4}) if order == "agent" else ("lion", {"decay": "fixed", "order": order})
    )
    family = {"agent": "siglip", "snake": "dinov2"}[order]  # agents see a line behind a class token
    model, _ = convert(build(family, dynamic_img_size=True), mechanism, **options)
    for height, width in ((16, 64), (32, 32), (64, 16), (16, 64)):
        fixed, _ = convert(build(family, img_size=(height, width)), mechanism, **options)
        for parameter, other in zip(fixed.parameters(), model.parameters(), strict=True):
            parameter.data = other.data
        block, own = fixed.blocks[0].attn, model.blocks[0].attn
        plane = (height // 8, width // 8)
        x = torch.randn(1, own.num_prefix_tokens + 16, 16)
        with torch.no_grad():
            model(torch.randn(1, 3, height, width))
            assert own.plane(x.shape[1]) == block.plane(x.shape[1]) == plane
            torch.testing.assert_close(own(x), block(x))
    assert own.plane(own.num_prefix_tokens + 9) is None  # some tokens were dropped: nine of them make no plane
    moved, _ = convert(build("vit"), "lion", decay="fixed", order="snake")
    moved.set_input_size((16, 64))
    assert moved.blocks[1].attn.plane(17) == (2, 8)
