"""Inputs of hybrid attention and its definition in plain loops: one sequence, one head, one token at a time."""

import math

import torch

from linattn.ops.hybrid.api import hybrid_attention, hybrid_attention_step, hybrid_attention_with_state
from linattn.ops.hybrid.types import SalientBudget

F64 = torch.float64
FORMS = ["reference", "recurrent", "chunked"]

# Each can fail for a reason of its own; windows and chunks are small, so that short sequences have many of them.
SETTINGS = {
    "sliding": {"window": 5},
    "wide_sliding": {"window": 21},
    "no_window": {"window": 0},
    "chunks": {"window": 4, "layout": "chunks"},
    "no_delay": {"window": 4, "layout": "chunks", "delay": 0},
    "two_delays": {"window": 3, "layout": "chunks", "delay": 2},
    "ratio": {"window": 4, "layout": "chunks", "budget": SalientBudget(1 / 4, 4)},
    "cap": {"window": 4, "layout": "chunks", "budget": SalientBudget(1 / 2, 4, cap=3, sinks=2)},
    "cap_no_delay": {"window": 4, "layout": "chunks", "delay": 0, "budget": SalientBudget(1 / 2, 4, cap=2)},
    "sliding_ratio": {"window": 7, "budget": SalientBudget(1 / 2, 4, sinks=3)},
    "sliding_cap": {"window": 10, "budget": SalientBudget(1 / 2, 4, cap=4, sinks=0)},
    "only_sinks": {"window": 4, "layout": "chunks", "budget": SalientBudget(0.0, 4, sinks=6)},
    "divergence": {"window": 4, "layout": "chunks", "budget": SalientBudget(1 / 4, 4, score="kl")},
    "largest": {"window": 4, "layout": "chunks", "budget": SalientBudget(1 / 2, 4, cap=3, reduce="max")},
    "largest_divergence": {"window": 7, "budget": SalientBudget(1 / 2, 4, cap=4, sinks=0, score="kl", reduce="max")},
    "one": {"window": 4, "layout": "chunks", "budget": SalientBudget(1 / 4, 4, cap=2), "units": "one"},
}


def make(T, *, B=2, H=4, H_kv=2, K=5, V=6, F=7, dtype=F64, seed=0, gate=False, scores=False):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype)

    inputs = {
        "q": 2 * draw(B, H, T, K), "k": draw(B, H_kv, T, K), "v": draw(B, H_kv, T, V),
        "features": (draw(B, H, T, F).exp(), draw(B, H_kv, T, F).exp()),
    }  # fmt: skip
    if gate:
        inputs["gate"] = draw(B, H, T, V).sigmoid()
    if scores:
        inputs["scores"] = draw(B, H_kv, T).round()  # many are equal: ties are decided too
    return inputs


def change(inputs, f):
    """``f`` of every tensor."""
    return {n: tuple(map(f, x)) if isinstance(x, tuple) else f(x) for n, x in inputs.items()}


def call(inputs, with_state=False, **options):
    op = hybrid_attention_with_state if with_state else hybrid_attention
    inputs = dict(inputs)
    return op(inputs.pop("q"), inputs.pop("k"), inputs.pop("v"), **inputs, **options)


def steps(inputs, state=None, **options):
    outputs = []
    for t in range(inputs["q"].shape[2]):
        now = change(inputs, lambda x, t=t: x[:, :, t])
        out = hybrid_attention_step(now.pop("q"), now.pop("k"), now.pop("v"), state, **now, **options)
        outputs.append(out.output)
        state = out.state
    return torch.stack(outputs, 2), state


def self_probability(q, k, t, window):
    """Mean over the group of log p_t, of one sequence and key head: ``q (G, T, K)``, ``k (T, K)``."""
    found = []
    for one in q:
        logits = [(one[t] @ k[i]).item() / math.sqrt(k.shape[1]) for i in range(max(0, t - window + 1), t + 1)]
        found.append(logits[-1] - math.log(sum(map(math.exp, logits))))
    return sum(found) / len(found)


