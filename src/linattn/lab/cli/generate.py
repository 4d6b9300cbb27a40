"""``linattn generate``."""

from pathlib import Path
from typing import Annotated

import typer

from linattn.lab.cli.options import Device, Precision, device_or_default, option_errors, precision_or_default


def generate(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a language model, as save_pretrained writes it.")
    ],
    prompt: Annotated[
        list[str], typer.Option(help="Text to go on from; may be given again: all are continued in one batch.")
    ],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(help="Temperature of the draws; 0: always the likeliest token.")] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="At a temperature above 0: draw from this many of the likeliest tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="At a temperature above 0: draw from the likeliest tokens with this probability together."),
    ] = 1.0,
    beams: Annotated[int, typer.Option(help="Beams of a beam search; 1: none.")] = 1,
    prefill_chunk: Annotated[int, typer.Option(help="Read a long prompt in pieces of this many tokens; 0: whole.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: Device = "",
    precision: Precision = "",
) -> None:
    """Go on from a prompt with a language model of this library, or one that `linattn linearize` has written.

    Without a tokenizer in its folder, tokens are bytes.

    Exit code: 0 all right, 2 a bad option or a package that is missing.
    """

    from linattn.support.bars import without_bars
    from linattn.support.extras import need
    from linattn.support.options import check_device, check_option

    device = device_or_default(device)
    precision = precision_or_default(precision, device)
    with option_errors(arguments={"checkpoint": "MODEL_DIR", "model": "MODEL_DIR"}):
        need("linattn generate", "transformers", "safetensors")
        check_device(device)
        check_option("precision", precision, ("fp32", "bf16"))
        from linattn.lab.convert.folder import is_linearized, load_linearized_text
        from linattn.models.language import register_auto_classes
        from linattn.models.language.hf.text import Sampling, load_text_model

        register_auto_classes()
        sampling = Sampling(max_new_tokens, temperature, top_k, top_p, beams, prefill_chunk, seed)
        sampling.check()
        read = load_linearized_text if is_linearized(checkpoint) else load_text_model
        with without_bars():
            model = read(checkpoint, device, precision)
        answers = model.complete(prompt, sampling)
    for text, answer in zip(prompt, answers, strict=True):
        typer.echo(text + answer)
