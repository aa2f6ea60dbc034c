"""The competitors: structured pruners that remove whole heads and channels, on the same models as HARP.

Mag-sp, Wanda-sp, FLAP, LLM-Pruner and Attention-Drop, and the authors' mix of HARP and FLAP. Each is called as

    flap(model, windows, budget)      # windows of a calibration text; budget: linear parameters to remove

and shrinks the model in place. All do the same three things in their own way: score units, choose the lowest until
the budget is met, remove them. What a unit is, under grouped-query attention:

    attention   a key/value head with the query heads that it serves: rows of q, k and v, columns of o_proj
    MLP         a channel: a row of gate and of up, a column of down_proj

Both are runs of features, the inputs z of the sublayer's last projection: o_proj or down_proj. So a score is given
to features first and then summed over the unit, and "keep" always means a mask over these features.

The budget counts as cost.py does, biases included. It is met from above by less than one unit, except where a
function says otherwise. Papers: Wanda, arXiv 2306.11695; FLAP, arXiv 2312.11983, whose published code defines Mag-sp
and Wanda-sp too; LLM-Pruner, arXiv 2305.11627; Attention-Drop, arXiv 2406.15786.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cost
from checkpoint import UserError
from eval_ppl import Window, advance, embed
from extras.layer_scores import attention_updates
from model import Attention, Transformer

ATTENTION, MLP = "attention", "mlp"
BOTH = (ATTENTION, MLP)  # what the methods prune by themselves; (ATTENTION,) for a comparison on equal terms


# ------------------------------------------------------------------------------------------------ what can be removed


@dataclass(frozen=True, eq=False)
class Sublayer:
    """One sublayer and the units into which it can be cut: consecutive runs of the features that `output` reads.

    Units that must go together, one of every group, are counted and paid for as one.
    """

    layer: int
    kind: str  # ATTENTION or MLP
    inner: tuple[nn.Linear, ...]  # a unit owns rows of these
    output: nn.Linear  # and columns of this one: o_proj or down_proj
    groups: int
    units: int  # in each group
    removable: int  # of the units

    @property
    def cost(self) -> int:
        """Parameters that go with one unit of every group."""
        return (count(*self.inner) + self.output.weight.numel()) // self.units

    def per_unit(self, features: Tensor) -> Tensor:
        """Scores of features, (in_features,), summed over each unit: (groups, units)."""
        return features.unflatten(0, (self.groups, self.units, -1)).sum(-1)

    def per_feature(self, units: Tensor) -> Tensor:
        """A mask of units, (groups, units), as a mask of features, (in_features,)."""
        return units.flatten().repeat_interleave(self.output.in_features // units.numel())


def count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def sublayers(model: Transformer, kinds: Sequence[str] = BOTH, heads: str = "kv") -> list[Sublayer]:
    """All sublayers of these kinds, attention first; where HARP has pruned the attention, there is none to cut.

    With `heads` = "query", key/value heads stay, and the unit is one query head of every group: so the groups of a
    layer stay alike, and so does the model's code. Each group loses its own lowest, and keeps at least one. It costs
    2 * head_dim * D a query head, and is for ratios that are below one key/value head a layer.
    """
    found = []
    if ATTENTION in kinds:
        found += [
            attention_sublayer(layer, block.attn, heads)
            for layer, block in enumerate(model.blocks)
            if block.attention_mode == "full"
        ]
    if MLP in kinds:
        for layer, block in enumerate(model.blocks):
            channels = block.mlp.down_proj.in_features
            inner = block.mlp.gate_proj, block.mlp.up_proj
            found.append(Sublayer(layer, MLP, inner, block.mlp.down_proj, 1, channels, removable=channels))
    return found


def attention_sublayer(layer: int, attn: Attention, heads: str) -> Sublayer:
    n_kv_heads, group = attn.k_proj.out_features // attn.head_dim, attn.q_proj.out_features // attn.k_proj.out_features
    if heads == "query":
        return Sublayer(layer, ATTENTION, (attn.q_proj,), attn.o_proj, n_kv_heads, group, removable=group - 1)
    inner = attn.q_proj, attn.k_proj, attn.v_proj
    return Sublayer(layer, ATTENTION, inner, attn.o_proj, 1, n_kv_heads, removable=n_kv_heads)


# ----------------------------------------------------------------------------------------------------------- removing


def remove_(model: Transformer, sublayer: Sublayer, keep: Tensor) -> None:
    """Delete, in place, the rows and columns of every feature that `keep`, (in_features,) bool, leaves out.

    A key/value head goes with the last of its query heads. Those that stay must all keep as many query heads. Of an
    attention without heads the bias is left, if it has one: a constant.
    """
    block = model.blocks[sublayer.layer]
    if sublayer.kind == MLP:
        keep_rows_(block.mlp.gate_proj, keep)
        keep_rows_(block.mlp.up_proj, keep)
        keep_columns_(block.mlp.down_proj, keep)
        return
    attn = block.attn
    if not keep.any():
        if attn.o_proj.bias is not None:
            block.constant = nn.Parameter(block.attn_post_norm(attn.o_proj.bias).detach())
        drop_attention_(model, sublayer.layer)
        return
    n_kv_heads = attn.k_proj.out_features // attn.head_dim
    keep_kv = keep.unflatten(0, (n_kv_heads, -1, attn.head_dim)).any(1).flatten()  # (n_kv_heads * head_dim,)
    keep_rows_(attn.q_proj, keep)
    keep_rows_(attn.k_proj, keep_kv)
    keep_rows_(attn.v_proj, keep_kv)
    keep_columns_(attn.o_proj, keep)


def keep_rows_(linear: nn.Linear, keep: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight.detach()[keep])
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach()[keep])
    linear.out_features = linear.weight.shape[0]


def keep_columns_(linear: nn.Linear, keep: Tensor) -> None:
    linear.weight = nn.Parameter(linear.weight.detach()[:, keep])
    linear.in_features = linear.weight.shape[1]


def drop_attention_(model: Transformer, layer: int) -> None:
    """Delete a whole attention sublayer: what HARP does at alpha = 0."""
    block = model.blocks[layer]
    block.attention_mode, block.alpha = "vo", 0.0
    block.prune_()
    model.pruned[layer] = 0.0


# ------------------------------------------------------------------------------------- what the calibration text shows


class Inputs:
    """What a projection reads over a text: sums over its tokens, in float64, instead of the activations."""

    def __init__(self) -> None:
        self.tokens = 0
        self.total = self.squares = torch.zeros(())  # they become (in_features,)

    def see(self, projection: nn.Module, args: tuple[Tensor]) -> None:
        """A forward pre-hook. args: z, (B, T, in_features)."""
        z = args[0].flatten(0, 1).double()
        self.tokens += len(z)
        self.total = self.total + z.sum(0)
        self.squares = self.squares + z.square().sum(0)

    @property
    def mean(self) -> Tensor:
        return self.total / self.tokens

    @property
    def variance(self) -> Tensor:
        return self.squares / self.tokens - self.mean.square()

    @property
    def norm(self) -> Tensor:
        return self.squares.sqrt()


def read_inputs(
    model: Transformer, windows: Sequence[Window], sequential: bool = False
) -> Iterator[tuple[int, dict[str, Inputs]]]:
    """Run a text through the model and yield, layer by layer from below, what o_proj and down_proj read of it.

    `sequential`: a layer is run once more after it was yielded, so that whatever the caller has removed from it
    meanwhile shows in the layers above.
    """
    hiddens = embed(model, windows)
    for layer, block in enumerate(model.blocks):
        outputs = {MLP: block.mlp.down_proj}
        if block.attn is not None:
            outputs[ATTENTION] = block.attn.o_proj
        inputs = {kind: Inputs() for kind in outputs}
        hooks = [outputs[kind].register_forward_pre_hook(inputs[kind].see) for kind in outputs]
        after = advance(model, hiddens, [layer])
        for hook in hooks:
            hook.remove()
        yield layer, inputs
        hiddens = advance(model, hiddens, [layer]) if sequential else after


# ----------------------------------------------------------------------------------------------------------- choosing


def check_budget(candidates: Sequence[Sublayer], budget: int) -> None:
    """Raise UserError unless so many parameters can be removed."""
    most = sum(sublayer.removable * sublayer.cost for sublayer in candidates)
    if not 0 <= budget <= most:
        raise UserError(f"a budget of {budget:,} parameters is out of range: 0 to {most:,} can be removed here")


def same_ratio(candidates: Sequence[Sublayer], budget: int) -> list[int]:
    """How many units each sublayer loses if all lose the same share. `candidates`: of a dense model, attention first.

    Shares are seldom whole units, least of all with three key/value heads in a layer. The rule for the remainder: the
    units of a kind are counted for all layers together and dealt out as evenly as whole units allow. Heads are rounded
    down where channels, which are small, can make up for it. Raises UserError.
    """
    check_budget(candidates, budget)
    losses: list[int] = []
    for kind in BOTH:
        rest = candidates[len(losses) :]
        alike = [sublayer for sublayer in rest if sublayer.kind == kind]
        if alike:
            share = budget * count_units(alike) / count_units(rest) / alike[0].cost
            units = math.floor(share) if len(alike) < len(rest) else math.ceil(share)
            losses += [(i + 1) * units // len(alike) - i * units // len(alike) for i in range(len(alike))]
            budget -= units * alike[0].cost
    return losses


def count_units(candidates: Sequence[Sublayer]) -> int:
    """Parameters of all units of these sublayers."""
    return sum(sublayer.units * sublayer.cost for sublayer in candidates)


def remove_lowest_(model: Transformer, sublayer: Sublayer, scores: Tensor, loss: int) -> None:
    """Remove the `loss` lowest units of every group. scores: (groups, units)."""
    rank = scores.argsort(1).argsort(1)
    remove_(model, sublayer, sublayer.per_feature(rank >= loss))


def lowest_of_all(candidates: Sequence[Sublayer], scores: Sequence[Tensor], budget: int) -> list[Tensor]:
    """Masks of the units that stay, (groups, units) each, if the lowest of all sublayers go, in one list.

    A removed unit costs the bias that makes up for it, the first time in a sublayer without one. Raises UserError.
    """
    check_budget(candidates, budget)
    keep = [torch.ones_like(some, dtype=torch.bool) for some in scores]
    ascending = sorted((score, i, unit) for i, some in enumerate(scores) for unit, score in enumerate(some[0].tolist()))
    for _, i, unit in ascending:
        if budget <= 0:
            break
        output = candidates[i].output
        new_bias = output.out_features if output.bias is None and keep[i].all() else 0
        keep[i][0, unit] = False
        budget -= candidates[i].cost - new_bias
    if budget > 0:
        raise UserError(
            f"the budget is missed by {budget:,} parameters: the biases that make up for the rest need them"
        )
    return keep


# -------------------------------------------------------------------------------------------------------- the methods


def mag_sp(
    model: Transformer, windows: Sequence[Window], budget: int, kinds: Sequence[str] = BOTH, heads: str = "kv"
) -> None:
    """Mag-sp: score of feature j = norm(W[:, j], 2), W the weight of o_proj or down_proj; the same ratio everywhere.

    It looks at no data: `windows` is there because all methods take them. Source: FLAP's published code.
    """
    candidates = sublayers(model, kinds, heads)
    for sublayer, loss in zip(candidates, same_ratio(candidates, budget)):
        features = sublayer.output.weight.detach().float().norm(dim=0)
        remove_lowest_(model, sublayer, sublayer.per_unit(features), loss)


def wanda_sp(
    model: Transformer, windows: Sequence[Window], budget: int, kinds: Sequence[str] = BOTH, heads: str = "kv"
) -> None:
    """Wanda-sp: score of feature j = norm(z[:, j], 2) * mean_i |W[i, j]|; the same ratio everywhere.

    Sequential: z is what a layer reads once the layers below it are pruned. Source: FLAP's published code, after
    Wanda.
    """
    candidates = sublayers(model, kinds, heads)
    losses = same_ratio(candidates, budget)
    for layer, inputs in read_inputs(model, windows, sequential=True):
        for sublayer, loss in zip(candidates, losses):
            if sublayer.layer == layer:
                features = inputs[sublayer.kind].norm * sublayer.output.weight.detach().float().abs().mean(0)
                remove_lowest_(model, sublayer, sublayer.per_unit(features), loss)


def flap(
    model: Transformer,
    windows: Sequence[Window],
    budget: int,
    kinds: Sequence[str] = BOTH,
    square_attention: bool = False,
) -> None:
    """FLAP: score of feature j = Var_t(z[t, j]) * norm(W[:, j], 2)^2 (WIFV), and a bias in place of what goes.

    To compare layers (AL-AM), scores become z-scores within their sublayer and then the mean over the unit; all units
    stand in one list, from which the highest are kept as long as their parameters stay within what the budget leaves.
    A feature that hardly varies is nearly a constant, so its mean goes on: b += W[:, removed] @ mean_t z[t, removed].
    Statistics are the dense model's. In Gemma2 this bias lies before the norm that follows attention, so that there
    it keeps the mean of o_proj's output, not of the update.

    Source: An et al. 2023. Where its published code differs: it squares the features' attention scores before the
    z-score (`square_attention`); it leaves the first sample out of the variance; and it weighs a head as 170 channels,
    which is the cost of an ungrouped head of 128 features.
    """
    candidates = sublayers(model, kinds)
    inputs = dict(read_inputs(model, windows))
    scores = []
    for sublayer in candidates:
        features = wifv(sublayer.output, inputs[sublayer.layer][sublayer.kind])
        if square_attention and sublayer.kind == ATTENTION:
            features = features.square()
        features = (features - features.mean()) / features.std()
        scores.append(sublayer.per_unit(features) / (len(features) / sublayer.units))  # the mean over the unit
    for sublayer, units in zip(candidates, lowest_of_all(candidates, scores, budget)):
        if not units.all():
            keep = sublayer.per_feature(units)
            compensate_(sublayer.output, ~keep, inputs[sublayer.layer][sublayer.kind].mean)
            remove_(model, sublayer, keep)


def wifv(output: nn.Linear, inputs: Inputs) -> Tensor:
    """FLAP's score of every feature, (in_features,): how much of the output's variance over the text is due to it."""
    return inputs.variance * output.weight.detach().double().square().sum(0)


def compensate_(output: nn.Linear, removed: Tensor, mean: Tensor) -> None:
    """Add to the bias, which is made if there is none, what the `removed` features, (in_features,) bool, add to the
    output on average. mean: (in_features,)."""
    weight = output.weight.detach()
    bias = weight[:, removed].double() @ mean[removed]
    if output.bias is not None:
        bias = bias + output.bias.detach()
    output.bias = nn.Parameter(bias.to(weight.dtype))


def llm_pruner(
    model: Transformer, windows: Sequence[Window], budget: int, kinds: Sequence[str] = BOTH, protect: bool = True
) -> None:
    """LLM-Pruner (param_first): score of a unit = the sum of |w * dL/dw| over its weights in all coupled projections,
    L the mean loss on 10 pieces of 64 tokens; the same ratio in every layer that is not protected.

    `protect`: the first 4 and the last 2 of 32 layers are left alone, scaled to the model's depth. That is the
    opposite of HARP's prior. Its published code, written before grouped-query attention, folds query head j onto
    key/value head j mod n_kv_heads; here it is j // group, the head that serves it.
    """
    n_layers = len(model.blocks)
    first, last = (round(n_layers * 4 / 32), n_layers - round(n_layers * 2 / 32)) if protect else (0, n_layers)
    candidates = [sublayer for sublayer in sublayers(model, kinds) if first <= sublayer.layer < last]
    scores = taylor(model, candidates, pieces(windows, 10, 64))
    for sublayer, some, loss in zip(candidates, scores, same_ratio(candidates, budget)):
        remove_lowest_(model, sublayer, some, loss)


def pieces(windows: Sequence[Window], n: int, tokens: int) -> Tensor:
    """Ids (n, tokens) from places spread over the text. Raises UserError if it is too short."""
    all_pieces = [piece for window in windows for piece in window.ids.split(tokens) if len(piece) == tokens]
    if len(all_pieces) < n:
        raise UserError(f"the text has {len(all_pieces)} pieces of {tokens} tokens within its windows; {n} are needed")
    return torch.stack([all_pieces[i * len(all_pieces) // n] for i in range(n)])


def taylor(model: Transformer, candidates: Sequence[Sublayer], ids: Tensor) -> list[Tensor]:
    """The sum of |w * dL/dw| over every unit's weights, (1, units) for each sublayer. ids: (B, T)."""
    ids = ids.to(model.device)
    loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    weights = [linear.weight for sublayer in candidates for linear in (*sublayer.inner, sublayer.output)]
    gradients = torch.autograd.grad(loss, weights)
    salience = ((w.detach().double() * g).abs() for w, g in zip(weights, gradients))  # one at a time
    scores = []
    for sublayer in candidates:
        rows = [next(salience).sum(1).unflatten(0, (sublayer.units, -1)).sum(1) for _ in sublayer.inner]
        scores.append(sum(rows) + sublayer.per_unit(next(salience).sum(0)))
    return scores


