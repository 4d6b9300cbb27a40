"""PVTv2: keys and values come from fewer tokens, after a strided convolution or pooling."""

from torch import Tensor, nn

from linattn.convert.vision.base import ConvertedAttention, Plan


class ReducedAttention(ConvertedAttention):
    """Converted form of ``timm.models.pvt_v2.Attention``.

    With ``reduction="drop"`` every token gives a key, which linear attention can afford (PolaFormer's hosts do so); a
    mechanism with gates for every key needs this.
    """

    def __init__(self, old: nn.Module, plan: Plan) -> None:
        super().__init__(old, plan)
        reduced = getattr(self, "sr", None) is not None
        if reduced and plan.reduction == "drop":
            for name in ("sr", "norm"):
                self.drop(name, "every token gives a key")
            self.pool = self.act = None
        elif reduced and self.mechanism.info.uses_input:
            raise ValueError(
                f"reduction='keep' leaves fewer keys than tokens, but mechanism {plan.mechanism!r} takes a gate for "
                "every key from its token: use reduction='drop'"
            )

    @property
    def input_dim(self) -> int:
        return self.q.weight.shape[1]

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        plane = (int(feat_size[0]), int(feat_size[1]))
        q = self.heads(self.q(x), self.num_heads)
        k, v = (self.heads(t, self.num_heads) for t in self.kv(self._sources(x, plane)).chunk(2, -1))
        out = self.attend(q, k, v, x, spatial_shape=plane)
        return self.proj_drop(self.proj(out))

    def _sources(self, x: Tensor, plane: tuple[int, int]) -> Tensor:
        """The tokens that keys and values are computed from."""
        if self.sr is None:
            return x
        y = x.transpose(1, 2).unflatten(2, plane)
        y = self.sr(y if self.pool is None else self.pool(y))
        y = self.norm(y.flatten(2).transpose(1, 2))
        return y if self.act is None else self.act(y)
