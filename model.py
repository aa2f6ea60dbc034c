"""One decoder-only transformer for four families: Llama, Mistral, Qwen2 and Gemma2.

Read it from the top: the configuration, then the leaves (norm, rotary positions, attention, MLP),
then a block, then the whole model. It knows nothing of files, texts or searches.

Shapes are written with these letters:

    B  sequences in a batch        n_heads     query heads
    T  tokens of a sequence        n_kv_heads  key/value heads; each serves n_heads / n_kv_heads query heads
    S  T and the tokens in a       head_dim    width of one head
       cache before them
    D  hidden size                 V           vocabulary size
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]  # cos and sin, each (T, head_dim / 2)

ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


@dataclass(frozen=True)
class ModelConfig:
    """Everything that decides what the model computes. Where the families differ, they differ in these fields only; the
    README has the table."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]  # per layer: how many tokens a query sees, itself included; None: all
    query_scale: float  # scores are query_scale * q.k
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    activation: str = "silu"
    tied: bool = False
    rope_theta: float = 10000.0
    rope_type: str = "default"  # or "linear", "llama3"
    rope_factor: float = 1.0  # linear and llama3: how much longer the context became
    rope_low_freq_factor: float = 1.0  # the rest: llama3 only
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192
    eos_ids: tuple[int, ...] = ()


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight), computed in float32 and rounded once."""

    def __init__(self, size: int, eps: float, offset: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size) - offset)  # a fresh norm multiplies by 1
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:  # (..., D) -> (..., D)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (self.offset + self.weight.float())).to(x.dtype)


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Radians per token of each rotary pair, (head_dim / 2,) in float32.

    A pair with a short wavelength tells neighbours apart, one with a long wavelength tells far places apart.
    Llama 3.1 stretches only the long ones: a pair that turned fewer than `rope_low_freq_factor` times in the
    original context is slowed by `rope_factor`, one that turned more than `rope_high_freq_factor` times is left
    alone, and between the two the change is blended in (the published rule of the Llama 3.1 release).
    """
    features = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float()  # 0, 2, 4, ...: one of every pair
    frequencies = 1.0 / config.rope_theta ** (features / config.head_dim)
    if config.rope_type == "linear":
        return frequencies / config.rope_factor
    if config.rope_type == "llama3":
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        turns = config.rope_original_context * frequencies / (2 * torch.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as it was, 0: slowed by the whole factor
        return keep * frequencies + (1 - keep) * frequencies / config.rope_factor
    return frequencies


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn every pair of features by its position's angle. x: (B, heads, T, head_dim).

    Hugging Face checkpoints pair feature i with feature i + head_dim / 2:

        [ a0 a1 a2 | b0 b1 b2 ]   pairs (a0, b0) (a1, b1) (a2, b2)

    Meta's original files pair neighbours instead; mixing the two up gives fluent nonsense.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)  # each (B, heads, T, head_dim / 2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def repeat_kv(x: Tensor, n_heads: int) -> Tensor:
    """(B, n_kv_heads, S, head_dim) -> (B, n_heads, S, head_dim): k0 k1 -> k0 k0 k1 k1, never k0 k1 k0 k1."""
    return x.repeat_interleave(n_heads // x.shape[1], dim=1)


QUERY_ROWS = 256  # queries scored at a time with a window, softcap or longer cache: memory grows with T, not T squared


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Causal attention of the last T of S positions: q (B, n_heads, T, head_dim), k and v (B, n_kv_heads, S, head_dim).

    With a window, a query sees itself and the `window - 1` tokens before it. With a softcap, scores are squeezed
    into (-softcap, softcap) by tanh before masking (Gemma 2). Returns (B, n_heads, T, head_dim).
    """
    if window is not None:  # what no query sees is not even looked at: a newest query is then left with all it sees
        unseen = max(0, k.shape[2] - q.shape[2] - window + 1)
        k, v = k[:, :, unseen:], v[:, :, unseen:]
    T, S = q.shape[2], k.shape[2]
    if softcap is None and T in (1, S) and (window is None or window >= S):  # a single newest query sees every key
        return F.scaled_dot_product_attention(q, k, v, is_causal=T > 1, scale=scale, enable_gqa=True)
    k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
    outputs, end = [], S - T
    for queries in q.split(QUERY_ROWS, dim=2):  # R rows, at positions first to end
        first, end = end, end + queries.shape[2]
        start = 0 if window is None else max(0, first - window + 1)  # none of these queries sees an earlier key
        keys, values = k[:, :, start:end], v[:, :, start:end]
        position = torch.arange(start, end, device=q.device)
        age = position[first - start :, None] - position  # (R, keys): how many tokens back
        visible = (age >= 0) & (age < (window or S))
        if softcap is None:
            outputs.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale))
        else:
            outputs.append(softcapped(queries, keys, values, visible, scale, softcap))
    return torch.cat(outputs, dim=2)


def softcapped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float) -> Tensor:
    """Attention with squeezed scores, which PyTorch's fused attention lacks: q (B, n_heads, R, head_dim), k and v (B,
    n_heads, keys, head_dim), visible (R, keys) -> (B, n_heads, R, head_dim). In place where it can be: the scores are
    the largest tensor of a long prefill."""
    scores = scale * (q @ k.transpose(2, 3)).float()  # (B, n_heads, R, keys)
    scores = softcap * scores.div_(softcap).tanh_()  # a product of its own: tanh's gradient needs tanh's result
    return scores.masked_fill_(~visible, float("-inf")).softmax(dim=-1).to(v.dtype) @ v


class KVCache:
    """What decoding remembers: the keys and values of every block that attends. A pruned block remembers nothing."""

    def __init__(self, n_layers: int, max_tokens: int):
        self.max_tokens = max_tokens
        self.length = 0  # tokens that all blocks have seen; `Transformer.hidden` moves it on
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * n_layers

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep k and v, (B, n_kv_heads, T, head_dim), of the newest tokens; return those of all tokens so far."""
        if self.layers[layer] is None:
            B, n_kv_heads, _, head_dim = k.shape
            self.layers[layer] = (
                k.new_empty(B, n_kv_heads, self.max_tokens, head_dim),
                v.new_empty(B, n_kv_heads, self.max_tokens, head_dim),
            )
        keys, values = self.layers[layer]
        end = self.length + k.shape[2]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]


