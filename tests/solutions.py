"""Solutions of the exercises in tutorial.ipynb, and wrong answers that its checkers must see through.

Spoilers ahead. Each solution is followed by the reasoning that the exercise asks for.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Attention, Block, Rope, repeat_kv, rotate

# ------------------------------------------------------------------------------------------------------- five minutes

# keys and values, 24 layers left, 8 key/value heads of 128, two bytes, 65,536 tokens: 6.4 GB
KV_CACHE = 2 * 24 * 8 * 128 * 2 * 65536


def similarity(H: Tensor) -> Tensor:
    """|sum of unit vectors|^2 is the sum of all T^2 cosines; T of them are a vector's with itself, which is 1."""
    T = len(H)
    total = F.normalize(H, dim=-1).sum(0)
    return (total @ total - T) / (T * (T - 1))


def value_path(block: Block, h: Tensor) -> Tensor:
    attn, x = block.attn, block.attn_norm(h)
    v = attn.v_proj(x).unflatten(-1, (-1, attn.head_dim))  # (B, T, n_kv_heads, head_dim)
    group = attn.o_proj.in_features // attn.v_proj.out_features
    v = v.repeat_interleave(group, dim=2)  # (B, T, n_heads, head_dim)
    return block.attn_post_norm(attn.o_proj(v.flatten(2)))


def least_squares(A: Tensor, U: Tensor) -> Tensor:
    """The derivative of |A - alpha U|^2 is zero where <A - alpha U, U> = 0: what is left is at right angles to U."""
    return (A * U).sum() / (U * U).sum()


def folded_norm(weight: Tensor, alpha: float) -> Tensor:
    """1 + w' = alpha (1 + w). A scale of o_proj instead would be divided out again by the rms that it scales, too."""
    return alpha * (1 + weight) - 1


# ------------------------------------------------------------------------------------------------------- half an hour


def bound(p: Tensor, v: Tensor, alpha: float) -> Tensor:
    """a_t - alpha v_t = sum_j p_tj (v_j - alpha v_t), since the weights sum to 1; then the triangle inequality.

    With alpha = 1 this is (A). With equal values each term is (1 - alpha) v, so nothing is lost. Splitting once more,
    |v_j - alpha v_t| <= |v_j - v_t| + |1 - alpha| |v_t|, gives a bound that is a little looser and easier to read: the
    disagreement of the values, plus what the rescaling itself takes away. Either passes.
    """
    return (p * torch.cdist(alpha * v, v)).sum(-1)


def law(s: float, n: int, w: float) -> float:
    """<a, v_t> = w <v_t, v_t> + (1 - w) * the mean of <v_j, v_t> over the others = w + (1 - w) s, and <v_t, v_t> = 1.
    n is gone: what a token takes from others counts for as much as they agree with it, and its own value fully."""
    return w + (1 - w) * s


def folding(weight: Tensor, n_kv_heads: int, head_dim: int) -> Tensor:
    """o_proj is a sum over query heads; those of one group all get the same value, so their matrices can be summed."""
    return weight.unflatten(1, (n_kv_heads, -1, head_dim)).sum(2).flatten(1)


def greedy(
    ppl_of: Callable[[Mapping[int, float]], float], layers: Sequence[int], alphas: Sequence[float], limit: float
) -> dict[int, float]:
    found = {}
    for layer in sorted(layers, reverse=True):
        tried = {alpha: ppl_of(found | {layer: alpha}) for alpha in alphas}
        best = min(tried, key=tried.get)
        if tried[best] > limit:
            break
        found[layer] = best
    return found


def running_mean(v: Tensor) -> Tensor:
    seen = torch.arange(1, v.shape[2] + 1, device=v.device)[:, None]
    return v.cumsum(2) / seen


def alpha_and_bias(A: Tensor, U: Tensor) -> tuple[float, Tensor]:
    """For any alpha the best b is mean(A) - alpha mean(U). Put in, that leaves a least-squares alpha of what remains
    after both means are taken off."""
    a, u = A - A.mean(0), U - U.mean(0)
    alpha = ((a * u).sum() / (u * u).sum()).item()
    return alpha, A.mean(0) - alpha * U.mean(0)


def induction(weights: Tensor, L: int) -> Tensor:
    second = torch.arange(L, 2 * L)
    return weights[:, second, second - L + 1].mean(1)


