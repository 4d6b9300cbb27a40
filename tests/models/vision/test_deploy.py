"""What happens to models afterwards: compiled, in bf16, folded, exported."""

import pytest
import torch

timm = pytest.importorskip("timm")

from tests.models.vision.cases import build as build_backbone  # noqa: E402
from tests.models.vision.cases import images, stir  # noqa: E402
from tests.models.vision.timm_cases import build, pictures  # noqa: E402

from linattn.models.vision import convert, create_vit, export_onnx, export_program, fold_reflections  # noqa: E402
from linattn.support.extras import MissingExtraError  # noqa: E402

FIXED = {"modulation": "none"}


def converted(family, mechanism="mirror", stirred=0.3, **options):
    return convert(build(family, stirred), mechanism, **options).model


@pytest.mark.parametrize("family", ["eva", pytest.param("swin", marks=pytest.mark.slow)])
def test_a_converted_model_compiles_as_one_graph(family):
    model = converted(family).double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(pictures().double()), model(pictures().double()), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", ["vit", "eva", "swin", "pvt"])
def test_channels_last_and_autocast(family):
    """Norms of q and k and rotations widen under autocast; mechanisms want one dtype."""
    model, theirs = converted(family, stirred=0.05), build(family, 0.05)
    with torch.no_grad():
        plain, exact = model(pictures()), theirs(pictures())
        last = model.to(memory_format=torch.channels_last)(pictures().contiguous(memory_format=torch.channels_last))
        torch.testing.assert_close(last, plain, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            low = model(pictures())
            budget = (theirs(pictures()) - exact).abs().max()  # what softmax loses in the same model
    assert low.dtype == torch.bfloat16
    assert (low - plain).abs().max() <= 2 * (budget + 2**-8 * plain.abs().max())


@pytest.mark.parametrize("family", ["deit3", "beit", "swin", "pvt"])
def test_folding_keeps_outputs(family):
    model = converted(family, reflections=1, **FIXED).double()
    before = model(pictures().double())
    names = fold_reflections(model)
    assert len(names) == sum(hasattr(m, "plan") for m in model.modules())
    torch.testing.assert_close(model(pictures().double()), before, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="nothing to fold"):
        fold_reflections(model)


def test_what_cannot_be_folded_says_why():
    for model, message in (
        (converted("deit3"), "modulation='sequence' makes the reflection depend on the input"),
        (converted("vit", **FIXED), "a norm of q and k stands between the projections of blocks.0.attn"),
        (converted("eva", **FIXED), "a rotation by position stands between"),
        (create_vit("digits", "relu"), "nothing to fold"),
    ):
        with pytest.raises(ValueError, match=message):
            fold_reflections(model)


@pytest.mark.parametrize("name", [pytest.param("pyramid", marks=pytest.mark.slow), "deit3"])
def test_an_exported_program_of_a_folded_model_gives_the_same(name):
    if name == "pyramid":
        model, example = (
            build_backbone(name, "mirror", mechanism_options={"mirror": FIXED}, preset="mirror").eval(),
            images(32, 32),
        )
        stir(model)
    else:
        model, example = converted("deit3", **FIXED).train(), pictures()
    before, training = model(example), model.training
    fold_reflections(model)
    torch.testing.assert_close(model(example), before, rtol=1e-4, atol=1e-4)
    program = export_program(model, example)
    assert model.training is training
    assert not [n for n in program.graph.nodes if "linattn" in str(n.target)]
    for batch in (example, torch.cat([example, example.flip(0), example[:1]])):
        torch.testing.assert_close(program.module()(batch), model(batch), rtol=1e-4, atol=1e-5)


def test_exports_that_are_refused():
    with pytest.raises(ValueError, match=r"linattn.chunk_scan.default cannot be written .* use impl='reference'"):
        export_program(create_vit("digits", "retention", depth=1), torch.randn(2, 1, 8, 8))
    with pytest.raises(ValueError, match="needs an example of two images"):
        export_program(create_vit("digits", "relu", depth=1), torch.randn(1, 1, 8, 8))


def test_onnx(tmp_path):
    pytest.importorskip("onnxscript", reason="the extra `export` is not installed: no onnxscript to write ONNX with")
    runtime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed: no onnxruntime")
    model, example = converted("deit3", **FIXED), pictures()
    fold_reflections(model)
    export_onnx(model, example, tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    batch = torch.cat([example, example[:1]])
    (out,) = session.run(["logits"], {"images": batch.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), model(batch).detach(), rtol=1e-4, atol=1e-5)


def test_missing_onnx_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("linattn.support.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ONNX needs onnx: pip install 'linattn\[export\]'"):
        export_onnx(create_vit("digits", "relu"), torch.randn(2, 1, 8, 8), tmp_path / "model.onnx")
