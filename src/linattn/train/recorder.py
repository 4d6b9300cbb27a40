"""CUDA graphs: what a function launches, recorded once and launched again as one."""

import gc
from collections.abc import Callable
from contextlib import suppress

import torch

Run = Callable[[], None]


class RecordError(RuntimeError):
    """Something in the function does not go into a graph; the message says what."""


class Recorder:
    """Graphs of one run. They share a stream and memory, as no two are ever replayed at the same time.

    Random numbers are those of the device's default generator, which PyTorch hands to a graph at each replay: a replay
    draws what the function itself would draw from the generator as it then is.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self.forget()

    def forget(self) -> None:
        """All graphs are gone, and with them their memory: the next ones need other memory."""
        self._memory = torch.cuda.graph_pool_handle()

    def tidy(self) -> None:
        """Give back what only trials needed: a graph keeps memory of its own, as much as a step takes."""
        torch.cuda.empty_cache()

    def warm_up(self, run: Run) -> None:
        """Run it where it will be recorded: what is made once (compiled code, workspaces) is not to be recorded."""
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            run()
        here.wait_stream(self._stream)

    def record(self, run: Run) -> Run:
        """What replays it; nothing of it is computed here. Raises ``RecordError`` and leaves the device usable."""
        here, number = torch.cuda.current_stream(self.device), torch.cuda.current_device()
        generator = torch.cuda.default_generators[number]
        spare = generator.clone_state()
        graph, cause = torch.cuda.CUDAGraph(), None
        gc.collect()  # what dies while a stream is recorded may free what CUDA does not let go of then
        try:
            # Only this thread is held to the rules: others make batches meanwhile and pin memory for them.
            mode = "thread_local"
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode=mode):
                try:
                    run()
                except Exception as error:
                    cause = error  # leaving the recording raises again, with less to say
                    raise
        except Exception as error:
            # Up to torch 2.11 at least nothing of this is done where ending a recording fails: the stream is still the
            # current one, memory is still taken from the graph's, and the generator would refuse the next seed.
            torch.cuda.set_stream(here)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(number, self._memory)
            generator.graphsafe_set_state(spare)
            torch.cuda.synchronize(self.device)
            first = cause or error
            words = " ".join(f"{type(first).__name__}: {first}".split())
            raise RecordError(words[:200]) from error
        return graph.replay
