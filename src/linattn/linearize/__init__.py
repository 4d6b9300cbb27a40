"""Pretrained models made linear.

The package can be called: ``linattn.linearize(model, method="still", ...)`` is ``linattn.linearize.run.linearize``.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package with the name of its main function: whichever of the two is meant is found under it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from linattn.linearize.run import linearize

        return linearize(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        from linattn.linearize.run import linearize

        return signature(linearize)


sys.modules[__name__].__class__ = _CallablePackage
