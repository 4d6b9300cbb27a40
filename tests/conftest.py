"""Several test processes share the cores: each computes with one thread, or they would wait for one another."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