def attention_drop(model: Transformer, windows: Sequence[Window], budget: int) -> None:
    """Attention-Drop: score of an attention sublayer = 1 - mean_t cos(h_t, h_t + Post(Attn(Norm(h)))_t), the residual
    stream before and after it; the lowest go, all at once and whole.

    Their number is the one whose parameters come nearest to the budget. Source: He et al. 2024.
    """
    candidates = sublayers(model, (ATTENTION,))
    check_budget(candidates, budget)
    layers = [sublayer.layer for sublayer in candidates]
    scores = {layer: cosine_distance(h, update) for layer, h, update, _ in attention_updates(model, windows, layers)}
    for layer in sorted(layers, key=scores.get):
        size = count(model.blocks[layer].attn)
        if budget < size / 2:
            break
        drop_attention_(model, layer)
        budget -= size


def cosine_distance(hiddens: list[Tensor], updates: list[Tensor]) -> float:
    """1 - the mean over all tokens of cos(h, h + update). Both: (1, T, D) for every window."""
    h, update = torch.cat(hiddens, dim=1).double(), torch.cat(updates, dim=1).double()
    return 1 - F.cosine_similarity(h, h + update, dim=-1).mean().item()


def harp_flap(model: Transformer, windows: Sequence[Window], budget: int) -> None:
    """FLAP on the MLP channels of a model that carries HARP's alphas: what the commands released with HARP run.

    HARP's pruning is made final first, and the statistics are those of the pruned model. `budget` is what goes beyond
    HARP's share; theirs is 0.9 to 2.0 % of the MLP's parameters, on 1,024 pieces of 128 tokens.
    """
    flap(model.prune_(), windows, budget, kinds=(MLP,))


