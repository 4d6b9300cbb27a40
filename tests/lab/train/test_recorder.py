"""The recorder without a GPU: what it asks of CUDA, and in which order."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from linattn.lab.train.captured_step import Recorder, RecordError


def test_a_recording_that_breaks_off_leaves_the_device_as_it_was(monkeypatch):
    """torch's own way out of it stops half-way: stream, memory and generator are put right in this order."""
    said, stream = [], SimpleNamespace(wait_stream=lambda other: said.append("wait"))

    class BreaksOff:
        def __init__(self, graph, **options):
            said.append(options)

        def __enter__(self):
            pass

        def __exit__(self, *error):
            if error[0] is not None:
                raise RuntimeError("capture invalidated")

    def end(*given):
        said.append(("memory", *given))
        raise RuntimeError("not recording")

    generator = SimpleNamespace(clone_state=lambda: "spare", graphsafe_set_state=lambda state: said.append(state))
    stand_ins = {
        "Stream": lambda device: stream, "graph_pool_handle": lambda: (0, 1), "current_stream": lambda device: stream,
        "stream": nullcontext, "current_device": lambda: 0, "default_generators": [generator], "graph": BreaksOff,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: said.append("replay")),
        "set_stream": lambda given: said.append(given is stream), "synchronize": lambda device: said.append("sync"),
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    options = {"pool": (0, 1), "stream": stream, "capture_error_mode": "thread_local"}
    recorder = Recorder(torch.device("cuda"))
    recorder.warm_up(lambda: said.append("run"))
    recorder.record(lambda: said.append("run"))()
    assert said == ["wait", "run", "wait", options, "run", "replay"]
    said.clear()
    with pytest.raises(RecordError, match=r"ZeroDivisionError: .*by zero"):
        recorder.record(lambda: 1 // 0)
    assert said == [options, True, ("memory", 0, (0, 1)), "spare", "sync"]
