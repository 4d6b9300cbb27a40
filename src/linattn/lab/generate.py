"""``linattn generate``: go on from a prompt with a language model."""

from dataclasses import dataclass
from pathlib import Path

import torch

from linattn.lab.screen import Screen
from linattn.lab.train.config import Precision
from linattn.support.config import Config, option
from linattn.support.extras import need
from linattn.support.options import OptionError, check_device
from linattn.support.progress import without_bars


@dataclass(frozen=True, kw_only=True)
class Generate(Config):
    """Go on from a prompt with a language model of this library, or one that `linattn linearize` has written.

    Without a tokenizer in its folder, tokens are bytes.

    Exit code: 0 all right, 2 a bad option or a package that is missing.
    """

    checkpoint: Path = option(help="Folder of a language model, as save_pretrained writes it.", argument=True)
    prompt: tuple[str, ...] = option(
        help="Text to go on from; may be given again: all are continued in one batch.", repeated=True
    )
    max_new_tokens: int = option(200, "Tokens to add.")
    temperature: float = option(0.0, "Temperature of the draws; 0: always the likeliest token.")
    top_k: int = option(0, "At a temperature above 0: draw from this many of the likeliest tokens; 0: from all.")
    top_p: float = option(1.0, "At a temperature above 0: draw from the likeliest with this probability together.")
    beams: int = option(1, "Beams of a beam search; 1: none.")
    prefill_chunk: int = option(0, "Read a long prompt in pieces of this many tokens; 0: whole.")
    seed: int = option(0, "Seed of the draws.")
    device: str = option("", "cpu, cuda or cuda:N.", default_text="cuda where there is one")
    precision: Precision | None = option(None, "fp32 or bf16.", default_text="bf16 on cuda")

    def run(self, screen: Screen) -> int:
        need("linattn generate", "transformers", "safetensors")
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        check_device(device)
        from linattn.lab.convert.folder import is_linearized, load_linearized_text
        from linattn.models.language import register_auto_classes
        from linattn.models.language.hf.text import Sampling, load_text_model

        register_auto_classes()
        sampling = Sampling(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.beams, self.prefill_chunk, self.seed
        )
        sampling.check()
        precision = self.precision or ("bf16" if device.startswith("cuda") else "fp32")
        try:
            read = load_linearized_text if is_linearized(self.checkpoint) else load_text_model
            with without_bars():
                model = read(self.checkpoint, device, precision)
        except OptionError as error:
            raise OptionError("checkpoint" if error.option == "model" else error.option, error.message) from error
        answers = model.complete(list(self.prompt), sampling)
        texts = [text + answer for text, answer in zip(self.prompt, answers, strict=True)]
        if not screen.quiet:
            print(*texts, sep="\n")  # as it is: a Screen would draw what looks like the name of an emoji
        screen.result(texts)
        return 0
