"""Packages that only some features need."""

from importlib.util import find_spec

# Name under which a package is imported -> the extra that installs it.
EXTRAS = {
    "accelerate": "lab",
    "matplotlib": "lab",
    "numpy": "lab",
    "onnx": "export",
    "onnxscript": "export",
    "peft": "hf",
    "sklearn": "lab",
    "safetensors": "hf",
    "timm": "vision",
    "torch_geometric": "graph",
    "torchvision": "vision",
    "transformers": "hf",
}


class MissingExtraError(RuntimeError):
    """A package that a feature needs is not installed; the message says how to get it."""

    def __init__(self, feature: str, package: str) -> None:
        super().__init__(f"{feature} needs {package}: pip install 'linattn[{EXTRAS[package]}]'")
        self.package = package


def need(feature: str, *packages: str) -> None:
    """Raise :class:`MissingExtraError` if a package is missing: before a long run rather than in the middle of it."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(feature, package)
