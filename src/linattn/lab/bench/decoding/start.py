"""Compiles the kernels of decoding beforehand, in one process per mechanism."""

from dataclasses import replace

from linattn.lab.bench.decoding.cache import use_static_cache
from linattn.lab.bench.decoding.check import CHECKED_TOKENS, DecodingTruth
from linattn.lab.bench.decoding.decoder import Decoder
from linattn.lab.bench.decoding.prefix import Prefix
from linattn.lab.bench.decoding.rows import DecodingResult
from linattn.lab.bench.decoding.run import OnWork, plan_of
from linattn.lab.bench.decoding.settings import DecodingConfig
from linattn.lab.bench.language.apart import warm
from linattn.lab.bench.language.model import create_model, draw_text
from linattn.lab.bench.models.cases import SOFTMAX


def warm_decoding(config: DecodingConfig, result: DecodingResult, on_work: OnWork) -> None:
    if config.torch_device.type == "cuda":
        tasks = [name for name in dict.fromkeys(key[0] for key in plan_of(config, result)) if name != SOFTMAX]
        warm(warm_one, tasks, config, result, on_work)


def warm_one(mechanism: str, config: DecodingConfig) -> None:
    """Run one layer at the shortest context and at one beyond a piece: every kernel that the rows will call."""
    device = config.torch_device
    contexts = [config.ordered_contexts[0], min(config.ordered_contexts[-1], config.piece + config.ordered_contexts[0])]
    size = replace(config.size, depth=1)
    text = draw_text(size, (contexts[-1] + CHECKED_TOKENS,), device, config.seed)
    model = create_model(size, mechanism, device, config.seed).to(config.torch_dtype).eval()
    if mechanism == SOFTMAX:
        use_static_cache(model)
    truth, prefix = DecodingTruth(model, text, None), Prefix(model, text, config.piece)
    for context in contexts:
        states = prefix.reach(context)
        for batch in config.batches:
            decoder = Decoder(model, states, context, batch, CHECKED_TOKENS, static=False)
            truth.check(decoder.read(text[context : context + 1]), context)
