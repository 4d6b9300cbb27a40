"""Poisoned memory is poisoned, and only as long as it should be."""

import pytest
import torch

from linattn.testing import poisoned_allocations


def _fresh() -> dict[str, torch.Tensor]:
    like = torch.ones(3)
    return {
        "empty": torch.empty(3),
        "empty_like": torch.empty_like(like),
        "new_empty": like.new_empty(3),
        "empty_strided": torch.empty_strided((3,), (1,)),
        "bfloat16": torch.empty(3, dtype=torch.bfloat16),
    }


def test_fresh_memory_is_nan_inside() -> None:
    with poisoned_allocations():
        inside = _fresh()
    assert all(t.isnan().all() for t in inside.values()), inside


def test_the_settings_come_back_even_after_an_error() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="on purpose"), poisoned_allocations():
        raise RuntimeError("on purpose")
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)


def test_a_custom_operator_gets_poisoned_memory_too() -> None:
    @torch.library.custom_op("linattn_tests::leaves_memory_unwritten", mutates_args=())
    def leaves_memory_unwritten(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    with poisoned_allocations():
        assert leaves_memory_unwritten(torch.ones(4)).isnan().all()
