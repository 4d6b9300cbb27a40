"""Training settings of the controlled tasks in Physics of Language Models 4.1, as fields of ``Standard``, by name.

Depo2 and Brevo differ between the paper and its released code; settings of the code have names in ``-released``.
"""

from typing import Any

PAPER = "Physics of Language Models 4.1, arXiv:2512.17351"
RELEASED = f"{PAPER}, its released code"
EPS = 1e-6  # of Depo and Brevo
DEPO_RATES = (3e-4, 5e-4, 1e-3, 2e-3)
CAPO = {50_000: 12, 100_000: 24, 200_000: 48, 500_000: 96, 1_000_000: 192, 2_000_000: 384}  # people -> batch size
EXPOSURES = 100
PEOPLE_OF_WINDOW = 10  # of 512 tokens


def _standard(task: str, batch_size: int, steps: int, settings: dict[str, Any], **other: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "source": PAPER, "learning_rates": DEPO_RATES, "weight_decays": (0.03,), "warmup": 1000, "layers": 8,
        "width": (512, 768), "head_dim": 64, "betas": (0.9, 0.98), "floor": 0.1,
    }  # fmt: skip
    return {"task": task, "batch_size": batch_size, "steps": steps, "settings": settings} | shared | other


def _depo() -> dict[str, dict[str, Any]]:
    found = {}
    for nodes, steps in ((225, 87_500), (300, 100_000), (375, 112_500)):
        for hops in (8, 4):
            settings = {"letters": 50, "word_length": (1, 2), "nodes": nodes, "hops": hops, "length": 2048}
            name = f"depo1-{nodes}" + ("" if hops == 8 else "-4hops")
            found[name] = _standard("depo", 128, steps, settings, eps=EPS)
    for nodes, steps in ((75, 100_000), (100, 125_000), (125, 150_000)):
        for letters, hops, source, ending in (
            (4, 16, PAPER, ""), (4, 4, PAPER, "-4hops"), (3, 16, RELEASED, "-released"),
        ):  # fmt: skip
            settings = {"letters": letters, "word_length": (5, 7), "nodes": nodes, "hops": hops, "length": 2048}
            found[f"depo2-{nodes}{ending}"] = _standard("depo", 128, steps, settings, source=source, eps=EPS)
    return found


def _brevo() -> dict[str, dict[str, Any]]:
    found = {}
    for which, source in (("paper", PAPER), ("released", RELEASED)):
        ending = "" if which == "paper" else "-released"
        for nodes, steps in ((70, 100_000), (90, 125_000), (110, 150_000)):
            settings: dict[str, Any] = {"nodes": nodes, "source": which, "length": 1024}
            found[f"brevo1-{nodes}{ending}"] = _standard("brevo", 256, steps, settings, source=source, eps=EPS)
        for nodes, steps in ((30, 200_000), (40, 225_000), (50, 250_000)):
            settings = {"nodes": nodes, "letters": 4, "word_length": (2, 4), "source": which, "length": 1536}
            found[f"brevo2-{nodes}{ending}"] = _standard("brevo", 192, steps, settings, source=source, eps=EPS)
    return found


def _mano() -> dict[str, dict[str, Any]]:
    return {
        f"mano-{operations}": _standard(
            "mano", 64, steps, {"operations": operations, "length": 1024},
            learning_rates=(1e-4, 2e-4, 3e-4, 5e-4), weight_decays=(0.1,),
        )
        for operations, steps in ((10, 80_000), (13, 95_000), (16, 110_000))
    }  # fmt: skip


def _lano() -> dict[str, dict[str, Any]]:
    return {
        f"lano-{grammar[-1]}": _standard(
            "lano", 96, 100_000, {"grammar": grammar, "length": length}, warmup=0, lr_schedule="linear", floor=0.0,
            learning_rates=(2e-4, 3e-4, 5e-4, 1e-3), weight_decays=(0.1,),
        )
        for grammar, length in (("cfg3f", 512), ("cfg3j", 1536), ("cfg3k", 1536))
    }  # fmt: skip


def _capo() -> dict[str, dict[str, Any]]:
    return {
        f"capo-{people // 1000}k": _standard(
            "capo", batch, EXPOSURES * people // (batch * PEOPLE_OF_WINDOW), {"people": people, "length": 512},
            learning_rates=(3e-4, 5e-4) if people > 1_000_000 else (5e-4, 1e-3), weight_decays=(0.01,), tied=True,
        )
        for people, batch in CAPO.items()
    }  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = _depo() | _brevo() | _mano() | _lano() | _capo()
