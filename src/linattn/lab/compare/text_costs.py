"""Measures what each mechanism costs in a language model: parameters, state, speed, memory."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from linattn.lab.bench.memory import peak_bytes
from linattn.lab.bench.timing import measure_in_turns
from linattn.lab.compare.cost import REPEATS, busy_share
from linattn.lab.tasks.text import SequenceTask
from linattn.lab.train.accelerator import matrix_products
from linattn.lab.train.captured_step import Recorder, RecordError
from linattn.lab.train.text.config import TextConfig
from linattn.lab.train.text.feed import Feed, Part
from linattn.lab.train.text.hosts import Host, count_parameters, create_host
from linattn.lab.train.text.run import TextNetwork
from linattn.mechanisms.base import Mechanism
from linattn.support.compiling import compile_blocks
from linattn.support.progress import OnWork

MIN_SECONDS, MIN_REPEATS = 0.2, 3


def measure_costs(hosts: Mapping[str, Host], task: SequenceTask, config: TextConfig, on_work: OnWork) -> dict[str, Any]:
    """The costs of each host by name, and how busy the machine was; speeds are lists, measured in turns."""
    busy = busy_share()
    device = torch.device(config.device)
    part = next(iter(Feed(task, config, device).train())).parts[0]
    costs: dict[str, dict[str, Any]] = {}
    networks: dict[str, TextNetwork] = {}
    for name, host in hosts.items():
        on_work(f"{name}: parameters, state, memory")
        model = create_host(host, task, 0).to(device)
        networks[name] = TextNetwork(model, task)
        costs[name] = weigh(model, longest_sequence(task).to(device), config.precision)
        if config.compile:
            compile_blocks(networks[name])  # time and memory are to be those of training
        step = training_step(networks[name], part, config.precision)
        if device.type == "cuda":
            step()  # in the first pass libraries allocate workspaces, which do not belong to the model
        costs[name]["peak_bytes_train"] = peak_bytes(step, device)
    tokens = part.batch.inputs.numel()
    for key, make in (("tokens_per_second_forward", forward), ("tokens_per_second_train", training_step)):
        on_work("tokens per second, " + ("training" if make is training_step else "forward"))
        calls = {name: make(network, part, config.precision) for name, network in networks.items()}
        with matrix_products(config.precision):
            if device.type == "cuda" and config.graphs is not False:
                calls = {name: replayed(call, Recorder(device)) for name, call in calls.items()}
            for _ in range(REPEATS):
                timings = measure_in_turns(calls, device, min_seconds=MIN_SECONDS, min_repeats=MIN_REPEATS)
                for name, timing in timings.items():
                    costs[name].setdefault(key, []).append(tokens / timing.median)
    return {"costs": costs, "busy": max(busy, busy_share())}


def longest_sequence(task: SequenceTask) -> Tensor:
    """A sequence ``(1, T)`` of the task's length, so that tasks of several lengths are always measured at the same."""
    sequences = (batch.inputs[:1] for batch in task.test_batches(1))
    first = next(sequences)
    return next((found for found in chain([first], sequences) if found.shape[1] == task.length), first)


def weigh(model: Any, sequence: Tensor, precision: str) -> dict[str, Any]:
    own = [module for module in model.modules() if isinstance(module, Mechanism)]
    return {
        "parameters": count_parameters(model),
        "mechanism_parameters": sum(mechanism.num_parameters for mechanism in own),
        "state_bytes": state_bytes(model, own, sequence, precision),
    }


@torch.no_grad()
def state_bytes(model: Any, mechanisms: list[Mechanism], sequence: Tensor, precision: str) -> int | None:
    """Bytes of the state after one ``sequence (1, T)``, over all layers; None if there is no state.

    For a causal model it is that of the cache, which includes the state of Canon layers; for an encoder, the size that
    its mechanisms declare, in fp32.
    """
    if any(mechanism.info.state == "none" for mechanism in mechanisms):
        return None
    if not model.config.causal:
        return sum(4 * mechanism.state_size(sequence.shape[1]) for mechanism in mechanisms)
    model.eval()
    with torch.autocast(sequence.device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        cache = model.model(sequence, use_cache=True).past_key_values
    return sum(_bytes(layer.state) for layer in cache.layers)


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.itemsize
    return sum(map(_bytes, state)) if isinstance(state, tuple) else 0


def replayed(call: Callable[[], object], recorder: Any) -> Callable[[], object]:
    """``call`` recorded as a CUDA graph, as in the runs; ``call`` itself if it cannot be recorded."""
    kept: list[object] = []  # memory that a replay writes to must not be reused

    def run() -> None:
        kept[:] = [call()]

    for _ in range(2):  # the first compiles code
        recorder.warm_up(run)
    try:
        replay: Callable[[], object] = recorder.record(run)
    except RecordError:
        return call
    return lambda: (replay(), kept)


def forward(network: TextNetwork, part: Part, precision: str) -> Callable[[], object]:
    def call() -> object:
        network.eval()
        with torch.no_grad(), torch.autocast(part.batch.inputs.device.type, torch.bfloat16, precision == "bf16"):
            return network(part.batch, part.rows)

    return call


def training_step(network: TextNetwork, part: Part, precision: str) -> Callable[[], object]:
    """A function for forward, loss and backward, without the optimiser; gradients are returned, not stored."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]

    def call() -> object:
        network.train()
        with torch.autocast(part.batch.inputs.device.type, torch.bfloat16, precision == "bf16"):
            loss, _ = network(part.batch, part.rows)
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    return call
