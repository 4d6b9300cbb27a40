"""Packages that only some features need."""

from importlib.util import find_spec

# The packages of each extra, by the names under which they are imported.
PACKAGES = {
    "lab": ("accelerate", "matplotlib", "numpy", "sklearn"), "hf": ("peft", "safetensors", "transformers"),
    "vision": ("timm", "torchvision"), "graph": ("torch_geometric",), "export": ("onnx", "onnxscript"),
}  # fmt: skip
EXTRAS = {package: extra for extra, packages in PACKAGES.items() for package in packages}


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
