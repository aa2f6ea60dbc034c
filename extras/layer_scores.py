"""What every layer's attention does, and what it costs to replace it by V·O: the scores that layers can be picked by.

    A   what attention adds to the residual stream h: Post(Attn(Norm(h)))
    U   what V·O would add: Post(O(V(Norm(h))))

All of them are taken on the dense model. `python -m extras.baselines` compares them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eval_ppl import Window, advance, embed, score
from model import Block, Rope, Transformer, attend, repeat_kv, rotate

Updates = list[Tensor]  # (1, T, D) for every window


@torch.inference_mode()
def attention_updates(
    model: Transformer, windows: Sequence[Window], layers: Iterable[int]
) -> Iterator[tuple[int, Updates, Updates, Updates]]:
    """Run the model and stop at each of `layers`, from the bottom up: (layer, its inputs h, A, U)."""
    hiddens, below = embed(model, windows), 0
    for layer in sorted(layers):
        hiddens = advance(model, hiddens, range(below, layer))
        block, below = model.blocks[layer], layer
        attention = [block.attention_update(h, model.rope(h)) for h in hiddens]
        yield layer, hiddens, attention, [block.vo_update(h) for h in hiddens]


def least_squares_alpha(attention: Updates, value_path: Updates) -> float:
    """The alpha that brings alpha * U closest to A: <A, U> / <U, U>, or 0 where they point apart."""
    dot = sum((a * u).sum(dtype=torch.float64).item() for a, u in zip(attention, value_path))
    square = sum((u * u).sum(dtype=torch.float64).item() for u in value_path)
    return max(0.0, dot / square) if square else 0.0


@torch.inference_mode()
def layer_costs(
    model: Transformer,
    windows: Sequence[Window],
    layers: Iterable[int] | None = None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> dict[int, tuple[float, float]]:
    """Layer -> (alpha, perplexity) with that layer alone pruned, at its least-squares alpha. One trial for each, where
    a search would take eleven. `on_layer(layer)` hears of progress."""
    costs, n_layers = {}, model.config.n_layers
    for layer, hiddens, attention, updates in attention_updates(
        model, windows, range(n_layers) if layers is None else layers
    ):
        alpha = least_squares_alpha(attention, updates)
        outputs = [model.blocks[layer].add_mlp(h + alpha * u) for h, u in zip(hiddens, updates)]
        ppl = score(model, advance(model, outputs, range(layer + 1, n_layers)), windows).ppl
        costs[layer] = alpha, ppl if math.isfinite(ppl) else math.inf
        on_layer(layer)
    return costs


def cheapest(costs: dict[int, tuple[float, float]], k: int) -> list[int]:
    """The k layers that cost least when they alone are pruned, cheapest first."""
    return sorted(costs, key=lambda layer: costs[layer][1])[:k]


def fisher_scores(model: Transformer, windows: Sequence[Window]) -> list[tuple[float, float]]:
    """For every layer, two second-order scores of what pruning it does to the mean NLL L of a window, with mean squared
    gradients in place of the curvature (the empirical Fisher).

    Without queries and keys: 1/2 sum of w^2 * mean of (dL/dw)^2 over their weights w, our reading of the paper's
    "Hessian". It asks what happens at w = 0, which is uniform attention. With V·O at the least-squares alpha:
    1/2 mean of (g . (alpha * U - A))^2 over tokens, g being dL/dh after attention.
    """
    weights = [weight for block in model.blocks for weight in (block.attn.q_proj.weight, block.attn.k_proj.weight)]
    without, gradients = torch.zeros(len(weights)), []  # gradients: (layers, T, D) for every window
    model.requires_grad_(True)
    for window in windows:
        after_attention: list[Tensor] = []  # h + A, (1, T, D) for every layer: what the norm before each MLP reads
        hooks = [
            block.mlp_norm.register_forward_pre_hook(lambda _, inputs, kept=after_attention: kept.append(inputs[0]))
            for block in model.blocks
        ]
        with torch.enable_grad():
            loss = F.cross_entropy(model(window.ids[None])[0, :-1].float(), window.ids[1:].to(model.device))
        for hook in hooks:
            hook.remove()
        found = torch.autograd.grad(loss, [*weights, *after_attention])
        squares = [(w.detach() * dw).square().sum() for w, dw in zip(weights, found)]
        without += torch.stack(squares).cpu() / 2 / len(windows)
        gradients.append(found[len(weights) :])
    scores = []
    for layer, _, attention, updates in attention_updates(model, windows, range(len(model.blocks))):
        alpha = least_squares_alpha(attention, updates)
        rises = [(g[layer] * (alpha * u - a)).sum(-1) for g, a, u in zip(gradients, attention, updates)]  # (1, T)
        with_vo = torch.cat(rises, dim=1).square().mean().item() / 2
        scores.append((without[2 * layer : 2 * layer + 2].sum().item(), with_vo))
    return scores


# ------------------------------------------------------------------------------------------------ looking at a layer


def attention_weights(block: Block, h: Tensor, rope: Rope) -> Tensor:
    """A dense block's softmax weights, (B, n_heads, T, T), for its input h, (B, T, D).

    Attention returns weighted sums of values. If value number t is the t-th unit vector, the sum is the weights.
    """
    attn, x = block.attn, block.attn_norm(h)
    q, k = rotate(attn.heads(attn.q_proj(x)), rope), rotate(attn.heads(attn.k_proj(x)), rope)
    B, n_kv_heads, T, _ = k.shape
    unit_vectors = torch.eye(T, dtype=h.dtype, device=h.device).expand(B, n_kv_heads, T, T)
    return attend(q, k, unit_vectors, attn.scale, attn.window, attn.softcap)


def running_mean_update(block: Block, h: Tensor) -> Tensor:
    """What uniform causal attention would add, (B, T, D): like U, but of the mean of all values up to each token."""
    attn, x = block.attn, block.attn_norm(h)
    v = attn.heads(attn.v_proj(x))  # (B, n_kv_heads, T, head_dim)
    seen = torch.arange(1, h.shape[1] + 1, device=h.device)[:, None]
    mean = repeat_kv((v.float().cumsum(2) / seen).to(v.dtype), attn.o_proj.in_features // attn.head_dim)
    return block.attn_post_norm(attn.o_proj(mean.transpose(1, 2).flatten(2)))


def similarity(x: Tensor) -> Tensor:
    """Mean cosine of all pairs of different rows of x, (T, D), without making the T x T of them: a sum of unit vectors
    has the squared length T + the sum of all pairs' cosines."""
    T = len(x)
    return (F.normalize(x.float(), dim=-1).sum(0).square().sum() - T) / (T * (T - 1))