def published_divergence(q, k, t, window, eps=1e-8):
    """Sum over the window of a log((a + eps) / (b + eps)), b without the token itself; of one head."""
    logits = [(q[t] @ k[i]).item() / math.sqrt(k.shape[1]) for i in range(max(0, t - window + 1), t + 1)]
    with_itself = [math.exp(x) for x in logits]
    without = [*with_itself[:-1], 0.0]
    a = [x / sum(with_itself) for x in with_itself]
    b = [x / sum(without) if sum(without) else 0.0 for x in without]
    return sum(x * math.log((x + eps) / (y + eps)) for x, y in zip(a, b, strict=True))


def budget_scores(q, k, budget):
    """As a budget says, of one sequence and key head: ``q (G, T, K)``, ``k (T, K)``."""
    reduce = max if budget.reduce == "max" else lambda values: sum(values) / len(values)
    if budget.score == "kl":
        return [reduce([published_divergence(one, k, t, budget.chunk) for one in q]) for t in range(len(k))]
    return [reduce([self_probability(one[None], k, t, budget.chunk) for one in q]) for t in range(len(k))]


def exact_sets(T, scores, *, window, layout="sliding", delay=1, budget=None):
    """For each query of one sequence and key head, the set of its exact keys; by what the words say."""
    sets, kept = [], []
    for t in range(T):
        if budget is not None and t and t % budget.chunk == 0:
            c = t // budget.chunk - 1 - (delay if layout == "chunks" else 0)
            if c >= 0:  # the choice among the tokens of chunk c counts from here
                tokens = range(c * budget.chunk, (c + 1) * budget.chunk)
                best = sorted(tokens, key=lambda i: (i >= budget.sinks, -scores[i], i))
                take = max(budget.per_chunk, sum(i < budget.sinks for i in tokens))
                kept = kept + best[:take]
                kept = sorted(kept, key=lambda i: (i >= budget.sinks, -scores[i], i))[: budget.cap]
        if window == 0:
            near = []
        elif layout == "sliding":
            near = range(max(0, t - window + 1), t + 1)
        else:
            near = range(max(0, (t // window - delay) * window), t + 1)
        sets.append({*near, *kept})
    return sets


def brute_force(inputs, *, window, layout="sliding", delay=1, budget=None, units="row_max", eps=1e-6):
    """The definition, number by number, for sequences without padding."""
    q, k, v, (phi, psi) = (inputs[n] for n in ("q", "k", "v", "features"))
    B, H, T, K = q.shape
    G = H // k.shape[1]
    output = torch.zeros(B, H, T, v.shape[3], dtype=F64)
    for b in range(B):
        for h in range(H):
            g = h // G
            scores = inputs["scores"][b, g].tolist() if "scores" in inputs else None
            if scores is None and budget is not None:
                group = q[b, g * G : (g + 1) * G]
                scores = budget_scores(group, k[b, g], budget)
            sets = exact_sets(T, scores, window=window, layout=layout, delay=delay, budget=budget)
            for t, exact in enumerate(sets):
                logits = {i: (q[b, h, t] @ k[b, g, i]).item() / math.sqrt(K) for i in exact}
                m = (max(logits.values()) if logits else 0.0) if units == "row_max" else 0.0
                above, below = torch.zeros(v.shape[3], dtype=F64), 0.0 if exact else eps
                gate = inputs["gate"][b, h, t] if "gate" in inputs else 1.0
                for i in range(t + 1):
                    if i in exact:
                        weight = math.exp(logits[i] - m)
                        above, below = above + weight * v[b, g, i], below + weight
                    else:
                        weight = (phi[b, h, t] @ psi[b, g, i]).item()
                        above, below = above + gate * weight * v[b, g, i], below + weight
                output[b, h, t] = above / below
    return output


def assert_same(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()))
