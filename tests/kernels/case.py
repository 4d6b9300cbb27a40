"""One call of linear or exponential attention: its tensors, drawn from its sizes, and how kernels are made to take it.

Masked tokens hold NaN, and what a masked query gives counts as zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import budget
from kernels.budget import FP32, Tensors
from kernels.device import DEVICE
from linattn import exponential_attention_with_state
from linattn.kernels.bidirectional import config as bidirectional_config
from linattn.kernels.causal import config as causal_config
from linattn.kernels.channel_decay.device import plan as channel_plan
from linattn.kernels.exponential import config as exponential_config
from linattn.layers.rotary import PlaneRotation, plane_rotation
from linattn.ops.exponential.call import ExponentialState
from linattn.ops.linear.api import run
from linattn.ops.linear.call import LinearCall
from linattn.ops.maps import FeatureMap
from linattn.ops.shared.types import LinearState
from ops.map_cases import MAPS, converted, drawer, is_learned, tensors

# Names of the maps of queries and keys; of other names both are the same.
PAIRS = {
    "mirror": ("pair_relu", "pair_relu"), "nala": ("norm_power", "sign_power"), "nala_masked": ("scaled", "sign_power"),
    "hedgehog": ("softmax_pair", "softmax_pair"), "pola": ("split_power_opposite", "split_power"),
    "pola_plus": ("split_expm1_opposite", "split_expm1_one"), "pola_plus_masked": ("scaled_flows", "split_expm1"),
    "focused": ("shifted_power", "shifted_power"), "lion": ("unit_silu", "unit_silu"),
}  # fmt: skip


@dataclass
class Case:
    """A call of ``linear_attention``, or with ``gate``, the size of its input gates, of ``exponential_attention``."""

    dtype: torch.dtype = FP32
    B: int = 1
    H: int = 2
    H_kv: int = 1
    T: int = 100
    Tk: int | None = None
    K: int = 16
    V: int = 16
    causal: bool = False
    norm: str | None = "sum"
    decay: str | Callable[[Tensor], Tensor] | None = None  # a function makes decays per channel of normal numbers
    index: str | None = None
    gate: float | None = None
    start: bool = False  # whether there is a state to start from, and one to give back
    final: bool = False
    mask: bool = False
    cu: tuple[int, ...] | None = None
    weighed: bool = False
    own_norm: bool = False  # features of its own for the denominator
    map: str | None = None
    heads: str = "shared"  # of a map's numbers: queries have those of their keys, their own, or all the same
    plane: tuple[int, int] | None = None  # of tokens, by which features are turned
    prefix: int = 0
    stride: int = 1
    blocks: bool = True
    signed: bool = False
    scale: float = 1.0
    offset: float = 0.0  # of the values
    tf32: bool = False
    layout: str = "dense"  # or: the heads of a token side by side; columns side by side
    path: str = "short"  # of bidirectional kernels, for small shapes too
    segments: int = 0
    trial: dict[str, dict[str, int]] = field(default_factory=dict)  # settings of kernels, by role
    spec: str = "reference"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cu is not None:
            self.T = self.cu[-1]
        if self.plane is not None:
            self.keys = tuple(-(-n // self.stride) for n in self.plane)
            self.T, self.Tk = (a * b + self.prefix for a, b in (self.plane, self.keys))
        self.Tk = self.T if self.Tk is None else self.Tk

    def __str__(self) -> str:
        """What differs from the defaults."""
        said = []
        for one in fields(self):
            value, usual = getattr(self, one.name), {} if one.name == "trial" else one.default
            if value != usual and not (one.name == "Tk" and value == self.T):
                said.append(f"{one.name}={getattr(value, '__name__', value)}".removeprefix("dtype=torch."))
        return " ".join(said) or "plain"

    @property
    def sequences(self) -> int:
        return self.B if self.cu is None else len(self.cu) - 1

    @cached_property
    def maps(self) -> tuple[FeatureMap, FeatureMap] | None:
        if self.map is None:
            return None
        of_key = 1 if self.heads == "one" else self.H_kv
        counts = {"shared": self.H_kv, "own": self.H, "one": 1}[self.heads], of_key
        names, normal = PAIRS.get(self.map, (self.map, self.map)), drawer(self.seed + 1)
        both = zip(names, counts, (self.T, self.Tk), strict=True)
        query, key = (converted(MAPS[name](normal, heads, self.K, T), FP32, DEVICE) for name, heads, T in both)
        return query, key

    @cached_property
    def key_mask(self) -> Tensor | None:
        if not self.mask:
            return None
        mask = torch.rand(self.B, self.Tk, generator=torch.Generator().manual_seed(self.seed + 2)) < 0.65
        mask[-1, :3] = False
        return mask.to(DEVICE)

    @cached_property
    def t(self) -> Tensors:
        """The tensors that get gradients."""
        g = torch.Generator().manual_seed(1000 * self.seed + self.T + 7 * self.K)
        B, H, H_kv, T, Tk, K, V = self.B, self.H, self.H_kv, self.T, self.Tk, self.K, self.V

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g)

        # Row sums far from 0: their rounding is not the whole result.
        size = (
            torch.abs if not self.signed and self.map is None and (self.norm or self.gate is not None) else torch.clone
        )
        t = {"q": self.scale * size(normal(B, H, T, K)), "k": self.scale * size(normal(B, H_kv, Tk, K))}
        if self.norm == "abs_max_one":
            # And from 1 and -1 on both sides: the gradient jumps there, and rounding would decide to which side.
            t["q"] = t["q"] * torch.where(normal(B, H, T, 1) > 0.5, 1e-3, 1.0)
            t["q"][:, 0] *= -1
        t["v"] = self.scale * (normal(B, H_kv, Tk, V).abs() if self.same_sign else normal(B, H_kv, Tk, V) + self.offset)
        if self.own_norm:
            t |= {"norm_q": normal(B, H, T, K).abs(), "norm_k": normal(B, H_kv, Tk, K).abs()}
        t = {name: x.to(self.dtype) for name, x in t.items()}
        if self.decay is not None:
            t["log_decay"] = self._log_decay(normal)
        if self.gate is not None:
            t["log_input"] = self.gate * normal(B, H_kv, Tk)
        elif self.weighed:
            t["log_input"] = F.logsigmoid(2 * normal(B, H_kv, Tk))
        if self.start:
            flows = self.maps[1].flows if self.maps else 1
            heads, features = (self.sequences, H_kv * flows), self.maps[1].num_features(K) if self.maps else K
            t["z"] = normal(*heads, features).abs() + 0.3
            t["kv"] = normal(*heads, features, V // flows) * (t["z"].unsqueeze(-1) if self.norm else 1)
            t |= {"unit": normal(*heads)} if self.gate is not None else {}
        t = {name: x.to(DEVICE) for name, x in t.items()}
        if self.key_mask is not None:
            for name in t.keys() & {"k", "v", "log_input", "log_decay", "norm_k"}:
                if t[name].ndim > 1:
                    hidden = ~self.key_mask[:, None]
                    t[name] = t[name].masked_fill(hidden.unsqueeze(-1) if t[name].ndim == 4 else hidden, torch.nan)
        for side, own in zip("qk", self.maps or (), strict=False):
            t |= {f"map {side} {n}": x.detach() for n, x in enumerate(tensors(own))}
        return {name: laid(x, self.layout) if name in "qkv" else x for name, x in t.items()}

    @property
    def same_sign(self) -> bool:
        """A decay per head gets the sum over all tokens: positive numbers keep it from cancelling.

        With a normaliser they would do the opposite: it takes their mean away.
        """
        return self.decay == "head" and self.norm is None

    def _log_decay(self, normal: Callable[..., Tensor]) -> Tensor:
        B, H_kv, T, K = self.B, self.H_kv, self.T, self.maps[1].num_features(self.K) if self.maps else self.K
        if callable(self.decay):
            return self.decay(normal(B, H_kv, T, K))
        return {
            "head": lambda: -0.2 * normal(H_kv).abs(),
            "token": lambda: F.logsigmoid(normal(B, H_kv, T) + 4),
            "strong": lambda: -20 * normal(B, H_kv, T).abs(),
            # 64 tokens lose about exp(-55): the most that is still taken in two factors.
            "steep": lambda: torch.full((B, H_kv, T), -0.86),
            "closed": lambda: torch.where(normal(B, H_kv, T) > 1, -torch.inf, -0.1),
            "channel": lambda: F.logsigmoid(normal(B, H_kv, T, K)),
        }[self.decay]()  # type: ignore[index]

    @property
    def cuts_digits(self) -> bool:
        """Whether products read 11 bits of fp32; the interpreter multiplies in fp32."""
        return self.tf32 and DEVICE == "cuda"

    @property
    def rotation(self) -> PlaneRotation | None:
        if self.plane is None:
            return None
        width = self.K if self.blocks else None
        options = {"num_prefix_tokens": self.prefix, "key_shape": self.keys, "stride": self.stride}
        return plane_rotation(self.plane, width=width, **options)

    def __call__(self, t: Tensors, impl: str) -> Tensors:
        """The output, and the last state where it is given back."""
        cu = None if self.cu is None else torch.tensor(self.cu, device=DEVICE)
        options: dict[str, Any] = {"key_mask": self.key_mask, "cu_seqlens": cu, "validate": False}
        options |= {"log_decay": t.get("log_decay"), "log_input": t.get("log_input")}
        if self.gate is not None:
            start = ExponentialState(t["kv"], t["z"], t["unit"]) if self.start else None
            options |= {"initial_state": start, "impl": impl}
            output, state = exponential_attention_with_state(t["q"], t["k"], t["v"], **options)
        else:
            maps = self.maps
            if maps is not None:
                maps = tuple(
                    rebuilt(own, (x for name, x in t.items() if name.startswith(f"map {side}")), t["q"].dtype)
                    for side, own in zip("qk", maps, strict=True)
                )
            call = LinearCall(
                t["q"], t["k"], t["v"], causal=self.causal, normalizer=self.norm, decay_index=self.index,
                feature_map=maps, norm_features=(t["norm_q"], t["norm_k"]) if self.own_norm else None,
                initial_state=LinearState(t["kv"], t["z"]) if self.start else None, need_state=self.start or self.final,
                rotate=self.rotation, tf32=self.tf32, **options,
            )  # fmt: skip
            output, state = run(call, impl)
        if self.key_mask is not None and self.Tk == self.T:
            output = output.masked_fill(~self.key_mask[:, None, :, None], 0)
        names = ("kv", "z", "unit") if self.start or self.final else ()
        return {"output": output} | {f"final {name}": x for name, x in zip(names, state or (), strict=False)}

    def evaluate(self, impl: str = "triton", exactly: bool = False) -> Tensors:
        t = {name: x.double() for name, x in self.t.items()} if exactly else self.t
        with forced(self):
            return budget.evaluate(self, t, impl, self.dtype, self.same_sign)

    def check(self) -> Tensors:
        with forced(self):
            options = {"rests": self._rests, "same_sign": self.same_sign, "spec": self.spec}
            return budget.check(self, self.t, dtype=self.dtype, **options)

    def _rests(self, exact: Tensors, plain: list[Tensors]) -> dict[str, float]:
        """What rounding leaves of larger numbers."""
        eps, rests = 2**-10 if self.cuts_digits else torch.finfo(self.dtype).eps, {}
        if DEVICE == "cpu" and self.dtype == torch.bfloat16:
            eps *= 2  # Triton's interpreter cuts digits off where a GPU rounds
        if self.cuts_digits:
            t = {name: (budget.cut(x) if name in "qkv" else x).double() for name, x in self.t.items()}
            cost_of = budget.evaluate(self, t, self.spec, self.dtype, self.same_sign)
            plain = [*plain, cost_of]
        swept = self.gate is None and not callable(self.decay) and self.decay != "channel"
        if swept and "log_decay" in self.t:  # of q . dq and k . dk
            parts = ((self.t[name].double() * exact[f"d {name}"]).nan_to_num().sum(-1) for name in "qk")
            terms = self.B * self.T if self.t["log_decay"].ndim == 1 else 1
            rests["d log_decay"] = terms * eps * sum(x.abs().max().item() if x.numel() else 0.0 for x in parts)
        if swept and self.norm is not None and (self.causal or self.decay):  # of do . v and its mean
            for name in ("d q", "d k"):
                cost, size = max(budget.error(x[name], exact[name]) for x in plain), exact[name].abs()
                rests[name] = 2 * cost + eps * (size.max().item() if size.numel() else 0.0)
        for name, x in exact.items():
            if self.cuts_digits:
                rests[name] = max(rests.get(name, 0.0), budget.error(cost_of[name], x) + eps * x.abs().max().item())
            if x.numel() == 1 and "map" in name:  # one number for all tokens, and no others tell of its error
                rests[name] = exact["output"].shape[:3].numel() ** 0.5 * eps * x.abs().item()
        return rests

    def assert_repeats(self) -> None:
        with forced(self):
            budget.assert_repeats(self, self.t, self.dtype)


def rebuilt(feature_map: FeatureMap, given: Iterator[Tensor], dtype: torch.dtype) -> FeatureMap:
    """The map with the tensors given for those that are learned, in the order of ``tensors``."""
    new: dict[str, Any] = {}
    for one in fields(feature_map):  # type: ignore[arg-type]
        value = getattr(feature_map, one.name)
        if isinstance(value, FeatureMap):
            new[one.name] = rebuilt(value, given, dtype)
        elif isinstance(value, Tensor):
            wide = torch.promote_types(dtype, FP32)
            new[one.name] = next(given) if is_learned(feature_map, one.name) else value.to(wide)
    return replace(feature_map, **new)  # type: ignore[type-var]


def laid(x: Tensor, layout: str) -> Tensor:
    """The same numbers in another order of memory, with gaps between the tokens."""
    if layout == "tokens":
        return torch.cat([x, x], -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]
    return x.mT.contiguous().mT if layout == "columns" else x


@contextmanager
def forced(case: Case) -> Iterator[None]:
    """Kernels take small shapes as they take large ones: by another path, in segments, with settings of a trial."""
    with pytest.MonkeyPatch.context() as patch:
        if case.path != "short":
            patch.setattr(bidirectional_config, "SHORT", -1)
            patch.setattr(bidirectional_config, "TILES_PER_SEGMENT", 1)
            wide = {dtype: max(n, 64 * 64) for dtype, n in bidirectional_config.WIDE.items()}
            patch.setattr(bidirectional_config, "WIDE", wide if case.path == "long" else dict.fromkeys(wide, 0))
        trial = exponential_config.TRIAL if case.gate is not None else causal_config.TRIAL
        for role, settings in case.trial.items():
            patch.setitem(trial, role, settings)
        if case.segments:
            patch.setattr(channel_plan, "_SHORTEST", 64)
            for module in (causal_config, exponential_config):
                module.TRIAL_SEGMENTS.append(case.segments)
        try:
            yield
        finally:
            for module in (causal_config, exponential_config):
                module.TRIAL_SEGMENTS.clear()


def checks(*cases: Case) -> Any:
    """A test of each."""
    return pytest.mark.parametrize("case", cases, ids=str)