@dataclass(frozen=True)
class LayerFacts:
    """One layer of the dense model on a text. Means are over tokens, the first of every window left out, which can
    only look at itself."""

    layer: int
    similarity: float  # Sim(H): mean cosine between the block's inputs at two tokens
    entropy: float  # of the attention weights, as a share of the largest possible: log(t + 1) at token t
    sink: float  # attention on the first token
    itself: float  # attention on the token itself
    previous: float  # attention on the token before, if that is not the first
    block_importance: float  # 1 - cos(h, output of the block): ShortGPT's score, which sees the MLP too
    attention_distance: float  # 1 - cos(h, h + A): Attention-Drop's score, but for the first tokens
    share: float  # |A| / |h|
    residual: float  # |A - alpha U| / |h| at the least-squares alpha: what V·O cannot bring back
    ls_alpha: float  # least squares: <A, U> / <U, U>
    norm_alpha: float  # the norm match: |A| / |U|
    vo_error: float  # |A - X| / |A| with X = U: of all tokens together, like the next two
    mean_error: float  # with X: uniform attention, the running mean of V
    constant_error: float  # with X: the mean of A
    vo_scaled_error: float  # |A - c X| / |A| at the best c, for the same three X
    mean_scaled_error: float
    constant_scaled_error: float


@torch.inference_mode()
def layer_facts(model: Transformer, windows: Sequence[Window]) -> list[LayerFacts]:
    """Look at every layer of the dense model, from the bottom up."""
    facts = []
    for layer, hiddens, attention, updates in attention_updates(model, windows, range(model.config.n_layers)):
        block = model.blocks[layer]
        H, A, U = (torch.cat([x[0, 1:].float() for x in xs]) for xs in (hiddens, attention, updates))  # (tokens, D)
        M = torch.cat([running_mean_update(block, h)[0, 1:].float() for h in hiddens])
        outputs = torch.cat([block.add_mlp(h + a)[0, 1:].float() for h, a in zip(hiddens, attention)])
        looks = [where_it_looks(attention_weights(block, h, model.rope(h))) for h in hiddens]
        entropy, sink, itself, previous = torch.stack(looks).mean(0).tolist()
        alpha, C = least_squares_alpha([A], [U]), A.mean(0).expand_as(A)
        facts.append(
            LayerFacts(
                layer=layer,
                similarity=torch.stack([similarity(h[0, 1:]) for h in hiddens]).mean().item(),
                entropy=entropy, sink=sink, itself=itself, previous=previous,
                block_importance=(1 - F.cosine_similarity(H, outputs, dim=-1)).mean().item(),
                attention_distance=(1 - F.cosine_similarity(H, H + A, dim=-1)).mean().item(),
                share=(A.norm(dim=-1) / H.norm(dim=-1)).mean().item(),
                residual=((A - alpha * U).norm(dim=-1) / H.norm(dim=-1)).mean().item(),
                ls_alpha=alpha,
                norm_alpha=(A.norm() / U.norm()).item(),
                vo_error=error(A, U), mean_error=error(A, M), constant_error=error(A, C),
                vo_scaled_error=scaled_error(A, U),
                mean_scaled_error=scaled_error(A, M),
                constant_scaled_error=scaled_error(A, C),
            )
        )  # fmt: skip
    return facts


def where_it_looks(weights: Tensor) -> Tensor:
    """Attention weights (1, n_heads, T, T) -> means over heads and tokens from the second on, (4,): entropy as a share
    of log(t + 1), and the mass on the first token, on the token itself, on the one before if that is not the first."""
    p = weights[0].float()  # (n_heads, T, T)
    T = p.shape[-1]
    entropy = torch.special.entr(p).sum(-1)[:, 1:] / torch.arange(2, T + 1, device=p.device).log()
    itself, previous = p.diagonal(dim1=1, dim2=2)[:, 1:], p.diagonal(-1, 1, 2)[:, 1:]
    return torch.stack([entropy.mean(), p[:, 1:, 0].mean(), itself.mean(), previous.sum() / itself.numel()])


def error(target: Tensor, x: Tensor) -> float:
    return ((target - x).norm() / target.norm()).item()


def scaled_error(target: Tensor, x: Tensor) -> float:
    """The error that the best scale leaves: the sine of the angle between the two."""
    return (1 - F.cosine_similarity(target.flatten(), x.flatten(), dim=0) ** 2).clamp(min=0).sqrt().item()


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks; 1 if both rise together, whatever the curve. Equals share their rank."""
    values = torch.tensor([x, y], dtype=torch.float64)
    below, equal = values[:, :, None] > values[:, None], values[:, :, None] == values[:, None]
    return torch.corrcoef(below.sum(2) + equal.sum(2) / 2)[0, 1].item()
