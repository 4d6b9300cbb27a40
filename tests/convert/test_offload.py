"""A converted model whose weights accelerate keeps elsewhere between calls."""

import pytest
import torch
from tests.convert.causal import converted, padded
from torch.testing import assert_close

from linattn.convert.convert import set_mode

accelerate = pytest.importorskip("accelerate")
STILL = {"window": 4, "ratio": 1 / 4, "sinks": 1, "gate": True}
SETTINGS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
KINDS = [
    ("still", STILL),
    ("hedgehog", {}),
    ("features", {"mechanism": "mirror"}),
    ("features", {"mechanism": "gated"}),
]


@pytest.mark.parametrize(("method", "options"), KINDS, ids=str)
@torch.no_grad()
def test_it_gives_what_it_gave(method, options, tmp_path):
    model, (ids, mask) = converted(method, **options), padded(11, 6)
    text = model.generate(ids, attention_mask=mask, **SETTINGS)
    logits = {}
    for mode in ("student", "teacher"):
        set_mode(model, mode)
        logits[mode] = model(ids, attention_mask=mask).logits
    if method == "still":
        accelerate.disk_offload(model, tmp_path, torch.device("cpu"))
    else:
        accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    for mode in ("teacher", "student"):
        set_mode(model, mode)
        assert_close(model(ids, attention_mask=mask).logits, logits[mode], rtol=0, atol=0)
    assert torch.equal(model.generate(ids, attention_mask=mask, **SETTINGS), text)
    assert all(p.is_meta for p in model.parameters())
