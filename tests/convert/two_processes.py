"""What each of two processes does: both stages on its half of every batch. ``python -m ... FOLDER``"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from tests.convert.tiny import Counted, llama

from linattn.convert.finetune import FinetuneOptions, finetune
from linattn.convert.transfer import TransferOptions, transfer


def both_stages(folder=None, accelerator=None):
    """In fp64: only the order of sums differs between one process and two."""
    model = llama("lolcats", torch.float64).double()
    batches = Counted(rows=4)
    transfer(model, batches, TransferOptions(steps=4), folder and folder / "transfer", accelerator=accelerator)
    options = FinetuneOptions(steps=3, lr=1e-3)
    finetune(model, batches, options, folder and folder / "finetune", accelerator=accelerator)
    return {name: value.clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    from linattn.lab.train.accelerator import create_accelerator

    torch.set_num_threads(1)
    accelerator = create_accelerator(SimpleNamespace(device="cpu", precision="fp32"))
    assert accelerator.num_processes == 2
    folder = Path(sys.argv[1])
    torch.save(both_stages(folder, accelerator), folder / f"weights-{accelerator.process_index}.pt")
