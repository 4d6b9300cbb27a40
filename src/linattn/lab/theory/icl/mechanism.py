"""Any registered mechanism as a one-layer model of this laboratory."""

import torch
from torch import Tensor, nn

from linattn.lab.theory.icl.models import draw, project
from linattn.mechanisms.registry import create_mechanism

MULTIPLE = 8  # multiple of head widths that every mechanism accepts


class MechanismStack(nn.Module):
    """``f = n r^T attend(Z Wq, Z Wk, Z Wv)`` at the last token, with one head of a causal mechanism.

    Mechanisms run one after the other, each on the tasks of its model, so that nothing leaks between models; this is
    slower than the other stacks. Tokens that are zero are padding and are masked. Most mechanisms return a mean over
    the examples, which times n is the sum that the other stacks return.
    """

    def __init__(self, name: str, models: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        head = -(-width // MULTIPLE) * MULTIPLE
        self.query, self.key, self.value = (
            nn.Parameter(draw((models, width, head), width, generator)) for _ in range(3)
        )
        self.read_out = nn.Parameter(draw((models, 1, head), head, generator))
        with torch.random.fork_rng():
            torch.manual_seed(generator.initial_seed())
            made = [
                create_mechanism(name, num_heads=1, head_dim=head, causal=True, input_dim=width) for _ in range(models)
            ]
        self.mechanisms = nn.ModuleList(made).to(generator.device)

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = (project(tokens, weight).unsqueeze(2) for weight in (self.query, self.key, self.value))
        real = tokens.detach().abs().sum(-1) > 0  # (M, B, T)
        outputs = [
            mechanism(q[i], k[i], v[i], key_mask=real[i], x=tokens[i])[:, 0, -1]
            for i, mechanism in enumerate(self.mechanisms)
        ]
        return (torch.stack(outputs) * self.read_out).sum(-1) * (real.sum(-1) - 1)
