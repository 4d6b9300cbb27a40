"""The backbones: any mechanism in any stage, images of any size, timm's names."""

import functools
import hashlib
import math

import pytest
import torch
from tests.models.vision.cases import DIMS, HOSTS, PUBLISHED, build, images, shallow, silent, stir
from torch import nn

from linattn import list_mechanisms
from linattn.layers import Attention
from linattn.models.vision import VisionTransformer, create_pvt, create_pyramid, create_swin
from linattn.models.vision.efficientvit_parts import MultiScaleAttention


def vit(**options):
    torch.manual_seed(0)
    return VisionTransformer("hedgehog", num_classes=5, embed_dim=16, depth=2, num_heads=2, **options)


def mechanisms_of(model):
    """The name that each stage's layers of attention have in common, None without any."""
    found = []
    for stage in model.stages:
        names = {
            layer.mechanism.info.name for layer in stage.modules() if isinstance(layer, Attention | MultiScaleAttention)
        }
        found.append(names.pop() if names else None)
        assert not names
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "qt 6" else n for n in PUBLISHED])
def test_every_preset_learns(name):
    """At its own widths, one block a stage: every parameter has a finite gradient other than 0."""
    torch.manual_seed(0)
    model = PUBLISHED[name](**shallow(name))
    stir(model, 0.02)
    out = model(images())
    assert out.shape == (2, 5)
    assert out.isfinite().all()
    (out * torch.randn(out.shape)).sum().backward()
    assert not silent(model)


@pytest.mark.parametrize("mechanism", list_mechanisms(bidirectional=True))
@pytest.mark.parametrize("host", HOSTS)
def test_every_mechanism_in_every_stage(host, mechanism):
    options = {} if host.startswith("efficientvit") else {"stages": "llll"}
    model = build(host, mechanism, **options)
    assert set(mechanisms_of(model)) - {None} == {mechanism}
    stir(model)
    out = model(images())
    (out * torch.randn(out.shape)).sum().backward()
    assert not silent(model)


@pytest.mark.parametrize("host", ["pyramid", "pvt", "swin"])
def test_a_mechanism_of_its_own_in_each_stage(host):
    mixed = ["relu", "softmax", "agent", "gated"]
    assert mechanisms_of(build(host, mixed)) == mixed
    assert mechanisms_of(build(host, "relu", stages="lsls")) == ["relu", "softmax", "relu", "softmax"]


def test_stages_as_published():
    assert mechanisms_of(create_pyramid("nala", "xt")) == ["nala", "nala", "softmax", "softmax"]
    assert mechanisms_of(create_pyramid("pola_plus", "b0")) == ["pola_plus", "pola_plus", "softmax", "softmax"]
    assert mechanisms_of(create_pyramid("mirror", "xt", stages="llll")) == ["mirror"] * 4
    assert mechanisms_of(create_pvt("t", depths=(1, 1, 1, 1))) == ["pola"] * 4
    assert mechanisms_of(create_swin("t", depths=(1, 1, 1, 1))) == ["pola", "pola", "softmax", "softmax"]
    assert mechanisms_of(build("efficientvit")) == [None, None, "quadratic", "quadratic"]
    assert mechanisms_of(build("efficientvit_large")) == [None, None, None, "quadratic"]


@pytest.mark.parametrize("size", [(64, 64), (33, 70), (95, 31), (1, 40), (66, 65)])
@pytest.mark.parametrize("host", HOSTS)
def test_images_of_any_size(host, size):
    """Strides 4, 8, 16, 32, sides rounded up."""
    model = build(host).eval()
    with torch.no_grad():
        last, planes = model.forward_intermediates(images(*size))
        assert model(images(*size)).isfinite().all()
    for i, (plane, dim) in enumerate(zip(planes, DIMS[host], strict=True)):
        stride = 4 * 2**i
        assert plane.shape == (2, dim, math.ceil(size[0] / stride), math.ceil(size[1] / stride))
        assert plane.isfinite().all()
        assert model.feature_info[i] == {"num_chs": dim, "reduction": stride, "module": f"stages.{i}"}
    torch.testing.assert_close(last, model.forward_features(images(*size)))