class Attention(nn.Module):
    """Grouped-query attention, and the path that HARP keeps of it: O(V(x)).

    Head counts are read off the weights, so that a folded layer, whose o_proj is narrower, needs no code of its own.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        D, head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(D, config.n_heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, config.n_kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, config.n_kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.n_heads * head_dim, D, bias=config.o_bias)
        self.layer = layer
        self.head_dim = head_dim
        self.scale = config.query_scale
        self.window = config.sliding_windows[layer]
        self.softcap = config.attn_softcap

    def heads(self, projected: Tensor) -> Tensor:  # (B, T, heads * head_dim) -> (B, heads, T, head_dim)
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, rope: Rope, cache: KVCache | None = None) -> Tensor:  # (B, T, D) -> (B, T, D)
        q = rotate(self.heads(self.q_proj(x)), rope)  # (B, n_heads, T, head_dim)
        k = rotate(self.heads(self.k_proj(x)), rope)  # (B, n_kv_heads, T, head_dim)
        v = self.heads(self.v_proj(x))
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, n_kv_heads, S, head_dim)
        y = attend(q, k, v, self.scale, self.window, self.softcap)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def value_path(self, x: Tensor) -> Tensor:
        """O(V(x)), (B, T, D) -> (B, T, D): what attention returns when every token looks at itself alone."""
        v = self.heads(self.v_proj(x))  # (B, n_kv_heads, T, head_dim)
        v = repeat_kv(v, self.o_proj.in_features // self.head_dim)  # once folded, o_proj takes them unrepeated
        return self.o_proj(v.transpose(1, 2).flatten(2))

    def fold_(self, alpha: float) -> None:
        """Delete q and k, and sum o_proj's slices of each group of query heads, which would all read the same value:
        (D, n_heads * head_dim) -> (D, n_kv_heads * head_dim). Alpha goes in too, in float32, before one rounding.
        """
        old = self.o_proj
        n_kv_heads = self.v_proj.out_features // self.head_dim
        self.q_proj = self.k_proj = None
        weight = old.weight.detach().float()  # (D, n_heads * head_dim)
        by_group = weight.unflatten(1, (n_kv_heads, -1, self.head_dim))  # (D, n_kv_heads, group, head_dim)
        self.o_proj = nn.Linear(self.v_proj.out_features, old.out_features, bias=old.bias is not None, device="meta")
        self.o_proj.weight = nn.Parameter((alpha * by_group.sum(2).flatten(1)).to(old.weight.dtype))
        if old.bias is not None:
            self.o_proj.bias = nn.Parameter((alpha * old.bias.detach().float()).to(old.bias.dtype))


class MLP(nn.Module):
    """The gated MLP that all four families share."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, bias = config.hidden_size, config.mlp_bias
        self.gate_proj = nn.Linear(D, config.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(D, config.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(config.intermediate_size, D, bias=bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: h + attention, then h + MLP.

    `attention_mode` says what the attention sublayer adds to the residual stream h:

        "full"   Post(Attn(Norm(h)))           the pretrained layer
        "vo"     alpha * Post(O(V(Norm(h))))   HARP: no query, no key, no cache; alpha = 0 leaves nothing

    Both can be set at any time until `Transformer.prune_` makes them final; alpha does nothing while the mode is
    "full". Post is the identity except in Gemma2, where alpha stands outside of it, because an RMSNorm would swallow
    any scale put before it. In the mode "vo", every token also gets `constant`, one vector (D,), if there is one (ours,
    not the paper's: `harp.set_alphas`).
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        norm = config.hidden_size, config.norm_eps, config.norm_offset
        self.attn_norm = RMSNorm(*norm)
        self.attn = Attention(config, layer)
        self.attn_post_norm = RMSNorm(*norm) if config.post_norms else nn.Identity()
        self.mlp_norm = RMSNorm(*norm)
        self.mlp = MLP(config)
        self.mlp_post_norm = RMSNorm(*norm) if config.post_norms else nn.Identity()
        self.attention_mode = "full"
        self.alpha = 1.0
        self.register_parameter("constant", None)

    @property
    def attention_mode(self) -> str:
        return self._attention_mode

    @attention_mode.setter
    def attention_mode(self, mode: str) -> None:
        if mode not in ("full", "vo"):
            raise ValueError(f'attention_mode is "full" or "vo", not {mode!r}')
        if mode == "full" and (self.attn is None or self.attn.q_proj is None):
            raise ValueError('this block was pruned: its query and key are gone, only "vo" is left')
        self._attention_mode = mode

    def forward(self, h: Tensor, rope: Rope, cache: KVCache | None = None) -> Tensor:  # (B, T, D) -> (B, T, D)
        if self.attention_mode == "full":
            h = h + self.attention_update(h, rope, cache)
        elif self.alpha != 0:
            h = h + self.alpha * self.vo_update(h)
        if self.attention_mode == "vo" and self.constant is not None:
            h = h + self.constant
        return self.add_mlp(h)

    def attention_update(self, h: Tensor, rope: Rope, cache: KVCache | None = None) -> Tensor:
        """Post(Attn(Norm(h))), (B, T, D) -> (B, T, D): what the pretrained attention adds."""
        return self.attn_post_norm(self.attn(self.attn_norm(h), rope, cache))

    def vo_update(self, h: Tensor) -> Tensor:
        """Post(O(V(Norm(h)))), (B, T, D) -> (B, T, D): the update that alpha scales."""
        return self.attn_post_norm(self.attn.value_path(self.attn_norm(h)))

    def add_mlp(self, h: Tensor) -> Tensor:  # (B, T, D) -> (B, T, D)
        return h + self.mlp_post_norm(self.mlp(self.mlp_norm(h)))

    def prune_(self) -> None:
        """Make "vo" final: delete what this block no longer reads."""
        if self.alpha == 0:
            self.attn = self.attn_norm = self.attn_post_norm = None
        elif isinstance(self.attn_post_norm, RMSNorm):
            self.attn.fold_(1.0)  # alpha stays a scalar after the norm
        else:
            self.attn.fold_(self.alpha)
            self.alpha = 1.0  # it lives in o_proj now


class Transformer(nn.Module):
    """Token ids in, logits out: embed, blocks, head. No padding: every row of a batch is a full sequence."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        self.lm_head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.pruned: dict[int, float] = {}  # layer -> alpha of every block whose pruning is final

    @property
    def device(self) -> torch.device:
        """Where the head is."""
        return self.norm.weight.device

    def embed(self, ids: Tensor) -> Tensor:  # (B, T) -> (B, T, D)
        h = self.embed_tokens(ids.to(self.embed_tokens.weight.device))
        # Gemma2 rounds its factor to the model's dtype: sqrt(3584) = 59.87 is 59.75 in bfloat16
        return h * torch.tensor(self.config.embed_scale, dtype=h.dtype, device=h.device)

    def rope(self, h: Tensor, start: int = 0) -> Rope:
        """Rotary tables for the T tokens of h, (B, T, D), the first of which stands at position `start`.

        Angles are float32 whatever the model's dtype: bfloat16 cannot tell position 1,000 from 1,001.
        """
        positions = torch.arange(start, start + h.shape[1], dtype=torch.float32, device=h.device)
        angles = torch.outer(positions, rope_frequencies(self.config).to(h.device))  # (T, head_dim / 2)
        return angles.cos().to(h.dtype), angles.sin().to(h.dtype)

    def head(self, h: Tensor) -> Tensor:  # (..., D) -> logits (..., V)
        weight = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        logits = F.linear(self.norm(h), weight)
        if self.config.logit_softcap is not None:
            cap = self.config.logit_softcap
            logits = (cap * torch.tanh(logits.float() / cap)).to(logits.dtype)
        return logits

    def hidden(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Ids (B, T) to the last block's output (B, T, D). With a cache, the ids follow the tokens it has seen."""
        h = self.embed(ids)
        rope = self.rope(h, start=0 if cache is None else cache.length)
        for block in self.blocks:
            h = block(h, rope, cache)
        if cache is not None:
            cache.length += ids.shape[1]
        return h

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:  # (B, T) -> logits (B, T, V)
        return self.head(self.hidden(ids, cache))

    @torch.inference_mode()
    def generate(self, ids: Tensor, max_new_tokens: int, stop_ids: tuple[int, ...] = ()) -> Tensor:
        """Continue ids (B, T) greedily. Returns (B, T + new): `max_new_tokens` of them, or fewer once every row has
        produced one of `stop_ids`."""
        cache = KVCache(len(self.blocks), ids.shape[1] + max_new_tokens)
        ids = ids.to(self.device)
        stopped = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        newest = ids
        for _ in range(max_new_tokens):
            newest = self.head(self.hidden(newest, cache)[:, -1:]).argmax(-1)  # (B, 1)
            ids = torch.cat((ids, newest), dim=1)
            stopped |= torch.isin(newest[:, 0], torch.tensor(stop_ids, dtype=ids.dtype, device=ids.device))
            if stopped.all():
                break
        return ids

    def prune_(self) -> "Transformer":
        """Make every "vo" block's pruning final, in place: same logits, fewer weights. Returns the model."""
        for layer, block in enumerate(self.blocks):
            if block.attention_mode == "vo" and layer not in self.pruned:
                self.pruned[layer] = block.alpha
                block.prune_()
        return self
