"""An attention whose scores do not depend on the input, and in which every token looks at itself alone."""

import torch
from torch import Tensor

from model import ModelConfig, rope_frequencies

LEAD = 120.0  # nats by which a spike should win


def make_spike(config: ModelConfig) -> tuple[tuple[Tensor, Tensor], float]:
    """Constant biases of q and k for the first element of every rotary pair, (head_dim / 2,) each, and the nats by
    which the token itself then wins over any other within max_position_embeddings.

    Where both are sqrt(w_i), RoPE makes the score at distance d equal to scale * sum_i w_i cos(d * f_i), highest at 0.
    Fast pairs tell neighbours apart, slow ones keep the rest from coming round together. With w_i = sqrt(f_i), the
    scores that lead by as much are a fifth to a half of what equal weights need, which leaves bfloat16 less to round.

    A softcap flattens everything far above itself. But the slowest pair hardly turns: with a negative weight it lowers
    all scores alike, here until the token itself stands at 3 caps, and any other at about -3.
    """
    frequencies = rope_frequencies(config).double()
    distances = torch.arange(config.max_position_embeddings, dtype=torch.float64)

    def scores(weights: Tensor) -> Tensor:  # at every distance; a pair at a time, since all at once are gigabytes
        return config.query_scale * sum(w * torch.cos(distances * f) for w, f in zip(weights, frequencies))

    def lead(s: Tensor) -> Tensor:
        return s[0] - s[1:].max()

    weights, cap = frequencies.sqrt(), config.attn_softcap
    if cap is None:
        weights *= LEAD / lead(scores(weights))
        s = scores(weights)
    else:
        weights[-1] = 0
        weights *= 6 * cap / lead(scores(weights))
        weights[-1] = 3 * cap / config.query_scale - weights.sum()
        s = cap * torch.tanh(scores(weights) / cap)
    q = weights.abs().sqrt()
    return (q, q * weights.sign()), lead(s).item()
