"""Both stages on a GPU, in bf16: they learn, and go on after a kill."""

import pytest
import torch
from tests.convert.tiny import Counted, held_out, llama

from linattn.convert.finetune import FinetuneOptions, finetune
from linattn.convert.transfer import TransferOptions, transfer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["still", "lolcats"])
def test_both_stages_learn_and_resume(method, tmp_path):
    first = TransferOptions(steps=30, lr=0.05, checkpoint_steps=10)
    second = FinetuneOptions(steps=20, lr=1e-2, checkpoint_steps=5)
    fixed = held_out()[0]

    def stages(model, stop=None):
        curves = transfer(model, Counted(4, stop=stop), first, tmp_path / "1", held_out=held_out())
        return curves, finetune(model, lambda step: fixed, second, tmp_path / "2")

    with pytest.raises(KeyboardInterrupt):
        stages(llama(method, torch.bfloat16).cuda(), stop=25)
    model = llama(method, torch.bfloat16).cuda()
    curves, losses = stages(model)
    assert all(curve.after < curve.before for curve in curves)
    assert losses[-1] < 0.8 * losses[0]
    again = llama(method, torch.bfloat16).cuda()
    assert stages(again, stop=0) == (curves, losses)  # all is read from the folder
    for name, value in again.state_dict().items():
        assert value.device.type == "cuda"
        assert torch.equal(value, model.state_dict()[name]), name
