"""Training recipes of the papers, as far as the options of the two stages can express them."""

from typing import Any

from linattn.convert.finetune import FinetuneOptions
from linattn.convert.transfer import TransferOptions
from linattn.support.options import OptionError, check_option

RECIPES = ("paper",)
# Each stage reads Alpaca's cleaned instructions twice: 40 M tokens in both stages together.
ALPACA_TOKENS = 20_000_000

# LoLCATs. STILL was built on its code, and is taken to use the same rates and text. In that code feature maps and the
# weight of the window share one learning rate: a scale_factor of 1.
_FIRST = {"loss": "mse", "lr": 1e-2, "scale_factor": 1.0, "batch_size": 8, "clip_norm": 1.0, "tokens": ALPACA_TOKENS}
_SECOND = {"objective": "next_token", "lr": 1e-4, "rank": 8, "batch_size": 8, "clip_norm": 1.0, "tokens": ALPACA_TOKENS}
# z learns at a rate of 0.02, the logarithm of alpha at ten times that. The authors then train the whole model for each
# task, which this fine-tuning stage does not do: it keeps its own options.
_ROWS = {"loss": "cross_entropy", "lr": 0.02, "scale_factor": 10.0, "batch_size": 128}

STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "still": (_FIRST, _SECOND | {"alpha": 8.0}),
    "lolcats": (_FIRST, _SECOND | {"alpha": 16.0}),
    "dof": (_ROWS, {}),
}


def paper_stages(method: str) -> dict[str, Any]:
    """The arguments ``transfer`` and ``finetune`` of ``linearize`` that follow the paper of a method.

    These learning rates fall by a cosine; LoLCATs and STILL divide theirs by 10 when the loss stops falling.
    ``docs/linearize.md`` lists the other differences.

    Example:
        >>> stages = paper_stages("lolcats")
        >>> stages["transfer"].lr, stages["finetune"].lr, stages["finetune"].alpha, stages["finetune"].objective
        (0.01, 0.0001, 16.0, 'next_token')
    """
    first, second = with_recipe("paper", method, {}, {})
    return {"transfer": TransferOptions(**first), "finetune": FinetuneOptions(**second)}


def with_recipe(recipe: str, method: str, *given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Fields of both stages from a recipe, except for those ``given``; the recipe ``""`` has none.

    Example:
        >>> with_recipe("paper", "still", {"lr": 1e-3, "steps": 5}, {})[0]["lr"]
        0.001
    """
    if not recipe:
        return given
    check_option("recipe", recipe, RECIPES)
    if method not in STAGES:
        raise OptionError("recipe", f"paper exists for the methods {', '.join(STAGES)}, got method {method!r}")
    # If steps are given, the recipe's tokens are dropped: they would take precedence.
    return tuple(
        {name: value for name, value in own.items() if not (name == "tokens" and "steps" in fields)} | fields
        for own, fields in zip(STAGES[method], given, strict=True)
    )
