"""The page about a conversion, read as a user reads it."""

import pytest
from tests.lab.page.html_page import parse, table_of

from linattn.convert.evaluate.evaluator import NO_LINEAR
from linattn.lab.convert.linearize_page import lead, plan_words, sections
from linattn.lab.page import render


def stage(name, perplexity, found, cache, speed, text):
    return {
        "name": name,
        "seconds": 2.0,
        "perplexity": [{"length": n, "perplexity": perplexity * n / 256} for n in (256, 512)],
        "needle_by_length": [{"haystack": haystack, "length": n, "found": share}
                             for n in (256, 512) for haystack, share in (("noise", found), ("text", 0.9 * found))],
        "decoding": [{"context": n, "cache_bytes": cache(n), "tokens_per_second": speed} for n in (1024, 2048)],
        "samples": [{"prompt": "Once <b>", "text": text}],
    }  # fmt: skip


def worth(figure, gain, error, counts, **more):
    return {
        "figure": figure,
        "length": 256,
        "without": NO_LINEAR,
        "gain": gain,
        "error": error,
        "counts": counts,
    } | more


@pytest.fixture
def results():
    return {
        "meta": {"model": "tiny", "method": "still", "converted": 2, "training_tokens": 5000, "command": "linattn x",
                 "config": {"lr": 0.5}},
        "plan": {"method": "still", "layers": {"0": {"kind": "hybrid", "ratio": 0.0625}, "1": {"kind": "hybrid"}}},
        "degrees": None,
        "stages": [
            stage("teacher", 15.0, 1.0, lambda n: 1024 * n, 20.0, "upon a time"),
            stage("finetune", 16.5, 0.5, lambda n: 2**18, 30.0, "there & <i>then"),
        ],
        "transfer": [
            {"layer": i, "before": 0.5, "after": 0.05 * (i + 1), "losses": [0.5, 0.2, 0.1]} for i in range(2)
        ],
        "ablation": {
            "variants": {
                "as converted": {"perplexity": [{"length": 256, "perplexity": 16.5}]},
                NO_LINEAR: {"perplexity": [{"length": 256, "perplexity": 17.5}]},
            },
            "worth": [worth("perplexity", 0.06, 0.01, True), worth("needle", 0.0, 0.2, False, haystack="noise"),
                      worth("needle", 0.39, 0.1, True, haystack="text")],
        },
    }  # fmt: skip


def page(results):
    return parse(render("tiny", sections(results), results["meta"], lead(results)))


def alts(root, name):
    return [node.attributes["aria-label"] for node in root.find("section", id=name)[0].find("svg", role="img")]


def test_the_page_shows_every_figure(results):
    root = page(results)
    stages = table_of(root, "Stage by stage")
    assert stages["teacher"] == {
        "stage": "teacher", "perplexity at 256": "15", "perplexity at 512": "30", "needles in noise at 256, %": "100",
        "needles in noise at 512, %": "100", "needles in text at 256, %": "90", "needles in text at 512, %": "90",
        "cache at 2,048, MiB": "2", "tokens/s at 2,048": "20", "time, s": "2",
    }  # fmt: skip
    assert stages["finetune"]["cache at 2,048, MiB"] == "0.25"
    layers = table_of(root, "Layer by layer")
    assert layers["0"]["attention"] == "np features, window 64, 1/16 kept"
    assert (layers["1"]["missed before transfer"], layers["1"]["missed after transfer"]) == ("0.5", "0.1")
    without = table_of(root, "Is it the linear part?")[NO_LINEAR]
    assert without["nats lost at 256"] == "+0.0600 ± 0.0100"
    assert without["needles in noise lost at 256"] == "+0.00 ± 0.20 (may be chance)"
    assert without["needles in text lost at 256"] == "+0.39 ± 0.10"
    assert all(words in root.find("section", id="made")[0].text for words in ("linattn x", "lr 0.5"))
    assert "teacher 1 MiB to 2 MiB; finetune 256 KiB to 256 KiB" in alts(root, "cost")[0]
    assert "teacher 15 to 30; finetune 16.5 to 33" in alts(root, "quality")[0]
    text = " ".join(root.text.split())
    assert "2 attention layers were converted. 5,000 tokens were read" in text
    assert "Perplexity at 512 tokens went from 30.00 to 33.00 (+10.0 %)." in text
    assert "Once <b> …" in text
    assert "finetune: there & <i>then" in text
    assert "layer 0 0.5 to 0.1; layer 1 0.5 to 0.1" in alts(root, "transfer")[0]


def test_degrees_of_freedom_stand_beside_the_dimensions_chosen_by_them(results):
    results["degrees"] = {"layers": [{"layer": 0, "degrees": [2.0, 30.0]}, {"layer": 1, "degrees": [4.0, 10.0]}]}
    results["plan"]["layers"] = {"0": {"kind": "hybrid", "feature_dim": 48}, "1": {"kind": "hybrid", "feature_dim": 16}}
    first = table_of(page(results), "Layer by layer")["0"]
    assert first["attention"] == "np features of 48, window 64"
    assert (first["degrees of freedom"], first["of the widest head"]) == ("16", "30")


def test_a_report_of_little_and_of_infinities_is_still_a_page(results):
    results |= {"stages": [{"name": "teacher", "perplexity": [{"length": 8, "perplexity": float("inf")}]}],
                "transfer": [], "ablation": None}  # fmt: skip
    root = page(results)
    assert table_of(root, "Stage by stage")["teacher"]["perplexity at 8"] == "inf"
    assert not root.find("section", id="cost")
    assert not page(results | {"stages": []}).find("section", id="stage-by-stage")


def test_plans_are_told_in_words():
    assert plan_words({"kind": "mechanism", "mechanism": "mirror"}) == "mirror"
    assert plan_words({"kind": "hybrid", "features": "prf", "feature_dim": 8, "window": 0}) == "prf features of 8"
    without = {"kind": "hybrid", "features": "none", "cap": 4}
    assert plan_words(without) == "no linear part, window 64, at most 4 kept"
