"""Options that all commands which train language models have in common."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from linattn.lab.cli.options import Compile, Device, Graphs, MechanismOptions, Precision
from linattn.lab.cli.shared_options import MachineOptions

MODEL, TRAINING = "Model", "Training"  # panels of the help
BY_SIZE, BY_RECIPE = "by --size", "by --recipe"


@dataclass(kw_only=True)
class TextOptions:
    """A field for each option, in the form that typer reads from signatures."""

    mechanism: Annotated[
        str, typer.Option(help="Mechanism of every layer, a name from `linattn mechanisms`.", rich_help_panel=MODEL)
    ] = "softmax"
    hybrid: Annotated[
        str,
        typer.Option(
            help="Mechanisms layer by layer, repeated to the last layer, such as gated*3,softmax; in place of "
            "--mechanism.",
            rich_help_panel=MODEL,
        ),
    ] = ""
    canon: Annotated[
        str, typer.Option(help="Positions of Canon layers: ABCD, AbCD, some of these letters, or none.",
                          rich_help_panel=MODEL)
    ] = "none"  # fmt: skip
    option: MechanismOptions = field(default_factory=list)
    size: Annotated[
        str,
        typer.Option(
            help="Size of the model: pico, mqar, lra, mad, small, base or 135m.",
            show_default="by task",
            rich_help_panel=MODEL,
        ),
    ] = ""
    width: Annotated[
        int | None, typer.Option(help="Channels of the model.", show_default=BY_SIZE, rich_help_panel=MODEL)
    ] = None
    depth: Annotated[
        int | None, typer.Option(help="Blocks of the model.", show_default=BY_SIZE, rich_help_panel=MODEL)
    ] = None
    heads: Annotated[
        int | None, typer.Option(help="Attention heads of a block.", show_default=BY_SIZE, rich_help_panel=MODEL)
    ] = None
    mlp_width: Annotated[
        int | None,
        typer.Option(help="Channels inside the feed-forward parts.", show_default=BY_SIZE, rich_help_panel=MODEL),
    ] = None
    rotary: Annotated[
        float | None,
        typer.Option(
            help="Share of a head's channels that rotary positions turn, 0 to 1.",
            show_default=BY_SIZE,
            rich_help_panel=MODEL,
        ),
    ] = None
    attention_norm: Annotated[
        str,
        typer.Option(
            help="Norm of the attention's output: head_rms, rms, head_layer, layer or none; auto is none for softmax "
            "and zeros, head_rms for others.",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    attention_gate: Annotated[
        str,
        typer.Option(
            help="Gate of the attention's output, behind its norm: silu, linear or none.", rich_help_panel=MODEL
        ),
    ] = "none"
    dropout: Annotated[
        float | None,
        typer.Option(
            help="Dropout on embeddings and on both branches of a block.",
            show_default="0, or that of --recipe",
            rich_help_panel=MODEL,
        ),
    ] = None
    start: Annotated[
        Path | None,
        typer.Option(help="Folder of a trained model whose weights to start from.", rich_help_panel=MODEL),
    ] = None
    recipe: Annotated[
        str,
        typer.Option(
            help="A paper's settings for all that is not given here, with the depth, width, heads and dropout of "
            "its model. A wrong name lists all.",
            show_default="by task, with a small model",
            rich_help_panel=TRAINING,
        ),
    ] = ""
    steps: Annotated[
        int | None, typer.Option(help="Updates of the weights.", show_default=BY_RECIPE, rich_help_panel=TRAINING)
    ] = None
    tokens: Annotated[
        int | None, typer.Option(help="Budget in tokens, in place of --steps.", rich_help_panel=TRAINING)
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences of a step, over all processes.", show_default=BY_RECIPE, rich_help_panel=TRAINING),
    ] = None
    accumulation: Annotated[
        int | None,
        typer.Option(
            help="Compute a step in so many parts, to save memory.", show_default="1", rich_help_panel=TRAINING
        ),
    ] = None
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate.", show_default=BY_RECIPE, rich_help_panel=TRAINING)
    ] = None
    min_lr: Annotated[
        float | None,
        typer.Option(help="Learning rate of the last step.", show_default=BY_RECIPE, rich_help_panel=TRAINING),
    ] = None
    warmup_steps: Annotated[
        int | None,
        typer.Option(help="Steps in which the learning rate rises.", show_default=BY_RECIPE, rich_help_panel=TRAINING),
    ] = None
    schedule: Annotated[
        str,
        typer.Option(
            help="How the learning rate falls: cosine or linear.", show_default=BY_RECIPE, rich_help_panel=TRAINING
        ),
    ] = ""
    weight_decay: Annotated[
        float | None,
        typer.Option(help="Weight decay, on matrices alone.", show_default=BY_RECIPE, rich_help_panel=TRAINING),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(
            help="Gradients longer than this are scaled down; 0: not clipped.",
            show_default="1",
            rich_help_panel=TRAINING,
        ),
    ] = None
    eval_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations; 0: one at the end.", show_default="0", rich_help_panel=TRAINING),
    ] = None
    eval_batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences evaluated at a time.", show_default="--batch-size", rich_help_panel=TRAINING),
    ] = None
    seed: Annotated[
        int, typer.Option(help="Seed of first weights, order of data and draws.", rich_help_panel=TRAINING)
    ] = 0
    device: Device = ""
    precision: Precision = ""
    compile: Compile = None
    graphs: Graphs = None
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="Longest time between two checkpoints.", show_default="300")
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the run.", show_default="runs/train/<task>-<mechanism>-seed<seed>"),
    ] = None

    def changes(self) -> dict[str, Any]:
        """The options as fields of ``TextConfig``; None: as in the recipe."""
        same = ("steps", "batch_size", "accumulation", "lr", "min_lr", "warmup_steps", "weight_decay", "clip_norm",
                "eval_every", "eval_batch_size", "seed", "checkpoint_seconds")  # fmt: skip
        machine = MachineOptions(device=self.device, precision=self.precision, compile=self.compile, graphs=self.graphs)
        found = {name: getattr(self, name) for name in same} | {"schedule": self.schedule or None}
        return found | machine.changes()
