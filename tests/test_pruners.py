"""The competitors: what they score, what they choose, and that what they remove is really gone."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import SHAPE, VARIANTS

import cost
from checkpoint import UserError
from eval_ppl import make_windows
from extras import pruners
from extras.pruners import ATTENTION, MLP
from harp import set_alphas
from load_weights import load
from model import KVCache, Transformer

D, HEAD_DIM, N_KV, CHANNELS = 64, 24, 2, 96
GROUP = SHAPE["num_attention_heads"] // N_KV
HEAD, CHANNEL = D * HEAD_DIM * (2 * GROUP + 2), 3 * D  # what units cost without biases

METHODS = {
    "mag": pruners.mag_sp,
    "mag-query": lambda *args: pruners.mag_sp(*args, kinds=(ATTENTION,), heads="query"),
    "wanda": pruners.wanda_sp,
    "wanda-query": lambda *args: pruners.wanda_sp(*args, kinds=(ATTENTION,), heads="query"),
    "flap": pruners.flap,
    "flap-attention": lambda *args: pruners.flap(*args, kinds=(ATTENTION,)),
    "flap-mlp": lambda *args: pruners.flap(*args, kinds=(MLP,)),
    "llm": pruners.llm_pruner,
    "llm-unprotected": lambda *args: pruners.llm_pruner(*args, protect=False),
    "drop": pruners.attention_drop,
}


@pytest.fixture(scope="module")
def windows():
    ids = torch.randint(0, SHAPE["vocab_size"], (700,), generator=torch.Generator().manual_seed(2))
    return make_windows(ids.tolist(), 128)


@pytest.fixture
def dense(stock):
    """variant -> a fresh model of it."""
    return lambda variant="llama": load(stock(variant)[0])


def mask_(model, sublayer, keep):
    """The slow, sure way to remove features: nothing reads them."""
    with torch.no_grad():
        sublayer.output.weight[:, ~keep] = 0


def logits(model, ids):
    with torch.inference_mode():
        return model(ids)


def assert_same_logits(one, other, ids):
    expected = logits(other, ids)
    assert (logits(one, ids) - expected).abs().max() <= 1e-5 * expected.abs().max()


def seen_by(projection, run):
    """All that a projection reads while `run` runs, (tokens, features), in float64."""
    seen = []
    hook = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1).double()))
    with torch.inference_mode():
        run()
    hook.remove()
    return torch.cat(seen)


def read_all(model, windows):
    for window in windows:
        model(window.ids[None])


def output_of(model, layer, kind):
    block = model.blocks[layer]
    return block.attn.o_proj if kind == ATTENTION else block.mlp.down_proj


def recorded(monkeypatch, name):
    """Every call of a function of pruners: its arguments, in order."""
    calls, function = [], getattr(pruners, name)
    monkeypatch.setattr(pruners, name, lambda *args: calls.append(args) or function(*args))
    return calls


# ----------------------------------------------------------------------------------------------------------- removing


@pytest.mark.parametrize("method", [name for name in METHODS if name != "drop"])
@pytest.mark.parametrize("variant", ["llama-biases", "mistral-window", "qwen2", "gemma2"])
def test_shrunk_equals_masked(dense, windows, ids, monkeypatch, variant, method):
    shrunk, masked, original = dense(variant), dense(variant), dense(variant)
    METHODS[method](shrunk, windows, 25_000)
    monkeypatch.setattr(pruners, "remove_", mask_)
    METHODS[method](masked, windows, 25_000)
    assert_same_logits(shrunk, masked, ids)
    assert (logits(shrunk, ids) - logits(original, ids)).abs().max() > 0.1
    assert pruners.removed_parameters(shrunk) >= 25_000


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_left_of_a_sublayer(dense, ids, variant):
    """No heads: the bias alone. No channels: the bias alone."""
    shrunk, masked = dense(variant), dense(variant)
    units = [sublayer.units * sublayer.cost for sublayer in pruners.sublayers(shrunk)]
    new_bias = 0 if shrunk.config.o_bias else D
    for model, remove in ((shrunk, pruners.remove_), (masked, mask_)):
        for sublayer in pruners.sublayers(model):
            if (sublayer.layer, sublayer.kind) in ((1, ATTENTION), (2, MLP), (3, ATTENTION)):
                if sublayer.layer == 3:  # as FLAP leaves it: with a bias, in every family
                    sublayer.output.bias = torch.nn.Parameter(torch.linspace(-1, 1, D))
                remove(model, sublayer, torch.zeros(sublayer.output.in_features, dtype=torch.bool))
    assert_same_logits(shrunk, masked, ids)
    assert shrunk.blocks[1].attn is None and shrunk.blocks[2].mlp.down_proj.in_features == 0
    assert pruners.removed_parameters(shrunk) == units[1] + units[5 + 2] + units[3] - new_bias
    assert_generates_as_it_reads(shrunk, ids)


@pytest.mark.parametrize("variant", ["llama-biases", "mistral-window", "gemma2"])
@pytest.mark.parametrize("method", ["wanda-query", "flap", "llm"])
def test_generation_with_a_cache(dense, windows, ids, variant, method):
    model = dense(variant)
    METHODS[method](model, windows, 25_000)
    assert_generates_as_it_reads(model, ids)


def assert_generates_as_it_reads(model, ids):
    generated = model.generate(ids, 6)
    assert torch.equal(generated[:, ids.shape[1] :], logits(model, generated[:, :-1])[:, ids.shape[1] - 1 :].argmax(-1))


def test_layers_keep_different_heads(dense, windows):
    """Otherwise the tests above would say little."""
    model = dense()
    METHODS["flap-attention"](model, windows, 28_000)
    kept = {0 if block.attn is None else block.attn.k_proj.out_features // HEAD_DIM for block in model.blocks}
    assert len(kept) > 1


# --------------------------------------------------------------------------------------------------- units and budgets


def test_costs_of_units(dense):
    by_kind = {sublayer.kind: sublayer for sublayer in pruners.sublayers(dense())}
    assert by_kind[ATTENTION].cost == HEAD and by_kind[MLP].cost == CHANNEL
    (query, *_) = pruners.sublayers(dense(), (ATTENTION,), heads="query")
    assert query.cost == N_KV * 2 * HEAD_DIM * D


@pytest.mark.parametrize("variant", ["llama-biases", "gemma2"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [1, 28_111])
def test_budget_is_met_within_a_unit(dense, windows, variant, method, budget):
    model = dense(variant)
    unit = max(sublayer.cost for sublayer in pruners.sublayers(model, (ATTENTION,)))
    METHODS[method](model, windows, budget)
    over = pruners.removed_parameters(model) - budget
    if method == "drop":
        assert abs(over) <= pruners.count(dense(variant).blocks[0].attn) / 2
    else:
        # channels meet it more closely; FLAP's list may end with either
        finest = CHANNEL + 2 if method in ("mag", "wanda", "llm", "llm-unprotected", "flap-mlp") else unit
        assert 0 <= over < finest


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", ["llama-biases", "gemma2"])
def test_budget_zero_changes_nothing(dense, windows, variant, method):
    model, before = dense(variant), dense(variant).state_dict()
    METHODS[method](model, windows, 0)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert pruners.removed_parameters(model) == 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [-1, 10**9])
def test_impossible_budgets(dense, windows, method, budget):
    with pytest.raises(UserError, match="out of range"):
        METHODS[method](dense(), windows, budget)


def test_same_ratio_deals_out_the_remainder(dense):
    candidates = pruners.sublayers(dense())
    losses = pruners.same_ratio(candidates, 3 * HEAD + 7 * CHANNEL)
    heads, channels = losses[:5], losses[5:]
    # half of the budget would be 1.5 heads; they are rounded down, and the channels make up for it
    assert sum(heads) == 1 and sum(channels) == 2 * HEAD // CHANNEL + 7
    assert max(channels) - min(channels) == 1
    assert pruners.same_ratio(pruners.sublayers(dense(), (ATTENTION,)), 3 * HEAD) == [0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "kind, heads, scores, loss, left",
    [
        (ATTENTION, "kv", [[0.3, 0.2]], 1, [0]),
        (ATTENTION, "query", [[0.1, 0.2], [0.4, 0.3]], 1, [1, 2]),  # one of each group, though both of one are lower
        (MLP, "kv", [[float(channel * 7 % 96) for channel in range(96)]], 94, [41, 82]),  # 7 * 41 = 3 * 96 - 1
    ],
)
def test_the_lowest_go(dense, kind, heads, scores, loss, left):
    model, original = dense(), dense()
    sublayer = pruners.sublayers(model, (kind,), heads)[2]
    pruners.remove_lowest_(model, sublayer, torch.tensor(scores), loss)
    old = output_of(original, 2, kind).weight
    units = old.unflatten(1, (sum(map(len, scores)), -1))  # (D, units, features of one)
    assert torch.equal(output_of(model, 2, kind).weight, units[:, left].flatten(1))


@pytest.mark.parametrize("variant", ["llama", "llama-biases"])
def test_lowest_of_all_keeps_what_the_budget_leaves(dense, variant):
    """By the definition: down the list from the highest, as long as what is kept stays within the rest."""
    model = dense(variant)
    candidates = pruners.sublayers(model)
    torch.manual_seed(0)
    scores = [torch.randn(1, sublayer.units) for sublayer in candidates]
    new_bias = D if candidates[0].output.bias is None else 0
    for budget in (1, 1_000, 25_000, 100_000):
        rest = sum(sublayer.units * sublayer.cost for sublayer in candidates) - budget
        units = [(s, i, u) for i, some in enumerate(scores) for u, s in enumerate(some[0].tolist())]
        units.sort(reverse=True)
        for n in range(len(units), -1, -1):  # the longest list of kept units that fits
            held = [{u for _, i, u in units[:n] if i == j} for j in range(len(candidates))]
            sizes = [len(h) * s.cost + new_bias * (len(h) < s.units) for h, s in zip(held, candidates)]
            if sum(sizes) <= rest:
                break
        keep = pruners.lowest_of_all(candidates, scores, budget)
        assert [set(mask[0].nonzero().flatten().tolist()) for mask in keep] == held


# -------------------------------------------------------------------------------------------------------------- scores


def slow_units(features, kind, combine):
    """Feature scores, a list, combined over key/value heads or channels."""
    width = GROUP * HEAD_DIM if kind == ATTENTION else 1
    return [combine(features[start : start + width]) for start in range(0, len(features), width)]


def assert_scores(found, expected):
    torch.testing.assert_close(found.flatten().double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)


def test_magnitude_scores(dense, windows, monkeypatch):
    calls, original = recorded(monkeypatch, "remove_lowest_"), dense()
    pruners.mag_sp(dense(), windows, 25_000)
    assert len(calls) == 10
    for _, sublayer, scores, _ in calls:
        W = output_of(original, sublayer.layer, sublayer.kind).weight.tolist()
        features = [sum(row[j] ** 2 for row in W) ** 0.5 for j in range(len(W[0]))]
        assert_scores(scores, slow_units(features, sublayer.kind, sum))


def test_wanda_scores_see_the_pruned_layers_below(dense, windows, monkeypatch):
    calls, original, model = recorded(monkeypatch, "remove_lowest_"), dense(), dense()
    pruners.wanda_sp(model, windows, 25_000)
    for _, sublayer, scores, _ in calls:
        mixed = dense()  # pruned below this layer, dense from it on
        for below in range(sublayer.layer):
            mixed.blocks[below] = model.blocks[below]
        expected, of_dense = (
            slow_wanda(m, output_of(m, sublayer.layer, sublayer.kind), sublayer.kind, windows)
            for m in (mixed, original)
        )
        assert_scores(scores, expected)
        assert sublayer.layer == 0 or not torch.allclose(torch.tensor(expected), torch.tensor(of_dense), rtol=1e-3)
    assert {sublayer.layer for _, sublayer, _, _ in calls} == set(range(5))


def slow_wanda(model, output, kind, windows):
    z, W = seen_by(output, lambda: read_all(model, windows)), output.weight.detach()
    features = [(z[:, j].norm() * W[:, j].abs().mean()).item() for j in range(W.shape[1])]
    return slow_units(features, kind, sum)


@pytest.mark.parametrize("square_attention", [False, True])
def test_flap_scores(dense, windows, monkeypatch, square_attention):
    calls, original = recorded(monkeypatch, "lowest_of_all"), dense("qwen2")
    pruners.flap(dense("qwen2"), windows, 25_000, square_attention=square_attention)
    ((candidates, scores, _),) = calls
    for sublayer, found in zip(candidates, scores):
        output = output_of(original, sublayer.layer, sublayer.kind)
        z, W = seen_by(output, lambda: read_all(original, windows)), output.weight.detach().double()
        features = [z[:, j].var(correction=0) * W[:, j].norm() ** 2 for j in range(W.shape[1])]
        features = torch.tensor(features) ** (2 if square_attention and sublayer.kind == ATTENTION else 1)
        features = ((features - features.mean()) / features.std()).tolist()
        assert_scores(found, slow_units(features, sublayer.kind, lambda some: sum(some) / len(some)))


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "gemma2"])
@pytest.mark.parametrize("method", ["flap", "flap-attention", "flap-mlp"])
def test_flap_bias_keeps_the_mean_output(dense, windows, monkeypatch, variant, method):
    removed = recorded(monkeypatch, "remove_")
    model, original = dense(variant), dense(variant)
    METHODS[method](model, windows, 25_000)
    assert removed
    for _, sublayer, keep in removed:
        layer, kind = sublayer.layer, sublayer.kind
        old = output_of(original, layer, kind)
        z = seen_by(old, lambda: read_all(original, windows)).float()
        if (
            kind == ATTENTION and model.blocks[layer].attn is None
        ):  # its constant: the bias, after the norm that follows
            new_mean = model.blocks[layer].constant
            old_mean = original.blocks[layer].attn_post_norm(old(z).mean(0))
        else:
            new_mean, old_mean = output_of(model, layer, kind)(z[:, keep]).mean(0), old(z).mean(0)
        torch.testing.assert_close(new_mean, old_mean, atol=1e-5, rtol=1e-4)


def test_taylor_against_finite_differences(dense, windows, monkeypatch):
    monkeypatch.setattr(
        torch.Tensor, "float", torch.Tensor.double
    )  # differences need more than float32, norms included
    model = dense("gemma2").double()
    ids = pruners.pieces(windows, 10, 64)[:1, :16]
    candidates = pruners.sublayers(model)
    scores = pruners.taylor(model, candidates, ids)

    def loss():
        return F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()

    def slope(weight, row, column, step=1e-5):
        with torch.no_grad():
            weight[row, column] += step
            higher = loss()
            weight[row, column] -= 2 * step
            lower = loss()
            weight[row, column] += step
        return (higher - lower) / (2 * step)

    mlp, channel = model.blocks[3].mlp, 17  # all of its 3 * 64 weights
    expected = 0.0
    for d in range(D):
        for weight, row, column in (
            (mlp.gate_proj.weight, channel, d),
            (mlp.up_proj.weight, channel, d),
            (mlp.down_proj.weight, d, channel),
        ):
            expected += abs(weight[row, column].item() * slope(weight, row, column))
    assert scores[5 + 3][0, channel].item() == pytest.approx(expected, rel=1e-4)


def test_taylor_of_a_head(dense, windows):
    """All coupled rows and columns, query heads under the key/value head that serves them."""
    model = dense("qwen2")
    ids = pruners.pieces(windows, 10, 64)
    scores = pruners.taylor(model, pruners.sublayers(model, (ATTENTION,)), ids)
    losses = [F.cross_entropy(model(piece[None])[0, :-1], piece[1:]) for piece in ids]  # all of the same length
    torch.stack(losses).mean().backward()
    for block, found in zip(model.blocks, scores):
        attn, expected = block.attn, [0.0] * N_KV
        for linear, rows_per_kv in ((attn.q_proj, GROUP * HEAD_DIM), (attn.k_proj, HEAD_DIM), (attn.v_proj, HEAD_DIM)):
            for row, values in enumerate((linear.weight * linear.weight.grad).abs().sum(1).tolist()):
                expected[row // rows_per_kv] += values
        for column, values in enumerate((attn.o_proj.weight * attn.o_proj.weight.grad).abs().sum(0).tolist()):
            expected[column // (GROUP * HEAD_DIM)] += values
        assert_scores(found, expected)


def test_pieces(windows):
    pieces = pruners.pieces(windows, 10, 64)
    assert pieces.shape == (10, 64) and torch.equal(pieces[1], windows[0].ids[64:])
    assert torch.equal(pruners.pieces(windows, 5, 64), pieces[::2])  # from all over the text
    with pytest.raises(UserError, match="are needed"):
        pruners.pieces(windows, 11, 64)


@pytest.mark.parametrize("n_layers, first, last", [(16, 2, 1), (30, 4, 2), (32, 4, 2)])
def test_protected_layers(dense, windows, n_layers, first, last):
    config = replace(dense().config, n_layers=n_layers, sliding_windows=(None,) * n_layers)
    torch.manual_seed(0)
    model = Transformer(config).eval()
    dense_size = pruners.count(model.blocks[0])
    pruners.llm_pruner(model, windows, cost.linear_parameters(config) // 2)
    untouched = [layer for layer, block in enumerate(model.blocks) if pruners.count(block) == dense_size]
    assert untouched == [*range(first), *range(n_layers - last, n_layers)]


@pytest.mark.parametrize("variant", ["llama-biases", "gemma2"])
def test_attention_drop(dense, windows, ids, variant):
    model, original, windows = dense(variant), dense(variant), windows[:2]
    changes = []
    for block in original.blocks:  # the norm of the MLP reads the stream after attention
        before = seen_by(block.attn_norm, lambda: read_all(original, windows))
        after = seen_by(block.mlp_norm, lambda: read_all(original, windows))
        changes.append((1 - F.cosine_similarity(before, after)).mean().item())
    lowest = sorted(range(5), key=changes.__getitem__)[:2]
    pruners.attention_drop(model, windows, 2 * pruners.count(original.blocks[0].attn))
    assert {layer for layer, block in enumerate(model.blocks) if block.attn is None} == set(lowest)
    set_alphas(original, dict.fromkeys(lowest, 0.0))
    assert_same_logits(model, original, ids)


# --------------------------------------------------------------------------------------------- with HARP, and counting


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2", "gemma2"])
def test_flap_after_harp(dense, windows, ids, monkeypatch, variant):
    alphas = {4: 0.5, 3: 0.0, 2: 0.7}
    shrunk, masked = dense(variant), dense(variant)
    set_alphas(shrunk, alphas)
    set_alphas(masked, alphas)
    pruners.harp_flap(shrunk, windows, 10_000)
    of_harp = cost.linear_parameters(shrunk.config) - cost.linear_parameters(shrunk.config, alphas)
    assert 0 <= pruners.removed_parameters(shrunk) - of_harp - 10_000 < CHANNEL + 2
    monkeypatch.setattr(pruners, "remove_", mask_)
    pruners.harp_flap(masked, windows, 10_000)
    assert_same_logits(shrunk, masked, ids)
    assert_generates_as_it_reads(shrunk, ids)
    assert pruners.model_kv_values(shrunk) == cost.kv_bytes(shrunk.config, 1, alphas, bytes_per_value=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("alphas", [{}, {4: 0.5, 3: 0.0, 1: 1.0}], ids=["dense", "harp"])
def test_counts_agree_with_cost(dense, variant, alphas):
    model = dense(variant)
    set_alphas(model, alphas)
    model.prune_()
    config = model.config
    assert pruners.linear_parameters(model) == cost.linear_parameters(config, alphas)
    assert pruners.removed_parameters(model) == cost.linear_parameters(config) - cost.linear_parameters(config, alphas)
    assert pruners.model_parameters(model) == cost.parameters(config, alphas)
    assert pruners.model_kv_values(model) == cost.kv_bytes(config, 1, alphas, bytes_per_value=1)
    for tokens in (5, 8192):
        assert pruners.model_prefill_flops(model, tokens) == cost.prefill_flops(config, tokens, alphas)


@pytest.mark.parametrize("variant", ["llama", "gemma2"])
def test_counts_of_a_shrunk_model(dense, windows, variant):
    model = dense(variant)
    METHODS["flap-attention"](model, windows, 28_000)
    METHODS["flap-mlp"](model, windows, 20_000)
    assert pruners.model_kv_values(model) < 5 * 2 * N_KV * HEAD_DIM
    cache = KVCache(5, 4)
    with torch.inference_mode():
        model(torch.zeros(1, 4, dtype=torch.int64), cache)
    held = sum(t.numel() for layer in cache.layers if layer for t in layer)
    assert pruners.model_kv_values(model) * 4 == held
    flops = 2 * D * SHAPE["vocab_size"]  # by hand, from the shapes
    for block, window in zip(model.blocks, model.config.sliding_windows):
        flops += 2 * 100 * 3 * D * block.mlp.down_proj.in_features
        if block.attn is not None:
            kv = block.attn.k_proj.out_features
            pairs = 100**2 / 2 - (0 if window is None else (100 - window) ** 2 / 2)
            flops += 2 * 100 * 2 * D * kv * (GROUP + 1) + 4 * kv * GROUP * pairs
    assert pruners.model_prefill_flops(model, 100) == flops
