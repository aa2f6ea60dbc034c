"""What a model costs, counted from its config and its alphas alone: parameters, FLOPs, KV-cache bytes.

`alphas` maps every pruned layer to its alpha; a layer that is not in it is dense. Counting convention:

    FLOPs               2 x multiply-adds of the matrix products; norms, RoPE, softmax and activations are left out
    attention scores    every query with every key it may see: T squared / 2 when causal, about T x W with a window
    head                on the last position for a prefill, on every position for perplexity
    linear parameters   the seven projections of every layer with their biases: what HARP removes from
"""

from collections.abc import Mapping

from model import ModelConfig

Alphas = Mapping[int, float]
DENSE: Alphas = {}


def layer_parameters(config: ModelConfig, alpha: float | None, folded: bool = True, biases: bool = True) -> int:
    """Parameters of one layer's projections. `alpha` None: dense; 0: no attention left. `folded`: o_proj reads each
    value head once (`model.Attention.fold_`) instead of once per query head."""
    D, I = config.hidden_size, config.intermediate_size
    query, value = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    mlp = 3 * D * I + biases * config.mlp_bias * (2 * I + D)
    if alpha == 0:
        return mlp
    if alpha is None:
        weights, qkv_bias = D * (query + 2 * value) + query * D, query + 2 * value
    else:
        weights, qkv_bias = D * value + (value if folded else query) * D, value
    return mlp + weights + biases * (config.qkv_bias * qkv_bias + config.o_bias * D)


def linear_parameters(config: ModelConfig, alphas: Alphas = DENSE, folded: bool = True) -> int:
    """Parameters of the seven projections of all layers."""
    return sum(layer_parameters(config, alphas.get(layer), folded) for layer in range(config.n_layers))


def parameters(config: ModelConfig, alphas: Alphas = DENSE, folded: bool = True) -> int:
    """All parameters: projections, norms, embedding, head."""
    D, V = config.hidden_size, config.vocab_size
    norms = D  # the final one
    for layer in range(config.n_layers):
        sublayers = 1 if alphas.get(layer) == 0 else 2
        norms += sublayers * (2 if config.post_norms else 1) * D
    return linear_parameters(config, alphas, folded) + norms + V * D * (1 if config.tied else 2)


def seen_pairs(tokens: int, window: int | None) -> float:
    """Query-key pairs of a causal layer: T^2 / 2, less what lies before the window."""
    beyond = max(0, tokens - (window or tokens))
    return (tokens**2 - beyond**2) / 2


def layer_flops(config: ModelConfig, layer: int, tokens: int, alpha: float | None, folded: bool = True) -> float:
    """FLOPs of one layer on one sequence of `tokens`."""
    flops = 2.0 * tokens * layer_parameters(config, alpha, folded, biases=False)
    if alpha is None:  # q.k and weights.v
        flops += 4 * config.n_heads * config.head_dim * seen_pairs(tokens, config.sliding_windows[layer])
    return flops


def head_flops(config: ModelConfig, positions: int) -> float:
    """FLOPs of the logits of `positions` positions."""
    return 2.0 * positions * config.hidden_size * config.vocab_size


def prefill_flops(config: ModelConfig, tokens: int, alphas: Alphas = DENSE, folded: bool = True) -> float:
    """FLOPs from a prompt of `tokens` to the logits of its last position."""
    layers = sum(layer_flops(config, layer, tokens, alphas.get(layer), folded) for layer in range(config.n_layers))
    return layers + head_flops(config, 1)


def trial_flops(config: ModelConfig, layer: int, tokens: int, positions: int, alphas: Alphas) -> float:
    """FLOPs of trying one alpha at `layer` (`harp.search`): its MLP, all layers above, the head on `positions`."""
    above = sum(layer_flops(config, i, tokens, alphas.get(i), folded=False) for i in range(layer + 1, config.n_layers))
    return layer_flops(config, layer, tokens, alpha=0) + above + head_flops(config, positions)


def kv_bytes(config: ModelConfig, tokens: int, alphas: Alphas = DENSE, bytes_per_value: int = 2) -> int:
    """Bytes of keys and values that decoding must keep of `tokens`; a window layer needs its window, a pruned one
    nothing."""
    kept = sum(
        min(tokens, config.sliding_windows[layer] or tokens) for layer in range(config.n_layers) if layer not in alphas
    )
    return 2 * config.n_kv_heads * config.head_dim * bytes_per_value * kept
