"""Accelerate may keep the weights elsewhere between calls, also those that decoding reads outside of a forward."""

import pytest
import torch

from models.language.small import build, draw

pytest.importorskip("transformers", reason="the extra hf is not installed")
accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("mechanism", ["gated", ["taylor", "zeros_softmax"]], ids=str)
def test_an_offloaded_model_reads_and_decodes(mechanism):
    model, ids = build(mechanism=mechanism, canon="ABCD", attention_gate="silu"), draw()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    logits, text = model(ids, use_cache=False).logits, model.generate(ids, **options)
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.model.layers[0].attn.qkv.weight.is_meta
    torch.testing.assert_close(model(ids, use_cache=False).logits, logits, rtol=0, atol=0)
    assert torch.equal(model.generate(ids, **options), text)
    assert all(p.is_meta for p in model.parameters())
