"""Of the whole suite: threads, and where Triton's kernels run."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several test processes share the cores: each computes with one thread, or they would wait for one another.
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads it when it is imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
