"""Base of all backbones with four stages: timm's contract for models that return a pyramid of features."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from linattn.models.vision.heads import Head, start_small
from linattn.models.vision.stage import PlaneStage, Stage
from linattn.ops.shared.call import check_choice

STRIDE = 4  # stride of the first stage, as published; every further stage doubles it
# Parameters that say where, not how strongly: they are not weights.
PLACES = ("pos_embed", "cls_token", "key_position.weight", "relative_position")


class ImageModel(nn.Module):
    """What timm asks of every model, whatever its shape."""

    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only each block's input for the backward pass, and recompute the rest there."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not weights: positions, and a mechanism's angles, powers and scales."""
        maps = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
        return {
            name
            for name, _ in self.named_parameters()
            if any(place in name for place in PLACES) or (".mechanism." in name and name not in maps)
        }

    def init_small(self, *kinds: type[nn.Module]) -> None:
        """Initialise weights of modules of ``kinds`` as truncated normal with std 0.02, and their biases as 0.

        A mechanism's own parameters stay as its paper says.
        """
        for name, module in self.named_modules():
            if isinstance(module, kinds) and ".mechanism." not in name:
                start_small(module)


class Backbone(ImageModel):
    """Base of backbones: images ``(B, in_chans, H, W)`` of any size to logits ``(B, num_classes)``, stage by stage.

    ``stem``, ``stages``, ``norm`` and ``head`` each take a plane ``(B, C, H, W)``. Stage i has stride ``stride 2^i``; a
    side that this does not divide is rounded up.

    Args:
        stem, stages, head: the parts; stages in the order they run.
        dims: width of each stage.
        in_chans: channels of an image.
        num_classes: classes of the head, 0 for no classifier.
        norm: norm of the last stage's output, before the head.
        stride: stride of the stem.
    """

    def __init__(
        self,
        stem: nn.Module,
        stages: Sequence[Stage | PlaneStage],
        head: Head,
        *,
        dims: Sequence[int],
        in_chans: int,
        num_classes: int,
        norm: nn.Module | None = None,
        stride: int = STRIDE,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.in_chans, self.num_classes = in_chans, num_classes
        self.num_features, self.head_hidden_size = dims[-1], head.num_features
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": dim, "reduction": stride * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem = stem
        self.stages = nn.Sequential(*stages)
        self.norm = nn.Identity() if norm is None else norm
        self.head = head

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks of all stages in one list, in the order they run; these are compiled one by one."""
        return nn.ModuleList(block for stage in self.stages for block in stage.blocks)  # type: ignore[union-attr]

    def forward_features(self, x: Tensor) -> Tensor:
        """The last stage's plane ``(B, num_features, H / 32, W / 32)``; other strides of the stem change its size."""
        return self.norm(self.stages(self.stem(self._checked(x))))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits or, with ``pre_logits``, the classifier's input ``(B, head_hidden_size)``."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Outputs of stages, as in timm: the last ``indices`` of them, those listed, or all.

        Args:
            x: images.
            indices: which stages; negative ones count from the end.
            norm: also apply the norm to the last stage's output, in models that have one before the head.
            stop_early: skip the stages after the last one asked for.
            output_fmt: ``"NCHW"``.
            intermediates_only: return the list alone, without the last plane.
        """
        check_choice("output_fmt", str(getattr(output_fmt, "value", output_fmt)), ("NCHW",))
        taken = chosen_indices(indices, len(self.stages), "stages")
        outputs = []
        x = self.stem(self._checked(x))
        for i, stage in enumerate(self.stages[: max(taken) + 1] if stop_early else self.stages):
            x = stage(x)
            last = self.norm(x) if i == len(self.stages) - 1 else x
            if i in taken:
                outputs.append(last if norm else x)
        return outputs if intermediates_only else (last, outputs)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the given stages do not need; returns their indices. Only the last stage has a norm."""
        taken = chosen_indices(indices, len(self.stages), "stages")
        if prune_norm or max(taken) < len(self.stages) - 1:
            self.norm = nn.Identity()
        self.stages = self.stages[: max(taken) + 1]
        self.num_features = self.feature_info[max(taken)]["num_chs"]
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; 0 classes: the head has none; ``global_pool=""``: the head does nothing at all."""
        self.head.reset(num_classes, global_pool, next(self.stem.parameters()))
        self.num_classes = num_classes

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        super().set_grad_checkpointing(enable)
        for stage in self.stages:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Patterns that assign parameters to layers, for learning rates that decay with depth."""
        fine = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^stem", "blocks": [(r"^stages\.(\d+)", None), (r"^norm", (99999,))] if coarse else fine}

    def _checked(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"images must be (B, {self.in_chans}, height, width), got shape {tuple(x.shape)}")
        return x


def chosen_indices(indices: int | Sequence[int] | None, count: int, what: str) -> list[int]:
    """Resolve indices as timm does: None for all, n for the last n, or a list, where negative ones count backwards."""
    if indices is None:
        indices = count
    asked = range(-indices, 0) if isinstance(indices, int) else indices
    if not asked or not all(-count <= i < count for i in asked):
        raise ValueError(
            f"indices must be {what} from {-count} to {count - 1}, or how many from the end, got {indices}"
        )
    return [i % count for i in asked]


def stage_grid(img_size: tuple[int, int], stage: int, stride: int = STRIDE) -> tuple[int, int]:
    """Number of tokens down and across a stage's plane; ``stride`` is that of the stem."""
    height, width = (-(-n // (stride * 2**stage)) for n in img_size)
    return height, width