@pytest.mark.parametrize("host", [*HOSTS, "vit"])
def test_checkpointing_gives_the_same(host):
    """Outputs, gradients, and the running statistics of a batch that runs twice."""
    found = []
    for enable in (False, True):
        model = (vit if host == "vit" else functools.partial(build, host))(drop_path_rate=0.3).double()
        assert not any(getattr(module, "grad_checkpointing", False) for module in model.modules())  # unless asked for
        model.set_grad_checkpointing(enable)
        torch.manual_seed(5)
        out = model(images().double())
        out.square().sum().backward()
        statistics = dict(model.named_buffers())
        assert statistics or host in ("pvt", "swin", "vit")
        found.append({"out": out, **{n: p.grad for n, p in model.named_parameters()}, **statistics})
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


# SHA-256 of the names and shapes of parameters and buffers: weights that were saved must fit.
NAMES = {
    "pyramid": "b2cdd2c1efeaa5e8",
    "pvt": "a406f865a65dd608",
    "swin": "695d73ad92eba862",
    "efficientvit": "abacdb0adc1caf93",
    "efficientvit_large": "21f61e81c06ad61e",
}


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_parameters_are_stable(host):
    listed = "\n".join(f"{name} {tuple(x.shape)}" for name, x in sorted(build(host).state_dict().items()))
    assert hashlib.sha256(listed.encode()).hexdigest()[:16] == NAMES[host], listed


def test_the_head_by_its_formula():
    x = torch.randn(2, 32, 2, 3)
    head = build("pyramid").head.eval()
    wide = head.before.norm(torch.einsum("bchw,oc->bohw", x, head.before.proj.weight))
    wide = wide + (head.before.proj.bias / (1 + 1e-5) ** 0.5)[:, None, None]  # a fresh BatchNorm only divides
    torch.testing.assert_close(head(x), head.fc(torch.nn.functional.silu(wide).mean((2, 3))))


