"""A training step as a CUDA graph, for small models, whose steps take longer to launch than to compute."""

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], None]
State = Mapping[str, Sequence[Tensor]]
"""All tensors that a step changes, by kind; among them the meter's ``sums``."""

# A graph for each of so many shapes of batches. Further shapes are rare (a smaller last batch), or without end.
MOST_GRAPHS = 4
# The first replay has the inputs, the rate and the random numbers of the recording itself: values that are frozen into
# the graph by mistake show only in the second one.
CHECKED_REPLAYS = 2
# Largest difference that different orders of summation can make, as a share of what a step changes. It is not small:
# Adam's first steps are signs of gradients, and where one is nearly zero, rounding can reverse the whole step.
TOLERANCE = {"fp32": 1e-2, "bf16": 0.15}


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


def recorded(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """Replays of ``call`` as a CUDA graph, whose outputs keep their memory; None if it cannot be recorded."""
    recorder, kept = Recorder(device), list[object]()

    def run() -> None:
        kept[:] = [call()]

    for _ in range(2):  # what libraries do only once must not be recorded
        recorder.warm_up(run)
    try:
        replay = recorder.record(run)
    except RecordError:
        return None
    return lambda: (replay(), kept)


class Graph:
    """A recorded step: it reads its inputs from ``buffers``."""

    def __init__(self, inputs: tuple[Tensor | None, ...]) -> None:
        self.buffers = [None if given is None else given.clone() for given in inputs]
        self.replay: Run
        self.unchecked = CHECKED_REPLAYS

    def load(self, inputs: tuple[Tensor | None, ...]) -> None:
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

    ``step`` changes the tensors that ``state`` returns, and nothing else that outlives it. The ``precision`` of the
    config decides how much difference rounding may explain.
    """

    def __init__(
        self, step: Callable[..., None], state: Callable[[], State], precision: str, device: torch.device
    ) -> None:
        self.step, self.state, self.tolerance = step, state, TOLERANCE[precision]
        self.recorder: Any = Recorder(device)
        self.stopped: str | None = None
        """Why steps are no longer replayed."""
        self._graphs: dict[tuple[Any, ...], Graph] = {}

    def __call__(self, *inputs: Tensor | None) -> None:
        graph = self._graph(inputs) if self.stopped is None else None
        if graph is None:
            self.step(*inputs)
            return
        graph.load(inputs)
        if graph.unchecked:
            self._compare(graph, inputs)
        else:
            graph.replay()

    @property
    def status(self) -> str:
        return "replayed" if self.stopped is None else f"stopped: {self.stopped}"

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

    def _graph(self, inputs: tuple[Tensor | None, ...]) -> Graph | None:
        shapes = tuple(None if given is None else (given.shape, given.dtype) for given in inputs)
        if shapes in self._graphs:
            return self._graphs[shapes]
        if len(self._graphs) == MOST_GRAPHS:
            tell(f"more than {MOST_GRAPHS} shapes of batches, further ones are not recorded")
            return None
        graph, before = Graph(inputs), Snapshot(self.state())
        for _ in range(2):  # the first compiles code and makes the optimiser's state, the second is like all others
            self.recorder.warm_up(lambda: self.step(*graph.buffers))
            before.restore(self.state())
        try:
            graph.replay = self.recorder.record(lambda: self.step(*graph.buffers))
        except RecordError as error:
            before.restore(self.state())
            self.stop(f"the step cannot be recorded ({error})")
            return None
        self._graphs[shapes] = graph
        return graph

    def _compare(self, graph: Graph, inputs: tuple[Tensor | None, ...]) -> None:
        """Call the step, then replay it from the same state; keep the result of the replay if it agrees."""
        before = Snapshot(self.state())
        self.step(*inputs)
        first = Snapshot(self.state())
        before.restore(self.state())
        graph.replay()
        graph.unchecked -= 1
        for kind, share in first.difference(before, self.state()).items():
            if not share <= self.tolerance:  # NaN fails too
                first.restore(self.state())
                self.stop(f"a replayed step is not the step: {kind} differ by {share:.1e} of what a step changes")
                break
        self.recorder.tidy()


class Snapshot:
    """A copy of a state and of the random generators, from which a step can be taken again."""

    def __init__(self, state: State) -> None:
        self.values = {kind: [value.detach().clone() for value in values] for kind, values in state.items()}
        self.device = state["sums"][0].device
        self._host = torch.get_rng_state()
        self._own = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None

    def of(self, kind: str, like: Sequence[Tensor]) -> list[Tensor]:
        """The values of a kind; moments that did not exist yet are zero, with which they begin."""
        return self.values.get(kind) or [torch.zeros_like(value) for value in like]

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Write the copy back, in place."""
        for kind, values in state.items():
            for value, kept in zip(values, self.of(kind, values), strict=True):
                value.grad = None  # an interrupted step may have left gradients
                value.copy_(kept)
        torch.set_rng_state(self._host)
        if self._own is not None:
            torch.cuda.set_rng_state(self._own, self.device)

    @torch.no_grad()
    def difference(self, before: "Snapshot", state: State) -> dict[str, float]:
        """How far a state is from this one, by kind of tensor, as a share of what has changed since ``before``."""
        shares = {}
        for kind, values in state.items():
            norms = [torch.zeros(2, dtype=torch.float64, device=self.device)]
            for value, new, old in zip(values, self.values[kind], before.of(kind, values), strict=True):
                norms.append(torch.stack([(value.double() - new).norm(), (new.double() - old).norm()]))
            apart, changed = torch.stack(norms).norm(dim=0).tolist()
            shares[kind] = apart / changed if changed else apart
        return shares
