"""A clear error for second derivatives of operators whose gradient is an operator too."""

from typing import Any


def refuse_second_derivatives(backward: Any, whose: str) -> None:
    """Make a second derivative an error that says which forms have one.

    Args:
        backward: the operator that computes the first derivatives; differentiating it raises.
        whose: what the message calls it, such as ``"kernels"``.
    """

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"gradients of {whose} cannot be differentiated again (create_graph=True); "
            "impl='reference' and impl='recurrent' have second derivatives"
        )

    backward.register_autograd(refuse)