def test_where_parameters_start():
    nala, rala = create_pyramid("nala", "xt"), create_pyramid("rala", "xt", "hedgehog")
    convs = [m for m in nala.modules() if isinstance(m, nn.Conv2d)]
    assert all(not m.bias.any() for m in convs)
    weights = torch.cat([m.weight.flatten() for m in convs])
    assert weights.std().item() == pytest.approx(0.02, rel=0.02)
    qkv = "stages.3.blocks.0.attn.qkv"
    assert nala.get_submodule(qkv).weight.std().item() == pytest.approx((3 * 384) ** -0.5, rel=0.02)  # PyTorch's own
    assert rala.get_submodule(qkv).weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert not rala.get_submodule(qkv).bias.any()
    maps = rala.stages[0].blocks[0].attn.mechanism.query_map.weight
    assert torch.equal(maps[0], torch.eye(maps.shape[-1]))  # its paper's
    large = create_pyramid("nala", "b", depths=(1, 2, 1, 1))
    assert [s.blocks[0].ls2.gamma[0].item() for s in large.stages] == pytest.approx([1, 1, 1e-6, 1e-6])
    rates = [block.drop_path.rate for stage in large.stages for block in stage.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_reduction_of_keys_is_for_softmax():
    reductions = lambda model: [s.blocks[0].attn.options.spatial_reduction for s in model.stages]  # noqa: E731
    assert reductions(build("pvt")) == [1, 1, 1, 1]
    assert reductions(build("pvt", "softmax")) == [8, 4, 2, 1]
    assert reductions(build("pvt", stages="lsls")) == [1, 4, 1, 1]
    grids = [s.blocks[0].attn.options.key_position for s in build("pvt", img_size=(100, 64)).stages]
    assert grids == [(25, 16), (13, 8), (7, 4), (4, 2)]


def test_no_weight_decay():
    assert build("pyramid").no_weight_decay() == set()
    keys = {f"stages.{i}.blocks.0.attn.{n}" for i in range(2) for n in ("key_position.weight", "mechanism.power",
                                                                        "mechanism.scale")}  # fmt: skip
    biases = {f"stages.{i}.blocks.0.attn.relative_position_bias" for i in (2, 3)}
    assert build("swin").no_weight_decay() == keys | biases
    assert {"stem.pos_embed", "stages.1.downsample.pos_embed"} <= build("pvt").no_weight_decay()
    assert "stages.2.blocks.1.0.main.mechanism.c" in build("efficientvit").no_weight_decay()
    # A linear map inside a mechanism is a weight like others.
    assert not any("gate.weight" in name for name in build("pyramid", "gated").no_weight_decay())


def test_rotary_where_features_have_pairs():
    rotary = lambda *a, **o: build("pyramid", *a, **o).stages[0].blocks[0].attn.options.rotary  # noqa: E731
    assert rotary("nala") == rotary("softmax") == rotary("quadratic") == rotary("mala") == "blocks"
    assert rotary("efficient") is rotary("performer") is rotary("taylor") is None
    assert rotary("performer", mechanism_options={"performer": {"num_features": 32}}) == "blocks"


def test_options_reach_their_mechanism():
    model = build("pyramid", "nala", mechanism_options={"nala": {"power": 2.0}}, impl="chunked")
    first, last = (model.stages[i].blocks[0].attn.mechanism for i in (0, 3))
    assert (first.power, first.impl, last.impl) == (2.0, "chunked", "auto")
    assert build("efficientvit").stages[2].blocks[1][0].main.mechanism.form == "normalized"
    assert build("efficientvit", mechanism_options={}).stages[2].blocks[1][0].main.mechanism.form == "compact"
    mixed = build("efficientvit", ["relu", "quadratic"])
    assert mixed.stages[2].blocks[1][0].main.mechanism.eps == 1e-15
    assert mixed.stages[3].blocks[1][0].main.mechanism.form == "normalized"


@pytest.mark.parametrize("host", HOSTS)
def test_channels_last_and_autocast(host):
    model = build(host).eval()
    with torch.no_grad():
        plain = model(images())
        last = model.to(memory_format=torch.channels_last)(images().contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            low = model(images())
    assert low.dtype == torch.bfloat16
    assert (low - plain).abs().max() < 0.05 * plain.abs().max() + 0.02  # some thirty roundings to 2^-8 on the way


@pytest.mark.parametrize(
    "host", ["pyramid", *(pytest.param(h, marks=pytest.mark.slow) for h in HOSTS if h != "pyramid")]
)
def test_compiles_as_one_graph(host):
    model = build(host).double().eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images().double()), model(images().double()), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("pyramid", stages="llx"), "stages must be letters l .linear. and s .softmax., one per stage"),
        (lambda: build("pyramid", ["relu", "elu"]), "mechanism must be one name or 4, one per stage, got 2"),
        (lambda: build("pyramid", depths=(1, 1)), "depths must have 4 values, one per stage"),
        (lambda: build("pvt", mlp_ratios=4.0), "mlp_ratios must have 4 values, one per stage, got 4.0"),
        (lambda: build("pyramid", linear_init="zero"), "linear_init must be one of 'torch', 'small', got 'zero'"),
        (lambda: build("pyramid", "elu", mechanism_options={"nala": {}}), "mechanism_options has 'nala', but"),
        (lambda: build("swin", mechanism_options={"softmax": {"scale": 2.0}}), "softmax in windows has no options"),
        (lambda: build("swin", window=0), "window must be an integer >= 1"),
        (lambda: build("efficientvit", scales=(4,)), "scales must be odd"),
        (lambda: build("efficientvit", head_dim=12), "head_dim must divide dim, got dim = 16 and head_dim = 12"),
        (lambda: build("pyramid", impl="fast"), "impl='fast' is no form of nala, softmax"),
        (lambda: build("pyramid", global_pool="max"), "global_pool must be one of 'avg', '', got 'max'"),
        (lambda: build("pyramid", global_pool=""), "global_pool='' leaves nothing to classify and needs num_classes=0"),
        (lambda: build("pyramid", num_classes=-1), "num_classes must be an integer >= 0, got -1"),
        (lambda: build("pyramid")(images()[:, :2]), r"images must be \(B, 3, height, width\), got shape \(2, 2"),
        (lambda: build("pyramid").forward_intermediates(images(), indices=[4]), "indices must be stages from -4 to 3"),
        (lambda: build("pyramid").forward_intermediates(images(), output_fmt="NLC"), "output_fmt must be one of"),
        (lambda: create_pyramid("nala", "xxl"), "size must be one of 'xt', 'xt_paper', 't'"),
        (lambda: create_pvt("b"), "size must be one of 't', 's', 'm', 'l', got 'b'"),
    ],
)  # fmt: skip
def test_bad_options(call, message):
    with pytest.raises(ValueError, match=message):
        call()
