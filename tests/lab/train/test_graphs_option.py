"""When steps are recorded: what was asked for, what speaks against it."""

from types import SimpleNamespace

import pytest
import torch

from linattn.lab.train.captured_step import graphs_wanted
from linattn.lab.train.text.config import TextConfig
from linattn.support.options import OptionError


@pytest.mark.parametrize(
    ("processes", "accumulation", "reason"), [(2, 1, "2 processes"), (1, 4, "in 4 parts"), (1, 1, None)]
)
def test_what_speaks_against_graphs_is_told(processes, accumulation, reason, recwarn):
    gpu = SimpleNamespace(device=torch.device("cuda"), num_processes=processes)
    for graphs in (None, True):
        config = SimpleNamespace(graphs=graphs, accumulation=accumulation)
        assert graphs_wanted(config, gpu) == (reason is None)
    assert all(reason in str(w.message) for w in recwarn)
    assert bool(len(recwarn)) == (reason is not None)
    recwarn.clear()
    assert not graphs_wanted(SimpleNamespace(graphs=False, accumulation=accumulation), gpu)
    cpu = SimpleNamespace(device=torch.device("cpu"), num_processes=processes)
    assert not graphs_wanted(SimpleNamespace(graphs=None, accumulation=accumulation), cpu)
    assert len(recwarn) == 0, "what was not asked for needs no reason"


def test_graphs_are_an_option_of_gpus():
    TextConfig(graphs=False).check()
    with pytest.raises(OptionError, match=r"graphs: CUDA graphs need a GPU, and device is cpu"):
        TextConfig(graphs=True).check()
