"""An attention whose scores do not depend on the input, and in which every token looks at itself alone."""

import torch
from torch import Tensor

from model import ModelConfig, rope_frequencies

LEAD = 120.0  # nats by which a spike should win


def make_spike(config: ModelConfig) -> tuple[tuple[Tensor, Tensor], float]:
    """Constant biases of q and k for the first element of every rotary pair, (head_dim / 2,) each, and the nats by
    which the token itself then wins over any other within max_position_embeddings, in bfloat16.

    Where both are sqrt(w_i), RoPE makes the score at distance d equal to scale * sum_i w_i cos(d * f_i), highest at 0.
    Fast pairs tell neighbours apart, slow ones keep the rest from coming round together. With w_i = sqrt(f_i), the
    scores that lead by as much are a fifth to a half of what equal weights need.

    Still they may be so large that bfloat16 rounds the lead away, and a softcap flattens all that is far above itself.
    But the slowest pair hardly turns: with a negative weight it lowers all scores alike, until the token itself stands
    above 0 by half the lead and the others below. Not where the context is long enough for it to turn, so try both.
    """
    return max((spike_of(config, lowered) for lowered in (False, True)), key=lambda spike_and_lead: spike_and_lead[1])


def spike_of(config: ModelConfig, lowered: bool) -> tuple[tuple[Tensor, Tensor], float]:
    frequencies, cap = rope_frequencies(config).double(), config.attn_softcap
    distances = torch.arange(config.max_position_embeddings, dtype=torch.float64)

    def scores(weights: Tensor) -> Tensor:  # unscaled; a pair at a time, since all at once are gigabytes
        return sum(weight * torch.cos(distances * frequency) for weight, frequency in zip(weights, frequencies))

    def lead(s: Tensor) -> float:
        return (s[0] - s[1:].max()).item()

    wanted = (LEAD if cap is None else 6 * cap) / config.query_scale
    weights = frequencies.sqrt()
    if lowered:
        weights[-1] = 0
    weights *= wanted / lead(scores(weights))
    if lowered:
        weights[-1] = wanted / 2 - weights.sum()
    s = config.query_scale * scores(weights).bfloat16().double()
    s = s if cap is None else cap * torch.tanh(s / cap)
    q = weights.abs().sqrt()
    return (q, q * weights.sign()), lead(s.bfloat16().double())
