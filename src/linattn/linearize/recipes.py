"""How the papers train the models that they convert, as far as the options of the two stages can say it."""

from typing import Any

from linattn.linearize.finetune import FinetuneOptions
from linattn.linearize.transfer import TransferOptions
from linattn.support.options import OptionError, check_option

RECIPES = ("paper",)
# Each stage reads Alpaca's cleaned instructions twice: 40 M tokens in both together.
ALPACA_TOKENS = 20_000_000

# LoLCATs. STILL was built on its code, and its rates and text are taken to be the same. Feature maps and the weight of
# the window have one learning rate there: a scale_factor of 1.
_FIRST = {"loss": "mse", "lr": 1e-2, "scale_factor": 1.0, "batch_size": 8, "clip_norm": 1.0, "tokens": ALPACA_TOKENS}
_SECOND = {"objective": "next_token", "lr": 1e-4, "rank": 8, "batch_size": 8, "clip_norm": 1.0, "tokens": ALPACA_TOKENS}
# z learns at a rate of 0.02, the logarithm of alpha at ten times that. The authors then train the whole model for each
# task, which is not what fine-tuning does here: it keeps its own options.
_ROWS = {"loss": "cross_entropy", "lr": 0.02, "scale_factor": 10.0, "batch_size": 128}

STAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "still": (_FIRST, _SECOND | {"alpha": 8.0}),
    "lolcats": (_FIRST, _SECOND | {"alpha": 16.0}),
    "dof": (_ROWS, {}),
}


def paper_stages(method: str) -> dict[str, Any]:
    """The arguments ``transfer`` and ``finetune`` of ``linearize`` as the paper of a method has them.

    Learning rates fall by a cosine here; LoLCATs and STILL divide theirs by 10 where the loss stands still.
    ``docs/linearize.md`` says what else differs.

    Example:
        >>> stages = paper_stages("lolcats")
        >>> stages["transfer"].lr, stages["finetune"].lr, stages["finetune"].alpha, stages["finetune"].objective
        (0.01, 0.0001, 16.0, 'next_token')
    """
    first, second = with_recipe("paper", method, {}, {})
    return {"transfer": TransferOptions(**first), "finetune": FinetuneOptions(**second)}


def with_recipe(recipe: str, method: str, *given: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Fields of both stages: those of the recipe, but for what is ``given``; the recipe ``""`` has none.

    Example:
        >>> with_recipe("paper", "still", {"lr": 1e-3, "steps": 5}, {})[0]["lr"]
        0.001
    """
    if not recipe:
        return given
    check_option("recipe", recipe, RECIPES)
    if method not in STAGES:
        raise OptionError("recipe", f"paper exists for the methods {', '.join(STAGES)}, got method {method!r}")
    found = []
    for own, fields in zip(STAGES[method], given, strict=True):
        # Who gives steps does not want the recipe's tokens, which would count instead of them.
        found.append({name: own[name] for name in own if not (name == "tokens" and "steps" in fields)} | fields)
    return tuple(found)
