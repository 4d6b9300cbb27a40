"""What operators with a formula of their own for gradients say of derivatives that they do not have."""

from typing import Any


def refuse_second_derivatives(backward: Any, whose: str) -> None:
    """Let the gradient of ``backward``, which computes gradients itself, name what has one; ``whose`` it is."""

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"gradients of {whose} cannot be differentiated again (create_graph=True); "
            "impl='reference' and impl='recurrent' have second derivatives"
        )

    backward.register_autograd(refuse)
