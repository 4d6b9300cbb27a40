"""Options that all commands which train a language model share, written once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.cli.options import Compile, Device, Graphs, MechanismOptions, Precision
from linattn.cli.shared_options import MachineOptions


@dataclass(kw_only=True)
class TextOptions:
    """One field an option, as typer reads them from a signature."""

    mechanism: Annotated[str, typer.Option(help="A name from `linattn mechanisms`, in every layer.")] = "softmax"
    hybrid: Annotated[
        str, typer.Option(help="Mechanisms by layer, over and over, such as gated*3,softmax; in place of the above.")
    ] = ""
    canon: Annotated[str, typer.Option(help="Canon layers: ABCD, AbCD, other letters of these, or none.")] = "none"
    option: MechanismOptions = field(default_factory=list)
    size: Annotated[str, typer.Option(help="Host: pico, mqar, lra, mad, small, base or 135m.  [default: by task]")] = ""
    width: Annotated[int | None, typer.Option(help="Channels of the host.")] = None
    depth: Annotated[int | None, typer.Option(help="Blocks of the host.")] = None
    heads: Annotated[int | None, typer.Option(help="Heads of the host.")] = None
    mlp_width: Annotated[int | None, typer.Option(help="Channels inside the feed-forward parts.")] = None
    rotary: Annotated[float | None, typer.Option(help="Share of a head that rotary positions turn.")] = None
    attention_norm: Annotated[
        str, typer.Option(help="Of the output: head_rms, rms, head_layer, layer, none; auto: none for softmax, zeros.")
    ] = "auto"
    attention_gate: Annotated[str, typer.Option(help="Of the output, behind its norm: silu, linear, none.")] = "none"
    dropout: Annotated[float, typer.Option(help="Of both branches of a block.")] = 0.0
    recipe: Annotated[
        str,
        typer.Option(
            help="Settings of a paper for a task of this kind: what is not given, and the depth, width and heads of "
            "its host.  "
            "[default: by task, with a small host]"
        ),
    ] = ""
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.")] = None
    tokens: Annotated[int | None, typer.Option(help="Budget in tokens, in the place of steps.")] = None
    batch_size: Annotated[int | None, typer.Option(help="Sequences of a step, over all processes.")] = None
    accumulation: Annotated[int | None, typer.Option(help="Parts that a step is computed in, to save memory.")] = None
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.")] = None
    min_lr: Annotated[float | None, typer.Option(help="Learning rate of the last step.")] = None
    warmup_steps: Annotated[int | None, typer.Option(help="Steps in which the learning rate rises.")] = None
    schedule: Annotated[
        str, typer.Option(help="How the learning rate falls: cosine or linear.  [default: by recipe]")
    ] = ""
    weight_decay: Annotated[float | None, typer.Option(help="On matrices.")] = None
    clip_norm: Annotated[float | None, typer.Option(help="Longest gradient; 0: not clipped.")] = None
    eval_every: Annotated[int | None, typer.Option(help="Steps between evaluations; 0: one at the end.")] = None
    eval_batch_size: Annotated[int | None, typer.Option(help="Sequences evaluated at a time.")] = None
    device: Device = ""
    precision: Precision = ""
    compile: Compile = None
    graphs: Graphs = None
    seed: Annotated[int, typer.Option(help="Of first weights, order and draws.")] = 0
    checkpoint_seconds: Annotated[float | None, typer.Option(help="Longest time between two checkpoints.")] = None
    start: Annotated[Path | None, typer.Option(help="Folder of a trained model whose weights to start from.")] = None
    output: Annotated[
        Path | None, typer.Option(help="Folder.  [default: runs/train/<task>-<mechanism>-seed<seed>]")
    ] = None

    def changes(self) -> dict[str, Any]:
        """Fields of ``TextConfig``; None where the recipe decides."""
        same = ("steps", "batch_size", "accumulation", "lr", "min_lr", "warmup_steps", "weight_decay", "clip_norm",
                "eval_every", "eval_batch_size", "seed", "checkpoint_seconds")  # fmt: skip
        machine = MachineOptions(device=self.device, precision=self.precision, compile=self.compile, graphs=self.graphs)
        found = {name: getattr(self, name) for name in same} | {"schedule": self.schedule or None}
        return found | machine.changes()
