"""Convert pretrained models to linear attention.

The package itself can be called: ``linattn.linearize(model, method="still", ...)`` is
``linattn.linearize.run.linearize``.
"""

import sys
from inspect import Signature, signature
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that can be called like the function it is named after, and imported from like any package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from linattn.linearize.run import linearize

        return linearize(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        from linattn.linearize.run import linearize

        return signature(linearize)


sys.modules[__name__].__class__ = _CallablePackage