# ----------------------------------------------------------------------- what a shrunk model costs, counted on itself


def linear_parameters(model: Transformer) -> int:
    """Parameters of the projections that are there, and of constants in their place. Of a model whose pruning is
    final, as all below."""
    counted = (p for name, p in model.named_parameters() if "_proj." in name or name.endswith(".constant"))
    return sum(parameter.numel() for parameter in counted)


def removed_parameters(model: Transformer) -> int:
    """How many linear parameters this model lacks, compared with a dense one of its config."""
    return cost.linear_parameters(model.config) - linear_parameters(model)


def model_parameters(model: Transformer) -> int:
    """All parameters; a tied head is the embedding, which counts once."""
    return count(model)


def model_kv_values(model: Transformer) -> int:
    """Numbers that the KV cache keeps of one token; times 2 bytes in bfloat16."""
    attending = [block.attn for block in model.blocks if block.attention_mode == "full"]
    return sum(attn.k_proj.out_features + attn.v_proj.out_features for attn in attending)


def model_prefill_flops(model: Transformer, tokens: int) -> float:
    """FLOPs from a prompt of `tokens` to the logits of its last position, by the convention of cost.py."""
    weights = sum(p.numel() for name, p in model.named_parameters() if name.endswith("_proj.weight"))
    flops = 2.0 * tokens * weights + cost.head_flops(model.config, 1)
    for block in model.blocks:
        if block.attention_mode == "full":  # q.k and weights.v
            flops += 4 * block.attn.q_proj.out_features * cost.seen_pairs(tokens, block.attn.window)
    return flops
