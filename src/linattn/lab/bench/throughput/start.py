"""Compiles models beforehand, in parallel."""

import torch

from linattn.lab.bench.language.apart import warm
from linattn.lab.bench.language.model import create_model
from linattn.lab.bench.models.steps import COMPILED, compile_host
from linattn.lab.bench.throughput.rows import ThroughputResult
from linattn.lab.bench.throughput.run import OnWork, draw_batch, flash_only, plan_of, training_step
from linattn.lab.bench.throughput.settings import ThroughputConfig


def warm_throughput(config: ThroughputConfig, result: ThroughputResult, on_work: OnWork) -> None:
    """Compile one block of every model at every length; the head, whose logits are large, once for every length."""
    if config.torch_device.type != "cuda" or config.backend != "inductor":
        return
    plan = plan_of(config, result)
    first = {length: mechanism for mechanism, length in reversed(plan)}
    warm(warm_one, [(name, length, first[length] == name) for name, length in plan], config, result, on_work)


def warm_one(task: tuple[str, int, bool], config: ThroughputConfig) -> None:
    mechanism, length, with_head = task
    device = config.torch_device
    torch.compiler.reset()
    model = create_model(config.size, mechanism, device, config.seed, depth=1)
    inputs, targets = draw_batch(config, length)
    compile_host(model, COMPILED, config.backend)
    with flash_only(config, mechanism):
        if with_head:
            training_step(model, inputs, targets, config.autocast)()
        else:
            with torch.autocast(device.type, torch.bfloat16, config.autocast):
                x = model.hidden(inputs)
            x.float().square().sum().backward()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model.hidden(inputs)  # kernels in fp32, which the check uses
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # others compile at the same time and need memory too
