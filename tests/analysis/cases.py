"""Mechanisms of the registry in all their modes, for what must hold for any of them."""

import pytest

from linattn import list_mechanisms
from linattn.testing.cases import subject_of

# Weights that depend on the channel of v: two flows, and as many heads as channels.
BY_CHANNEL = {"pola", "pola_plus", "hydra"}


def options_of(name: str) -> dict[str, object]:
    """The angular mechanism's unit length and the norm of zeros are not linear in v; agents fewer than tokens."""
    own = {"angular": {"output_norm": "sum"}, "zeros": {"head_norm": False}, "agent": {"num_agents": 4}}
    return own.get(name, {})


def _all() -> list:
    cases = []
    for name in list_mechanisms():
        subject = subject_of(name, **options_of(name))
        for causal in subject.modes:
            for grouped in subject.groupings(causal):
                label = f"{name}-{'causal' if causal else 'bidirectional'}{'-grouped' if grouped else ''}"
                cases.append(pytest.param(subject, causal, grouped, id=label))
    return cases


CASES = _all()
EXACT = {"rtol": 0, "atol": 1e-10}