# --------------------------------------------------------------------------------------------------------- afternoons

PLANTED_BUG = dict(  # one sign of RoPE: the second half of every pair turns the wrong way
    file="model.py",
    old="torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
    new="torch.cat((a * cos - b * sin, b * cos - a * sin), dim=-1)",
    test="tests/test_model.py::test_golden_logits",
)


def int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def normed_queries(attn: Attention, x: Tensor, rope: Rope, norm: nn.Module) -> Tensor:
    """Before RoPE, each head by itself. V·O reads no query and no key, so HARP does not change at all in such a family:
    prune_ has two more norms to delete."""
    return rotate(norm(attn.heads(attn.q_proj(x))), rope)


SOLUTIONS = {
    "kv_cache": (KV_CACHE,),
    "similarity": (similarity,),
    "value_path": (value_path,),
    "least_squares": (least_squares,),
    "folded_norm": (folded_norm,),
    "bound": (bound,),
    "law": (law,),
    "folding": (folding,),
    "greedy": (greedy,),
    "running_mean": (running_mean,),
    "alpha_and_bias": (alpha_and_bias,),
    "induction": (induction,),
    "planted_bug": tuple(PLANTED_BUG.values()),
    "int8": (int8,),
    "normed_queries": (normed_queries,),
}


# ------------------------------------------------------------------------------------------------------ wrong answers


def cosines(H: Tensor) -> Tensor:
    return F.cosine_similarity(H[:, None], H[None], dim=-1)


def value_path_without_norm(block: Block, h: Tensor) -> Tensor:
    return block.attn_post_norm(block.attn.value_path(h))


def value_path_without_post_norm(block: Block, h: Tensor) -> Tensor:
    return block.attn.value_path(block.attn_norm(h))


