"""Records the kernels that a function launches as a CUDA graph, which is launched as one."""

import gc
from collections.abc import Callable
from contextlib import suppress

import torch

Run = Callable[[], None]


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
