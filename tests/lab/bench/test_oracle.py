from dataclasses import replace

import pytest
import torch
from linattn.lab.bench.inputs import make_inputs
from linattn.lab.bench.passes import grad_like
from linattn.lab.bench.settings import DECAYS, BenchConfig
from linattn.lab.bench.token_loop import token_loop

from linattn.lab.bench import oracle as oracle_module
from linattn.lab.bench.contenders import make_contenders
from linattn.lab.bench.oracle import Oracle


def setup(length=96, **options):
    config = BenchConfig(**{"heads": 2, "head_dim": 8, "impl": ("reference", "recurrent", "chunked"), **options})
    config.check()
    inputs = make_inputs(config, length)
    oracle = Oracle(inputs, grad_like(inputs, config.seed), config.causal, config.backward)
    return {c.name: c for c in make_contenders(config)}, oracle


@pytest.fixture
def nothing_long_fits(monkeypatch):
    """Let the quadratic form serve the 64 tokens of the probe, and no more."""
    monkeypatch.setattr(oracle_module, "MOST_BYTES", 1)
    monkeypatch.setattr(oracle_module, "PIECE", 40)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_all_forms_are_right_against_the_quadratic_form(causal, decay):
    contenders, oracle = setup(causal=causal, decay=decay)
    for contender in contenders.values():
        verdict = oracle.check(contender, backward=True)
        assert verdict.ok, verdict
        assert verdict.against == "fp64"


@pytest.mark.parametrize(
    ("options", "against"),
    [
        ({"causal": True}, "fp64 in pieces of 40"),
        ({"causal": True, "decay": "channel"}, "fp64 in pieces of 40"),
        ({"causal": False}, "fp64 at 64 queries"),
        ({"causal": False, "decay": "token"}, "fp64 chunked"),
    ],
)
@pytest.mark.usefixtures("nothing_long_fits")
def test_long_sequences_are_checked_otherwise_and_say_how(options, against):
    contenders, oracle = setup(length=150, **options)
    for name in ("recurrent", "chunked"):
        verdict = oracle.check(contenders[name], backward=True)
        assert (verdict.ok, verdict.against) == (True, against), verdict
    verdict = oracle.check(contenders["sdpa"], backward=True)
    queries = 64 if not options["causal"] else 64 + sum(round(i * 149 / 63) > 63 for i in range(64))
    assert (verdict.ok, verdict.against) == (True, f"fp64 at {queries} queries"), verdict


@pytest.mark.usefixtures("nothing_long_fits")
def test_a_function_without_state_is_checked_on_its_first_tokens():
    contenders, oracle = setup(length=150)
    chunked = contenders["chunked"]
    stateless = replace(chunked, function=replace(chunked.function, with_state=None))
    verdict = oracle.check(stateless, backward=True)
    assert (verdict.ok, verdict.against) == (True, "fp64, first 64 tokens")


@pytest.mark.parametrize("where", [0, 75, 149])
@pytest.mark.usefixtures("nothing_long_fits")
def test_one_wrong_token_of_a_long_sequence_is_found(where):
    contenders, oracle = setup(length=150)
    good = contenders["chunked"]

    def off_at_one_token(inputs):
        output = good.run(inputs).clone()
        output[0, 0, where, 0] += 1e-4
        return output

    verdict = oracle.check(replace(good, run=off_at_one_token), backward=False)
    assert not verdict.ok
    assert verdict.worst == "output"
    largest = good.run(oracle.inputs.to(torch.float64)).abs().max().item()
    assert verdict.error == pytest.approx(1e-4 / largest, rel=0.05)


def test_a_wrong_gradient_is_found_though_values_are_right():
    contenders, oracle = setup()
    good = contenders["chunked"]

    def forgets_a_gradient(inputs):
        half = inputs.phi_k.detach() * 0.5 + inputs.phi_k * 0.5
        return good.run(replace(inputs, phi_k=half))

    wrong = replace(good, run=forgets_a_gradient)
    assert oracle.check(wrong, backward=False).ok
    verdict = oracle.check(wrong, backward=True)
    assert (verdict.ok, verdict.worst) == (False, "gradient of phi_k")


def test_nan_is_wrong():
    contenders, oracle = setup()
    wrong = replace(contenders["chunked"], run=lambda inputs: inputs.v * float("nan"))
    assert not oracle.check(wrong, backward=False).ok


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_plain_token_loop_is_linear_attention(causal, decay):
    # It sets a budget, so an error in it would hide errors elsewhere.
    contenders, oracle = setup(causal=causal, decay=decay, dtype="float64")
    expected = contenders["reference"].run(oracle.inputs)
    torch.testing.assert_close(token_loop(causal, oracle.inputs), expected, rtol=1e-12, atol=1e-12)


def test_mechanisms_are_checked_with_their_own_parameters_and_input():
    contenders, oracle = setup(impl=(), mechanisms=("elu", "relu"))
    for name in ("elu", "relu"):
        assert oracle.check(contenders[name], backward=True).ok
