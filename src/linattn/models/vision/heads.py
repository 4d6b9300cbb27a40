"""Classification heads of backbones: ``(B, C, H, W)`` to logits."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from linattn.models.vision.patches import PlaneLinear
from linattn.ops.shared.call import check_choice, check_integer

POOLS = ("avg", "")


def start_small(module: nn.Module) -> None:
    """Initialise a linear map or a convolution as truncated normal with std 0.02, and its bias as 0."""
    assert isinstance(module, nn.Linear | nn.Conv2d)
    nn.init.trunc_normal_(module.weight, std=0.02)
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def check_pool(pool: str, allowed: Sequence[str], num_classes: int) -> None:
    """Raise unless ``pool`` is allowed and gives what a classifier with so many classes can read."""
    check_integer("num_classes", num_classes, 0)
    check_choice("global_pool", pool, allowed)
    if num_classes and not pool:
        raise ValueError(f"global_pool='' leaves nothing to classify and needs num_classes=0, got {num_classes}")


class Head(nn.Module):
    """``fc(dropout(after(mean(before(x)))))``, the mean over the plane: ``(B, C, H, W)`` to ``(B, num_classes)``.

    Args:
        num_features: width of the input of ``fc``.
        num_classes: 0 leaves ``fc`` out.
        drop_rate: rate of the dropout.
        global_pool: ``"avg"``, or ``""``: the head does nothing, and returns the last plane as it is.
        before, after: maps before and after the mean.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
        before: nn.Module | None = None,
        after: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.before = nn.Identity() if before is None else before
        self.after = nn.Identity() if after is None else after
        self.drop = nn.Dropout(drop_rate)
        self.fc: nn.Module = nn.Identity()
        self.global_pool = global_pool
        self.reset(num_classes)

    def reset(self, num_classes: int, global_pool: str | None = None, like: Tensor | None = None) -> None:
        """Replace the classifier, with the dtype and device of ``like``; ``global_pool`` None: it stays as it is."""
        pool = self.global_pool if global_pool is None else global_pool
        check_pool(pool, POOLS, num_classes)
        self.global_pool = pool
        self.fc = nn.Identity()
        if num_classes:
            fc = nn.Linear(self.num_features, num_classes)
            start_small(fc)
            self.fc = fc if like is None else fc.to(like)
        self.fc.train(self.training)

    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if not self.global_pool:
            return x
        x = self.drop(self.after(self.before(x).mean((2, 3))))
        return x if pre_logits else self.fc(x)


def projected_head(dim: int, width: int, num_classes: int, *, drop_rate: float, global_pool: str) -> Head:
    """A head with ``silu(batch_norm(W x))``, wider than the last stage, before the mean (RALA and its successors)."""
    before = nn.Sequential(OrderedDict(proj=PlaneLinear(dim, width), norm=nn.BatchNorm2d(width), act=nn.SiLU()))
    return Head(width, num_classes, drop_rate=drop_rate, global_pool=global_pool, before=before)


def two_widths_head(
    dim: int, widths: tuple[int, int], num_classes: int, *, act: type[nn.Module], eps: float, **options: Any
) -> Head:
    """A head with ``act(batch_norm(W x))`` before the mean and ``act(layer_norm(W x))`` after it (EfficientViT)."""
    conv = nn.Conv2d(dim, widths[0], 1, bias=False)
    before = nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(widths[0], eps=eps), act=act()))
    proj = nn.Linear(*widths, bias=False)
    after = nn.Sequential(OrderedDict(proj=proj, norm=nn.LayerNorm(widths[1], eps=eps), act=act()))
    return Head(widths[1], num_classes, before=before, after=after, **options)
