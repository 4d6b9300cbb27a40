"""Through accelerate: several processes train like one."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.convert.two_processes import both_stages

ROOT = Path(__file__).parents[2]


def test_an_accelerator_of_one_process_changes_nothing():
    from linattn.lab.train.accelerator import create_accelerator

    accelerator = create_accelerator(SimpleNamespace(device="cpu", precision="fp32"))
    with_it, without = both_stages(accelerator=accelerator), both_stages()
    assert all(torch.equal(with_it[name], value) for name, value in without.items())


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}  # fmt: skip
    program = [sys.executable, "-m", "tests.convert.two_processes", str(tmp_path)]
    processes = [subprocess.Popen(program, cwd=ROOT, env={**common, "RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    first, second = (torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True) for rank in "01")
    for name, value in both_stages().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, rtol=1e-6, atol=1e-7)  # Adam divides by what was rounded
