"""``linattn linearize``."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from linattn.lab.cli.options import (
    Device,
    Threads,
    device_or_default,
    integers,
    names,
    option_errors,
    precision_or_default,
    set_threads,
    settings,
)

WORDS = {"true": True, "false": False}  # as command lines have them
TRAINING, TUNING, FIGURES = "Attention transfer", "Fine-tuning", "Evaluation"


def linearize(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a pretrained model of transformers.")],
    out: Annotated[Path, typer.Option(help="Folder of the result; started again with the same options, it goes on.")],
    method: Annotated[
        str, typer.Option(help="still, lolcats, hedgehog, t2r, features, zeros_softmax or dof.")
    ] = "still",
    text: Annotated[
        list[str], typer.Option(help="Text to train on: a file, a folder of .txt files, .jsonl; may be given again.")
    ] = [],  # noqa: B006, typer copies it
    option: Annotated[
        list[str],
        typer.Option(
            help="Option of the method: key=value, such as window=128 or mechanism=mirror; may be given again."
        ),
    ] = [],  # noqa: B006
    layers: Annotated[
        str, typer.Option(help="Numbers of the layers to convert, with commas.", show_default="all")
    ] = "",
    recipe: Annotated[
        str,
        typer.Option(
            help="paper: both stages as the paper of still, lolcats or dof trains them; options that are given count "
            "instead of its own.",
            show_default="none",
            rich_help_panel=TRAINING,
        ),
    ] = "",
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.", rich_help_panel=TRAINING)] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to read, in the place of steps.", rich_help_panel=TRAINING)
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences of a step.", rich_help_panel=TRAINING)] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a sequence.", show_default="up to 1024", rich_help_panel=TRAINING),
    ] = None,
    recall_share: Annotated[
        float | None,
        typer.Option(
            help="Share of sequences that end with passages of their own text.",
            show_default="0",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.", rich_help_panel=TRAINING)] = None,
    loss: Annotated[
        str | None, typer.Option(help="Loss of a layer: mse or cross_entropy.", rich_help_panel=TRAINING)
    ] = None,
    layers_per_round: Annotated[
        int | None, typer.Option(help="Layers that learn at a time.", show_default="all", rich_help_panel=TRAINING)
    ] = None,
    transfer: Annotated[bool, typer.Option(help="Do this stage.", rich_help_panel=TRAINING)] = True,
    finetune_steps: Annotated[int | None, typer.Option(help="Updates of the weights.", rich_help_panel=TUNING)] = None,
    finetune_tokens: Annotated[
        int | None, typer.Option(help="Tokens to read, in the place of steps.", rich_help_panel=TUNING)
    ] = None,
    finetune_batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a step.", rich_help_panel=TUNING)
    ] = None,
    finetune_length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.", show_default="as above", rich_help_panel=TUNING)
    ] = None,
    finetune_recall_share: Annotated[
        float | None,
        typer.Option(
            help="Share of sequences that end with passages of their own text.",
            show_default="as above",
            rich_help_panel=TUNING,
        ),
    ] = None,
    finetune_lr: Annotated[float | None, typer.Option(help="Highest learning rate.", rich_help_panel=TUNING)] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the low-rank updates.", rich_help_panel=TUNING)] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Low-rank updates count alpha / rank times.", rich_help_panel=TUNING)
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="What is learnt: distill, next_token or mix.", rich_help_panel=TUNING)
    ] = None,
    targets: Annotated[
        str,
        typer.Option(
            help="Projections that get low-rank updates, by name, with commas.",
            show_default="those of the attention",
            rich_help_panel=TUNING,
        ),
    ] = "",
    pooled_weight: Annotated[
        float | None, typer.Option(help="Encoders: weight of the loss on the mean over tokens.", rich_help_panel=TUNING)
    ] = None,
    hidden_weight: Annotated[
        float | None,
        typer.Option(
            help="Weight of the loss on hidden states after every layer.", show_default="0", rich_help_panel=TUNING
        ),
    ] = None,
    train_cores: Annotated[
        bool, typer.Option(help="Go on training what stage 1 has trained.", rich_help_panel=TUNING)
    ] = False,
    scale_factor: Annotated[
        float | None,
        typer.Option(
            help="With --train-cores: of the learning rate of the linear part's scale.",
            show_default="1",
            rich_help_panel=TUNING,
        ),
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Parts that a step is computed in.", rich_help_panel=TUNING)
    ] = None,
    finetune: Annotated[bool, typer.Option(help="Do this stage.", rich_help_panel=TUNING)] = True,
    eval_text: Annotated[
        list[str],
        typer.Option(help="Texts to measure on.", show_default="what is held out of --text", rich_help_panel=FIGURES),
    ] = [],  # noqa: B006
    lengths: Annotated[
        str,
        typer.Option(
            help="Windows of perplexity, with commas; texts of encoders are cut to them.", rich_help_panel=FIGURES
        ),
    ] = "",
    windows: Annotated[int | None, typer.Option(help="Windows of each text, at most.", rich_help_panel=FIGURES)] = None,
    texts: Annotated[int | None, typer.Option(help="Texts to measure on, at most.", rich_help_panel=FIGURES)] = None,
    needle_lengths: Annotated[
        str, typer.Option(help="Lengths of texts that hide a number, with commas, or none.", rich_help_panel=FIGURES)
    ] = "",
    needle_haystacks: Annotated[
        str,
        typer.Option(
            help="What they are made of, with commas: noise (five sentences that repeat), text (that measured on).",
            show_default="noise",
            rich_help_panel=FIGURES,
        ),
    ] = "",
    needle_count: Annotated[
        int | None, typer.Option(help="Needles for each haystack, length and depth.", rich_help_panel=FIGURES)
    ] = None,
    contexts: Annotated[
        str,
        typer.Option(
            help="Lengths of the context after which decoding is timed, with commas, or none.", rich_help_panel=FIGURES
        ),
    ] = "",
    new_tokens: Annotated[int | None, typer.Option(help="Tokens of each sample.", rich_help_panel=FIGURES)] = None,
    ablate: Annotated[bool, typer.Option(help="Measure with parts switched off too.", rich_help_panel=FIGURES)] = True,
    probe: Annotated[
        Path | None,
        typer.Option(help="Encoders: folder with labelled train.jsonl and test.jsonl.", rich_help_panel=FIGURES),
    ] = None,
    probe_texts: Annotated[
        int | None, typer.Option(help="Texts of each class, at most.", show_default="all", rich_help_panel=FIGURES)
    ] = None,
    evaluate: Annotated[bool, typer.Option(help="Measure the teacher and each stage.", rich_help_panel=FIGURES)] = True,
    page: Annotated[bool, typer.Option(help="Write report.html (extra report).", rich_help_panel=FIGURES)] = True,
    results: Annotated[
        Path | None, typer.Option(help="JSON file that gets all figures, as OUT/report.json.", rich_help_panel=FIGURES)
    ] = None,
    device: Device = "",
    precision: Annotated[
        str, typer.Option(help="Type of the weights: fp32 or bf16.", show_default="bf16 on cuda")
    ] = "",
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Seed of first weights, order and draws.")] = 0,
) -> None:
    """Make a pretrained model linear: convert its attention, train what is new on text, and report what was lost.

    The result is a model of transformers: `linattn generate` writes with it, and linattn.convert.files loads it.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """
    from linattn.convert.recipes import with_recipe
    from linattn.convert.transfer import TransferOptions
    from linattn.lab.convert.jobs.linearize_job import Job, finetune_options
    from linattn.lab.convert.jobs.linearize_run import linearize_folder

    set_threads(threads)
    device = device_or_default(device)
    first = _given(
        steps=steps, tokens=tokens, batch_size=batch_size, length=length, recall_share=recall_share, lr=lr, loss=loss,
        layers_per_round=layers_per_round, seed=seed,
    )  # fmt: skip
    second = _given(
        steps=finetune_steps, tokens=finetune_tokens, batch_size=finetune_batch_size,
        length=finetune_length or length,
        recall_share=recall_share if finetune_recall_share is None else finetune_recall_share,
        lr=finetune_lr, rank=rank, alpha=alpha, objective=objective, pooled_weight=pooled_weight,
        hidden_weight=hidden_weight, targets=tuple(filter(None, targets.split(","))) or None, train_cores=train_cores,
        scale_factor=scale_factor, accumulation=accumulation, seed=seed,
    )  # fmt: skip
    figures = _given(
        windows=windows, texts=texts, needle_count=needle_count, new_tokens=new_tokens, ablate=ablate,
        probe_texts=probe_texts, needle_haystacks=names(needle_haystacks) or None,
    )  # fmt: skip
    for name, given in (("lengths", lengths), ("needle_lengths", needle_lengths), ("contexts", contexts)):
        if given:
            figures[name] = () if given == "none" else integers(name.replace("_", "-"), given)
    with option_errors(arguments={"model": "MODEL_DIR"}):
        first, second = with_recipe(recipe, method, first, second)
        job = Job(
            model,
            out,
            method,
            tuple(text),
            tuple(eval_text),
            TransferOptions(**first) if transfer else None,
            finetune_options(second) if finetune else None,
            figures | {"seed": seed} if evaluate else None,
            probe,
            integers("layers", layers) or None,
            {name: WORDS.get(str(value), value) for name, value in settings("option", option).items()},
            device,
            precision_or_default(precision, device),
            page,
            results,
        )
        code = linearize_folder(job, Console())
    raise typer.Exit(code)


def _given(**values: Any) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the stage."""
    return {name: value for name, value in values.items() if value is not None}
