"""What every adapter must pass, on tiny random models in fp64: what differs is wrong, not rounded."""

import copy

import torch
from tests.convert.causal import CLOSE, padded
from torch.testing import assert_close

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
MECHANISMS = ({"mechanism": "elu"}, {"mechanism": "mirror", "reflections": 2})


def build(name, **config):
    """A model of transformers; dropout is on in its config and off in eval mode."""
    import transformers

    family = next(
        end for end in ("LMHeadModel", "ForCausalLM", "ForImageClassification", "Model") if name.endswith(end)
    )
    torch.manual_seed(0)
    own = getattr(transformers, name.removesuffix(family) + "Config")(**(SIZES | config))
    return getattr(transformers, name)(own).double().eval()


def converted(model, method, **options):
    """A converted copy."""
    from linattn.convert.adapters import find_adapter
    from linattn.convert.convert import convert
    from linattn.convert.plan import plan

    model = copy.deepcopy(model)
    shapes = [site.shape for site in find_adapter(model).sites(model)]
    convert(model, plan(method, shapes, **options))
    return model.double()  # the new part is in fp32


def check_parts(model, names, shape):
    """Where the attention is, its shape, and that the projections to train are parts of it."""
    from linattn.convert.adapters import find_adapter

    adapter = find_adapter(model)
    sites = adapter.sites(model)
    assert [site.name for site in sites] == names
    assert [site.layer_idx for site in sites] == list(range(len(names)))
    assert all(site.why_not is None and site.shape == shape for site in sites)
    for site in sites:
        attention = model.get_submodule(site.name)
        assert all(attention.get_submodule(name).weight.ndim == 2 for name in adapter.projections)


def check_teacher(model, call):
    """In teacher mode a converted model is the one it was; ``call`` gives the outputs that count."""
    from linattn.convert.convert import linearized_layers, set_mode

    student = converted(model, "features", mechanism="elu")
    assert len(linearized_layers(student)) == 2
    set_mode(student, "teacher")
    assert_close(call(student), call(model), **CLOSE)


def real_logits(*lengths):
    """Calls a causal model with rows left-padded, and picks the logits of real tokens."""
    ids, mask = padded(*lengths)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def call(model):
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]

    return call


def check_generation(student):
    """Greedy decoding of a left-padded batch is that of its rows one by one, and a step is what a prefill gives."""
    new = 6
    student.generation_config.eos_token_id = None
    ids, mask = padded(9, 5)
    options = {"max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True, "output_logits": True,
               "pad_token_id": 0}  # fmt: skip
    together = student.generate(ids, attention_mask=mask, **options)
    assert together.sequences.shape == (2, 9 + new)
    full = torch.cat([mask, mask.new_ones(2, new)], dim=1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    prefill = student(together.sequences, attention_mask=full, position_ids=positions, use_cache=False).logits
    steps = torch.stack(together.logits, 1)
    assert_close(steps, prefill[:, 8:-1].float(), rtol=1e-5, atol=1e-5)  # generate keeps logits in fp32
    for i, row in enumerate((ids[0], ids[1, 4:])):
        alone = student.generate(row[None], **options)
        assert torch.equal(alone.sequences[0, len(row) :], together.sequences[i, 9:])
        assert_close(torch.stack(alone.logits, 1)[0], steps[i], rtol=1e-5, atol=1e-5)
