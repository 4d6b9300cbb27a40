"""Conversions end to end, on few images and one block: what is reported, what is kept, what is held out."""

from dataclasses import replace

import pytest
import torch
from tests.lab.compare.test_images import accuracy

from linattn.lab.cases import case_path
from linattn.lab.compare import images
from linattn.lab.compare.conversion import CompareConversion
from linattn.lab.screen import Screen
from linattn.lab.train.rounds import DivergedError
from linattn.support.options import OptionError

pytest.importorskip("timm", reason="the extra `vision` is not installed: nothing to convert")
pytestmark = pytest.mark.usefixtures("few_images")
SMALL = CompareConversion(
    mechanisms=("softmax", "relu"), patch_size=4, depth=1, share=0.25, seeds=2, epochs=4, batch_size=32, lr=2e-3,
    warmup_epochs=1, device="cpu", jobs=1,
)  # fmt: skip


def stored(config, case, model):
    model.load_state_dict(torch.load(case_path(config.folder / "cases", case) / "weights.pt", weights_only=True))
    return model


def test_conversions_are_reported_before_right_after_and_at_the_end(tmp_path, few_images, compared):
    config = replace(SMALL, output=tmp_path)
    assert (config.finetuning(0, 1e-3).epochs, replace(config, share=0.01).finetuning(0, 1e-6).min_lr) == (1, 1e-6)
    code, results, found = compared(config)
    assert code == 0
    assert "4 epochs on softmax, converted and trained for 1 more epoch" in results["meta"]["about"]
    for seed in (0, 1):
        softmax, relu = found["run"]["softmax", seed], found["run"]["relu", seed]
        case = config.case("run", "relu", seed=seed, lr=2e-3, validation=False)
        before = stored(config, config.source_of(case), config.softmax_model(few_images, 99))
        assert softmax["before"] == relu["before"] == pytest.approx(accuracy(before, few_images))
        assert softmax["converted"] == softmax["before"], "the same model"
        converted = config.converted(before, "relu", seed)[0]
        assert relu["converted"] == pytest.approx(accuracy(converted, few_images))
        assert relu["score"] == pytest.approx(accuracy(stored(config, case, converted), few_images))
        assert len(relu["records"]) == 1
    page = (tmp_path / "report.html").read_text()
    assert all(f">{title}<" in page for title in ("before", "converted"))
    # with one more mechanism nothing that is there is trained again
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cases/**/*") if path.is_file()}
    _, _, more = compared(replace(config, mechanisms=("softmax", "relu", "mirror")))
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    mirror = more["run"]["mirror", 0]
    assert mirror["options"] == {"reflections": 2}
    assert mirror["converted"] == found["run"]["relu", 0]["converted"], "it starts with the plain ReLU of q and k"


def test_a_rate_is_chosen_on_images_that_the_softmax_model_has_not_seen(tmp_path, compared, monkeypatch):
    seen, real = [], images.train

    def watched(model, batches, config, folder, **options):
        seen.append((len(batches.images), config.epochs))
        if config.epochs == 4 and config.seed == 1:
            raise DivergedError("the training loss is not finite")
        return real(model, batches, config, folder, **options)

    monkeypatch.setattr(images, "train", watched)
    code, _, found = compared(replace(SMALL, mechanisms=("relu",), finetune_lr=(1e-3, 1e-6), output=tmp_path))
    held_out = 86
    assert seen == [(held_out, 4), (96, 4), (96, 4), (held_out, 1), (held_out, 1), (96, 1)]
    assert code == 1
    assert "not finite" in found["source"]["before conversion", 1]["error"]
    assert "was not trained" in found["run"]["relu", 1]["error"]
    assert "score" in found["run"]["relu", 0]


def test_options_join_those_a_conversion_starts_with(few_images):
    config = replace(SMALL, mechanisms=("relu", "mirror"), option={"mirror.modulation": "none"})
    assert config.options("mirror") == {"reflections": 2, "modulation": "none"}
    assert config.model("mirror", few_images, 0).blocks[0].attn.mechanism.modulation == "none"


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"mechanisms": ("nope",)}, "mechanisms"),
        ({"finetune_lr": (0.0,)}, "finetune_lr"),
        ({"mechanisms": ("mirror",), "option": {"mirror.modulation": "x"}}, "option"),
        ({"option": {"relu.rotary": "inputs"}}, "option"),
        ({"option": {"pola.alpha": 2}}, "option"),
        ({"energy_loss": 0.1}, "energy_loss"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_written(tmp_path, changes, option):
    with pytest.raises(OptionError) as error:
        replace(SMALL, output=tmp_path / "c", **changes).run(Screen(quiet=True))
    assert error.value.option == option
    assert not (tmp_path / "c").exists()
