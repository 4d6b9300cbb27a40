"""A training step as a CUDA graph, for small models, whose steps take longer to launch than to compute."""

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from linattn.lab.train.step_check import Snapshot, State, difference, disagreement

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

Run = Callable[[], None]
Input = Tensor | None
Shape = tuple[torch.Size, torch.dtype] | None

# A graph for each of so many shapes of batches. Further shapes are rare (a smaller last batch), or without end.
MOST_GRAPHS = 4
# The first replay has the inputs, the rate and the random numbers of the recording itself: values that are frozen into
# the graph by mistake show only in the second one.
CHECKED_REPLAYS = 2


def graphs_wanted(config: Any, accelerator: "Accelerator") -> bool:
    """Whether to record the steps of a run; if not for a reason that the config does not show, warn with the reason."""
    if config.graphs is False or accelerator.device.type != "cuda":
        return False
    reasons = []
    if accelerator.num_processes > 1:
        reasons.append(f"{accelerator.num_processes} processes exchange gradients within a step")
    if getattr(config, "accumulation", 1) > 1:
        reasons.append(f"a step is computed in {config.accumulation} parts")
    if reasons:
        tell(" and ".join(reasons))
    return not reasons


def tell(reason: str) -> None:
    """Warn in one line; Python shows the same line only once."""
    warnings.warn(f"training without CUDA graphs, kernel by kernel: {reason}", RuntimeWarning, stacklevel=3)


class RecordError(RuntimeError):
    """The function cannot be recorded as a graph; the message says why."""


class Recorder:
    """Records the graphs of one run. They share a stream and memory, as no two are replayed at the same time.

    Random numbers come from the device's default generator, whose state PyTorch hands to a graph at each replay: a
    replay draws what a call of the function would draw at that time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """Use new memory for further graphs, after all graphs were dropped and their memory with them."""
        self._memory = torch.cuda.graph_pool_handle()

    def tidy(self) -> None:
        """Free memory that only trials needed; a graph keeps its own memory, as much as a step takes."""
        torch.cuda.empty_cache()

    def warm_up(self, run: Run) -> None:
        """Run the function on the recording stream, so that one-time work (compiling, workspaces) is not recorded."""
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()
        here.wait_stream(self._stream)

    def record(self, run: Run) -> Run:
        """Record the function without running it; return its replay. A ``RecordError`` leaves the device usable."""
        here, number = torch.cuda.current_stream(self.device), torch.cuda.current_device()
        generator = torch.cuda.default_generators[number]
        spare = generator.clone_state()
        graph, cause = torch.cuda.CUDAGraph(), None
        gc.collect()  # objects that die during recording may free memory, which CUDA does not allow then
        try:
            # The restrictions apply only to this thread: others make batches meanwhile and pin memory for them.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode=mode):
                try:
                    run()
                except Exception as error:
                    cause = error  # leaving the recording raises again, with a less useful message
                    raise
        except Exception as error:
            # If ending a recording fails, torch, at least up to 2.11, does not clean up: the stream stays the current
            # one, memory is still taken from the graph's pool, and the generator would refuse the next seed.
            torch.cuda.set_stream(here)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(number, self._memory)
            generator.graphsafe_set_state(spare)
            torch.cuda.synchronize(self.device)
            first = cause or error
            words = " ".join(f"{type(first).__name__}: {first}".split())
            raise RecordError(words[:200]) from error
        return graph.replay


@dataclass
class Graph:
    """A recorded step: it reads its inputs from ``buffers``."""

    buffers: list[Input]
    replay: Callable[[], None]
    unchecked: int = CHECKED_REPLAYS

    def load(self, inputs: tuple[Input, ...]) -> None:
        for buffer, given in zip(self.buffers, inputs, strict=True):
            if buffer is not None and given is not None:
                buffer.copy_(given, non_blocking=True)


class CapturedStep:
    """Records ``step(*inputs)`` at the first call with inputs of a shape, and replays it at later calls.

    The step must do the same work for all inputs of one shape, on the device alone: a value from the host (a learning
    rate, a count) is frozen into the graph unless it comes in a tensor. Recording leaves no trace, as the state is
    restored after each trial. The first replays are compared with ``step`` itself, from the same state with the same
    random numbers. If a step cannot be recorded, or the two disagree, one warning is shown and steps are called from
    then on.

    Args:
        step: changes the tensors of ``state`` and nothing else that outlives the step; returns nothing.
        state: returns the current :func:`training_state`.
        precision: precision of the config; decides how much difference rounding may explain.
        recorder: makes graphs; None: CUDA's.
    """

    def __init__(
        self,
        step: Callable[..., None],
        state: Callable[[], State],
        precision: str,
        device: torch.device,
        recorder: Any = None,
    ) -> None:
        self.step, self.state, self.precision = step, state, precision
        self.recorder = recorder or Recorder(device)
        self.stopped: str | None = None
        """Why steps are no longer replayed."""
        self._graphs: dict[tuple[Shape, ...], Graph] = {}
        self._crowded = False

    def __call__(self, *inputs: Input) -> None:
        graph = self._graph(inputs) if self.stopped is None else None
        if graph is None:
            self.step(*inputs)
            return
        graph.load(inputs)
        if graph.unchecked:
            self._compare(graph, inputs)
        else:
            graph.replay()

    def stop(self, reason: str) -> None:
        """Use no graphs from now on."""
        if self.stopped is None:
            self.stopped = reason
            self.forget()
            tell(reason)

    def forget(self) -> None:
        """Drop all graphs and their memory, after tensors were replaced; the next step is recorded anew."""
        self._graphs.clear()
        self.recorder.forget()

    def _graph(self, inputs: tuple[Input, ...]) -> Graph | None:
        shapes = tuple(None if given is None else (given.shape, given.dtype) for given in inputs)
        if shapes not in self._graphs:
            if len(self._graphs) == MOST_GRAPHS:
                if not self._crowded:
                    tell(f"more than {MOST_GRAPHS} shapes of batches, further ones are not recorded")
                self._crowded = True
                return None
            graph = self._record(inputs)
            if graph is None:
                return None
            self._graphs[shapes] = graph
        return self._graphs[shapes]

    def _record(self, inputs: tuple[Input, ...]) -> Graph | None:
        buffers = [None if given is None else given.clone() for given in inputs]
        before = Snapshot(self.state())
        for _ in range(2):  # the first compiles code and makes the optimiser's state, the second is like all others
            self.recorder.warm_up(lambda: self.step(*buffers))
            before.restore(self.state())
        try:
            replay = self.recorder.record(lambda: self.step(*buffers))
        except RecordError as error:
            before.restore(self.state())
            self.stop(f"the step cannot be recorded ({error})")
            return None
        return Graph(buffers, replay)

    def _compare(self, graph: Graph, inputs: tuple[Input, ...]) -> None:
        """Call the step twice, then replay it; keep the result of the replay if it agrees."""
        before = Snapshot(self.state())
        try:
            self.step(*inputs)
            first = Snapshot(self.state())
            before.restore(self.state())
            self.step(*inputs)
            noise = difference(before, first, self.state())
        except torch.OutOfMemoryError:
            before.restore(self.state())
            self.stop("a graph and a step beside it do not fit into memory")
            self.recorder.tidy()
            self.step(*inputs)
            return
        before.restore(self.state())
        graph.replay()
        found = disagreement(difference(before, first, self.state()), noise, self.precision)
        graph.unchecked -= 1
        if found is not None:
            first.restore(self.state())
            self.stop(f"a replayed step is not the step ({found})")
        self.recorder.tidy()