def value_path_tiled(block: Block, h: Tensor) -> Tensor:
    v = block.attn.v_proj(block.attn_norm(h))
    return block.attn_post_norm(block.attn.o_proj(v.repeat(1, 1, block.attn.o_proj.in_features // v.shape[-1])))


def value_path_without_bias(block: Block, h: Tensor) -> Tensor:
    attn = block.attn
    v = attn.heads(F.linear(block.attn_norm(h), attn.v_proj.weight))
    n_heads = attn.o_proj.in_features // attn.head_dim
    return block.attn_post_norm(attn.o_proj(repeat_kv(v, n_heads).transpose(1, 2).flatten(2)))


def greedy_variant(start_low: bool = False, forget: bool = False, all_at_once: bool = False, stop: bool = True):
    def search(ppl_of, layers, alphas, limit):
        found = {}
        for layer in sorted(layers, reverse=not start_low):
            rest = {other: 1.0 for other in layers if other < layer} if all_at_once else {}
            above = {} if forget else found
            tried = {alpha: ppl_of(rest | above | {layer: alpha}) for alpha in alphas}
            best = min(tried, key=tried.get)
            if stop and tried[best] > limit:
                break
            found[layer] = best
        return found

    return search


def greedy_keeps_the_worst(ppl_of, layers, alphas, limit):
    found = {}
    for layer in sorted(layers, reverse=True):
        tried = {alpha: ppl_of(found | {layer: alpha}) for alpha in alphas}
        if min(tried.values()) > limit:
            break
        found[layer] = max(tried, key=tried.get)
    return found


def mean_of_the_past(v: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(v[:, :, :1]), running_mean(v)[:, :, :-1]], dim=2)


def ratio(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum() / (y * y).sum()


def normed_together(attn: Attention, x: Tensor, rope: Rope, norm: nn.Module) -> Tensor:
    q = attn.q_proj(x)
    return rotate(attn.heads(F.rms_norm(q, q.shape[-1:], eps=norm.eps)) * norm.weight, rope)


BUG = PLANTED_BUG
WRONG = {  # checker -> name of the mistake -> (the answer, words that the verdict must hold)
    "kv_cache": {
        "all layers": ((2 * 32 * 8 * 128 * 2 * 65536,), "all 32 layers"),
        "query heads": ((2 * 24 * 32 * 128 * 2 * 65536,), "query heads"),
        "keys alone": ((24 * 8 * 128 * 2 * 65536,), "half"),
        "what is saved": ((2 * 8 * 8 * 128 * 2 * 65536,), "saves"),
        "gigabytes": ((6.44,), "not of gigabytes"),
    },
    "similarity": {
        "counts the diagonal": ((lambda H: cosines(H).mean(),), "with itself"),
        "dot products": ((lambda H: ((H @ H.T).sum() - (H * H).sum()) / (len(H) * (len(H) - 1)),), "length 1"),
        "takes off the mean": (
            (lambda H: similarity(H - H.mean(0)),), "mean is subtracted"),
        "forgets the square": ((lambda H: F.normalize(H, dim=-1).mean(0).norm(),), "its square"),
        "a whole matrix": ((cosines,), "shape"),
    },
    "value_path": {
        "no norm before": ((value_path_without_norm,), "norm before V"),
        "no norm after": ((value_path_without_post_norm,), "norm after O"),
        "heads tiled": ((value_path_tiled,), "tiled"),
        "residual added": ((lambda block, h: h + value_path(block, h),), "added to h"),
        "no bias": ((value_path_without_bias,), "bias of V"),
    },
    "least_squares": {
        "norm match": ((lambda A, U: A.norm() / U.norm(),), "norm match"),
        "the other way round": ((lambda A, U: ratio(U, A),), "<A, A>"),
        "mean of tokens": ((lambda A, U: ((A * U).sum(1) / (U * U).sum(1)).mean(),), "loud tokens"),
        "cosine": ((lambda A, U: F.cosine_similarity(A.flatten(), U.flatten(), dim=0),), "lengths"),
        "one for each token": ((lambda A, U: (A * U).sum(1) / (U * U).sum(1),), "shape"),
    },
    "folded_norm": {
        "scales the weight": ((lambda w, alpha: alpha * w,), "1 + weight"),
        "adds 1 twice": ((lambda w, alpha: alpha * (1 + w),), "once more"),
        "changes nothing": ((lambda w, alpha: w,), "does nothing"),
        "adds alpha": ((lambda w, alpha: w + alpha,), "multiplied"),
    },
    "bound": {
        "(A) alone": ((lambda p, v, alpha: (p * torch.cdist(v, v)).sum(-1),), "no bound"),
        "1 - alpha without its sign taken off": (
            (lambda p, v, alpha: (p * torch.cdist(v, v)).sum(-1) + (1 - alpha) * v.norm(dim=-1),), "no bound"),
        "not weighted": (
            (lambda p, v, alpha: torch.cdist(v, v).sum(-1) + abs(1 - alpha) * v.norm(dim=-1),), "weighted by p"),
        "forgets how long v is": (
            (lambda p, v, alpha: (p * torch.cdist(v, v)).sum(-1) + abs(1 - alpha) * 100,), "too loose"),
        "one number for all": ((lambda p, v, alpha: torch.cdist(alpha * v, v).max(),), "for every row"),
    },
    "law": {
        "uniform attention": ((lambda s, n, w: s + (1 - s) / n,), "w is not in it"),
        "spread over itself, too": ((lambda s, n, w: w + (1 - w) * (s + (1 - s) / n),), "itself included"),
        "norm match": (
            (lambda s, n, w: math.sqrt(w * w + 2 * w * (1 - w) * s + (1 - w) ** 2 * (s + (1 - s) / (n - 1))),),
            "norm match"),
        "norm squared": (
            (lambda s, n, w: w * w + 2 * w * (1 - w) * s + (1 - w) ** 2 * (s + (1 - s) / (n - 1)),), "squared"),
    },
    "folding": {
        "mean": ((lambda o, n, d: o.unflatten(1, (n, -1, d)).mean(2).flatten(1),), "sum them"),
        "first head only": ((lambda o, n, d: o.unflatten(1, (n, -1, d))[:, :, 0].flatten(1),), "drops the others"),
        "wrong groups": ((lambda o, n, d: o.unflatten(1, (-1, n, d)).sum(1).flatten(1),), "neighbours"),
        "not folded": ((lambda o, n, d: o,), "shape"),
    },
    "greedy": {
        "from the bottom up": ((greedy_variant(start_low=True),), "topmost"),
        "each layer by itself": ((greedy_variant(forget=True),), "forgets"),
        "all layers pruned from the start": ((greedy_variant(all_at_once=True),), "stay dense"),
        "does not stop": ((greedy_variant(stop=False),), "must stop"),
        "keeps the worst": ((greedy_keeps_the_worst,), "lowest perplexity"),
    },
    "running_mean": {
        "sees the future": ((lambda v: v.mean(2, keepdim=True).expand_as(v),), "future"),
        "sum": ((lambda v: v.cumsum(2),), "divide"),
        "leaves itself out": ((mean_of_the_past,), "left out"),
        "along features": ((lambda v: v.cumsum(3) / torch.arange(1, v.shape[3] + 1),), "dimension 2"),
    },
    "alpha_and_bias": {
        "alpha as without b": (
            (lambda A, U: (ratio(A, U), A.mean(0) - ratio(A, U) * U.mean(0)),), "as if there were no b"),
        "b is the mean of A": ((lambda A, U: (alpha_and_bias(A, U)[0], A.mean(0)),), "mean of its own"),
        "b for alpha 1": ((lambda A, U: (alpha_and_bias(A, U)[0], (A - U).mean(0)),), "alpha = 1"),
        "no b": ((lambda A, U: (ratio(A, U), torch.zeros(A.shape[1])),), "b is 0"),
        "alpha alone": ((lambda A, U: ratio(A, U),), "two things"),
    },
    "induction": {
        "same token": ((lambda w, L: w.diagonal(-L, 1, 2).mean(1),), "same token in the first copy"),
        "token before": ((lambda w, L: w.diagonal(-1, 1, 2)[:, L - 1 :].mean(1),), "previous-token"),
        "both copies": ((lambda w, L: w.diagonal(1 - L, 1, 2)[:, 1:].sum(1) / (2 * L),), "both copies"),
        "transposed": ((lambda w, L: induction(w.transpose(1, 2), L),), "exchanged"),
    },
    "planted_bug": {
        "text that is not there": ((BUG["file"], "no such line", "x", BUG["test"]), "0 times"),
        "no such test": ((BUG["file"], BUG["old"], BUG["new"], "tests/test_model.py::test_nothing"), "finds no test"),
        "no Python": ((BUG["file"], BUG["old"], "torch.cat((", BUG["test"]), "no Python"),
        "harmless": ((BUG["file"], BUG["old"], BUG["old"].replace("dim=-1", "dim=3"), BUG["test"]), "stays green"),
        "blind test": ((BUG["file"], BUG["old"], BUG["new"], "tests/test_cost.py::test_pairs_of_a_window_layer"),
                       "stays green"),
        "cannot be loaded": ((BUG["file"], "import torch.nn.functional as F", "import torch.nn.functions as F",
                              BUG["test"]), "cannot even be loaded"),
    },
    "int8": {
        "one scale for all": (
            (lambda w: ((w / w.abs().max() * 127).round().to(torch.int8), w.abs().max() / 127),), "loudest row"),
        "one for each column": (
            (lambda w: ((w / w.abs().amax(0) * 127).round().to(torch.int8), w.abs().amax(0, keepdim=True) / 127),),
            "shape"),
        "cuts decimals off": (
            (lambda w: ((w / int8(w)[1]).to(torch.int8), int8(w)[1]),), "round first"),
        "wraps round": (
            (lambda w: ((w * 128 / w.abs().amax(1, keepdim=True)).round().to(torch.int16).to(torch.int8),
                        w.abs().amax(1, keepdim=True) / 128),), "sign"),
        "half the range": (
            (lambda w: ((w / w.abs().amax(1, keepdim=True) * 31).round().to(torch.int8),
                        w.abs().amax(1, keepdim=True) / 31),), "too coarse"),
        "still float": ((lambda w: ((w / int8(w)[1]).round(), int8(w)[1]),), "torch.int8"),
    },
    "normed_queries": {
        "after RoPE": ((lambda attn, x, rope, norm: norm(rotate(attn.heads(attn.q_proj(x)), rope)),), "after RoPE"),
        "all heads together": ((normed_together,), "every head has its own"),
        "no norm": ((lambda attn, x, rope, norm: rotate(attn.heads(attn.q_proj(x)), rope),), "norm is missing"),
        "no RoPE": ((lambda attn, x, rope, norm: norm(attn.heads(attn.q_proj(x))),), "RoPE is missing"),
    },
}  # fmt: skip
