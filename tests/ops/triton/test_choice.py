"""Who gets kernels: those who name them and whose call they serve; everyone else is told why not."""

import pytest
import torch

from linattn import explain, linear_attention, linear_attention_with_state
from linattn.ops.feature_maps import EluPlusOne
from ops.triton.device import DEVICE


def inputs(dtype=torch.float32, width=16):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, 40, width, generator=generator).to(DEVICE, dtype) for _ in range(3)]


def test_auto_takes_what_is_proved():
    assert explain(*inputs()).impl == "chunked"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"causal": True}, "causal or decay"),
        ({"log_decay": torch.tensor([-0.1, -0.2], device=DEVICE)}, "causal or decay"),
    ],
)
def test_what_has_no_kernel_is_refused_with_the_reason(options, reason):
    with pytest.raises(ValueError, match=reason):
        linear_attention(*inputs(), impl="triton", **options)


def test_widths_and_dtypes_that_kernels_do_not_take():
    with pytest.raises(ValueError, match="up to 256 features"):
        linear_attention(*inputs(width=300), impl="triton")
    with pytest.raises(ValueError, match=r"float32, bfloat16 and float16, got torch\.float64"):
        linear_attention(*inputs(torch.float64), impl="triton")


def test_named_kernels_give_what_the_reference_gives_with_masks_states_and_norm_features():
    q, k, v = inputs()
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE) > 0.3
    broken = k.masked_fill(~mask[:, None, :, None], torch.nan)
    found, expected = (
        linear_attention(q, x, v, feature_map=EluPlusOne(), key_mask=mask, impl=impl)
        for x, impl in ((broken, "triton"), (k, "reference"))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    options = {"norm_features": (q.relu() + 0.1, k.relu() + 0.1), "key_mask": mask}
    one, other = (linear_attention_with_state(q, k, v, impl=impl, **options) for impl in ("triton", "reference"))
    again, other_again = (
        linear_attention_with_state(q, k, v, impl=impl, initial_state=state, **options)
        for impl, state in (("triton", one.state), ("reference", other.state))
    )
    for a, b in zip((one.output, *one.state, again.output, *again.state),
                    (other.output, *other.state, other_again.output, *other_again.state), strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
