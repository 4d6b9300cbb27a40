"""Hosts of the laboratory inside recorded steps: nothing in a training step of theirs asks the host for a number."""

import pytest
import torch
from linattn.lab.theory.synth.budgets import GPU_HOST
from linattn.lab.train.text.network import TextNetwork
from tests.lab.train.test_captured_hosts import HostAsks

from linattn.lab.tasks.text import Sequences, text_task
from linattn.lab.train.text.hosts import HostOptions, create_host


@pytest.mark.parametrize("canon", [None, "ABCD"])
@pytest.mark.parametrize(
    ("mechanism", "rotary"), [("softmax", 1.0), ("softmax", 0.0), ("gated", 0.0), ("mlstm", 0.0), ("zeros", 0.0)]
)
def test_a_step_can_be_recorded(mechanism, rotary, canon):
    task = text_task("depo", letters=8, word_length=(1, 1), nodes=4, hops=2, length=32)
    host = HostOptions(GPU_HOST["size"], mechanism, canon, width=64, depth=1, heads=GPU_HOST["heads"], rotary=rotary)
    network = TextNetwork(create_host(host, task, 0), task).to("meta").train()
    tokens, rows = (torch.zeros(shape, dtype=torch.int64, device="meta") for shape in ((2, 32), (12,)))
    with HostAsks() as watch:
        loss, _ = network(Sequences(tokens, tokens, None), rows)
        loss.backward()
    assert watch.heard == []
    assert all(parameter.grad is not None for parameter in network.parameters())
