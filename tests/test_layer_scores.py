"""Layer scores against slow, direct computations; constants; layers picked by their cost."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import VARIANTS, rewrite_weights

import harp
from eval_ppl import advance, embed, make_windows, perplexity
from extras import export_hf
from extras.layer_scores import (
    attention_updates, attention_weights, cheapest, fisher_scores, layer_costs, layer_facts, least_squares_alpha,
    rank_correlation, running_mean_update, similarity,
)  # fmt: skip
from harp import alphas_after, attention_means, search, set_alphas
from load_weights import load, save
from model import repeat_kv


@pytest.fixture(params=VARIANTS)
def model(stock, request):
    return load(stock(request.param)[0], torch.float32)


@pytest.fixture
def windows():
    return make_windows(torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(5)).tolist(), 40)


@torch.inference_mode()
def test_the_weights_are_those_of_attention(model, windows):
    hiddens = embed(model, windows)
    for layer, block in enumerate(model.blocks):
        h = hiddens[0]
        weights = attention_weights(block, h, model.rope(h))  # (1, n_heads, T, T)
        values = repeat_kv(block.attn.heads(block.attn.v_proj(block.attn_norm(h))), model.config.n_heads)
        update = block.attn_post_norm(block.attn.o_proj((weights @ values).transpose(1, 2).flatten(2)))
        torch.testing.assert_close(update, block.attention_update(h, model.rope(h)), atol=1e-5, rtol=1e-5)
        hiddens = advance(model, hiddens, [layer])


@torch.inference_mode()
def test_the_running_mean_is_attention_without_queries(stock):
    """With equal scores softmax is uniform. Without a window, that is the mean of all tokens so far."""
    for variant in ("llama", "qwen2"):
        model = load(stock(variant)[0], torch.float32)
        h = model.embed(torch.arange(30)[None])
        block = model.blocks[1]
        for parameter in block.attn.q_proj.parameters():
            parameter.zero_()
        uniform = block.attention_update(h, model.rope(h))
        torch.testing.assert_close(running_mean_update(block, h), uniform, atol=1e-5, rtol=1e-5)


def test_similarity_is_the_mean_cosine_of_all_pairs():
    x = torch.randn(17, 5)
    cosines = F.cosine_similarity(x[:, None], x[None], dim=-1)
    expected = cosines[~torch.eye(17, dtype=torch.bool)].mean()
    torch.testing.assert_close(similarity(x), expected)


def test_least_squares_alpha_is_what_a_solver_finds():
    a, u = torch.randn(2, 40, 6)
    a = a + u
    solution = torch.linalg.lstsq(u.reshape(-1, 1), a.reshape(-1, 1)).solution.item()
    assert least_squares_alpha([a[:10], a[10:]], [u[:10], u[10:]]) == pytest.approx(solution, rel=1e-5)
    assert least_squares_alpha([-u], [u]) == 0.0


def test_facts_against_direct_computations(model, windows):
    facts = layer_facts(model, windows)
    for fact, (_, hiddens, attention, updates) in zip(facts, attention_updates(model, windows, range(5))):
        H, A, U = (torch.cat([x[0, 1:] for x in xs]) for xs in (hiddens, attention, updates))
        assert fact.norm_alpha == pytest.approx((A.norm() / U.norm()).item(), rel=1e-4)
        scales = torch.linspace(fact.ls_alpha - 0.1, fact.ls_alpha + 0.1, 21)
        errors = [((A - scale * U).norm() / A.norm()).item() for scale in scales]
        if fact.ls_alpha > 0:
            assert min(range(21), key=errors.__getitem__) == 10
            assert fact.vo_scaled_error == pytest.approx(errors[10], abs=1e-3)
            # the norm match is least squares divided by the cosine: never smaller
            cosine = (A * U).sum() / (A.norm() * U.norm())
            assert fact.norm_alpha == pytest.approx(fact.ls_alpha / cosine.item(), rel=1e-3)
        assert fact.share == pytest.approx((A.norm(dim=1) / H.norm(dim=1)).mean().item(), rel=1e-4)
        block, alpha = model.blocks[fact.layer], fact.ls_alpha
        outputs = torch.cat([block(h, model.rope(h))[0, 1:] for h in hiddens])
        distances = [1 - (H * x).sum(1) / (H.norm(dim=1) * x.norm(dim=1)) for x in (outputs, H + A)]
        assert fact.block_importance == pytest.approx(distances[0].mean().item(), abs=1e-5)
        assert fact.attention_distance == pytest.approx(distances[1].mean().item(), abs=1e-5)
        assert fact.residual == pytest.approx(((A - alpha * U).norm(dim=1) / H.norm(dim=1)).mean().item(), rel=1e-4)
        M = torch.cat([running_mean_update(block, h)[0, 1:] for h in hiddens])
        for found, X in ((fact.vo_error, U), (fact.mean_error, M), (fact.constant_error, A.mean(0))):
            assert found == pytest.approx(((A - X).norm() / A.norm()).item(), rel=1e-4)
        cosines = [F.cosine_similarity(h[0, 1:, None], h[0, None, 1:], dim=-1) for h in hiddens]
        off_diagonal = [c[~torch.eye(len(c), dtype=torch.bool)].mean() for c in cosines]
        assert fact.similarity == pytest.approx(torch.stack(off_diagonal).mean().item(), abs=1e-5)
        assert 0 < fact.entropy < 1 and fact.sink + fact.itself + fact.previous <= 1 + 1e-5


def test_masses_and_entropy_of_known_weights():
    from extras.layer_scores import where_it_looks

    uniform = torch.tril(torch.ones(4, 4))
    entropy, sink, itself, previous = where_it_looks((uniform / uniform.sum(1, keepdim=True))[None, None]).tolist()
    assert entropy == pytest.approx(1.0)
    assert sink == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert itself == pytest.approx(sink)
    assert previous == pytest.approx((1 / 3 + 1 / 4) / 3)  # token 1's predecessor is the sink
    assert where_it_looks(torch.eye(4)[None, None]).tolist() == [0, 0, 1, 0]


def test_the_cost_of_a_layer_is_perplexity_with_it_alone_pruned(model, windows):
    costs = layer_costs(model, windows)
    assert set(costs) == set(range(5))
    for layer, (alpha, ppl) in costs.items():
        set_alphas(model, {layer: alpha})
        assert ppl == pytest.approx(perplexity(model, windows).ppl, rel=1e-6)


def test_the_cheapest_come_first():
    assert cheapest({0: (0.1, 9.0), 1: (0.9, 3.0), 2: (0.5, float("inf")), 3: (0.2, 5.0)}, 3) == [1, 3, 0]


def test_fisher_scores_against_gradients_taken_one_at_a_time(stock, windows):
    model = load(stock("llama")[0], torch.float32)
    scores = fisher_scores(model, windows)
    for layer in (0, 3):
        block, squares, rises = model.blocks[layer], 0.0, []
        for window in windows:
            ids, weights = window.ids[None], (block.attn.q_proj.weight, block.attn.k_proj.weight)
            h = model.embed(ids)
            rope = model.rope(h)
            for below in model.blocks[:layer]:
                h = below(h, rope)
            a = block.attention_update(h, rope)
            middle = h + a
            out = block.add_mlp(middle)
            for above in model.blocks[layer + 1 :]:
                out = above(out, rope)
            loss = F.cross_entropy(model.head(out)[0, :-1], ids[0, 1:])
            *by_weight, g = torch.autograd.grad(loss, [*weights, middle])
            squares += sum((w**2 * dw**2).sum().item() for w, dw in zip(weights, by_weight)) / 2 / len(windows)
            rises.append((g, a.detach(), block.vo_update(h).detach()))
        alpha = least_squares_alpha([a for _, a, _ in rises], [u for *_, u in rises])
        rise = torch.cat([(g * (alpha * u - a)).sum(-1)[0] for g, a, u in rises]).square().mean().item() / 2
        assert scores[layer] == pytest.approx((squares, rise), rel=1e-4)


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 200, 3000, 9999]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3], [2, 1, 3]) == pytest.approx(0.5)
    inf = float("inf")
    assert rank_correlation([1, 2, 3, 3], [1, 2, inf, inf]) == pytest.approx(1)  # equals share their rank


# ---------------------------------------------------------------------------------------------------------- constants


def test_the_constant_keeps_the_mean_update(model, windows):
    means = attention_means(model, windows, [2, 4])
    set_alphas(model, {2: 0.3, 4: 0.0}, means)
    for layer, _, attention, updates in attention_updates(load_dense(model), windows, [2, 4]):
        block = model.blocks[layer]
        kept = torch.cat([block.alpha * u + block.constant for u in updates], dim=1).mean((0, 1))
        torch.testing.assert_close(kept, torch.cat(attention, dim=1).mean((0, 1)), atol=1e-5, rtol=1e-4)


def load_dense(model):
    """The same weights without alphas."""
    from extras.timing import pruned_twin

    return pruned_twin(model, {})


def test_a_search_with_constants_tries_what_the_model_then_computes(model, windows):
    means = attention_means(model, windows, [4, 3])
    for method in ("grid", "fibonacci"):
        steps = search(model, windows, [4, 3], [0, 0.25, 0.5, 1], method=method, means=means)
        assert steps[-1].ppl == pytest.approx(perplexity(model, windows).ppl, rel=1e-6)
        for alpha, ppl in steps[-1].tried:
            set_alphas(model, {4: steps[0].alpha, 3: alpha}, means)
            assert ppl == pytest.approx(perplexity(model, windows).ppl, rel=1e-6)
    swept = search(model, windows, [4, 3], [0, 0.25, 0.5, 1], means=means, sweeps=1)
    assert swept[-1].ppl <= steps[-1].ppl
    assert swept[-1].ppl == pytest.approx(perplexity(model, windows).ppl, rel=1e-6)


def test_constants_survive_pruning_and_disk(model, windows, stock, tmp_path, request):
    ids = windows[0].ids[None]
    set_alphas(model, {4: 0.5, 2: 0.0}, attention_means(model, windows, [4, 2]))
    with torch.inference_mode():
        expected = model(ids)
        torch.testing.assert_close(model.prune_()(ids), expected, atol=2e-5, rtol=1e-5)
        save(model, tmp_path, stock(request.node.callspec.params["model"])[0])
        again = load(tmp_path)
        torch.testing.assert_close(again(ids), expected, atol=2e-5, rtol=1e-5)
        assert again.pruned == model.pruned and again.blocks[2].constant is not None
        assert torch.equal(again.generate(ids[:, :8], 8), model.generate(ids[:, :8], 8))


def test_a_folder_that_lost_its_constants_is_refused(stock, windows, tmp_path):
    source = stock("llama")[0]
    model = load(source, torch.float32)
    set_alphas(model, {4: 0.5}, attention_means(model, windows, [4]))
    save(model, tmp_path, source)
    rewrite_weights(tmp_path, lambda weights: weights.pop("model.layers.4.self_attn.constant"))
    with pytest.raises(harp.UserError, match=r"lacks 1 tensors .*layers\.4\.self_attn\.constant"):
        load(tmp_path)


@pytest.mark.parametrize("constants", [True, [5], [1], ["4"], {}])
def test_constants_that_make_no_sense_are_refused(stock, tmp_path, constants):
    source = stock("llama")[0]
    model = load(source, torch.float32)
    set_alphas(model, {4: 0.5})
    save(model, tmp_path, source)
    config = json.loads((tmp_path / "config.json").read_text())
    config["harp"]["constants"] = constants
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(harp.UserError, match="no list of pruned layers"):
        load(tmp_path)


def test_some_pruned_layers_may_have_constants(stock, windows, tmp_path):
    source = stock("llama")[0]
    model = load(source, torch.float32)
    set_alphas(model, {4: 0.5, 3: 0.5}, attention_means(model, windows, [4]))
    save(model, tmp_path, source)
    assert [block.constant is not None for block in load(tmp_path).blocks] == [False] * 4 + [True]


@pytest.mark.parametrize("variant", ["llama", "mistral-tied", "qwen2"])
def test_an_export_has_the_constants_in_its_biases(variant, stock, windows, tmp_path):
    model = load(stock(variant)[0], torch.float32)
    set_alphas(model, {4: 0.5, 2: 0.0}, attention_means(model, windows, [4, 2]))
    save(model, tmp_path / "pruned", stock(variant)[0])
    export_hf.export(tmp_path / "pruned", tmp_path / "stock")  # compares the logits, eager, sdpa and decoding
    assert json.loads((tmp_path / "stock" / "config.json").read_text())["model_type"] == "llama"


def test_gemma2_has_no_place_for_a_constant(stock, windows, tmp_path):
    model = load(stock("gemma2")[0], torch.float32)
    set_alphas(model, {4: 0.5}, attention_means(model, windows, [4]))
    save(model, tmp_path / "pruned", stock("gemma2")[0])
    with pytest.raises(harp.UserError, match="no bias after its norm"):
        export_hf.export(tmp_path / "pruned", tmp_path / "stock")


# ----------------------------------------------------------------------------------------------------- the command line

SMALL = ["--ctx", "24", "--windows", "2", "--grid", "0,0.5,1"]


def test_select_and_bias_from_the_command_line(toy, tmp_path, capsys):
    command = ["--ckpt", str(toy), "--top", "2", "--select", "cost", "--bias", "--out", str(tmp_path / "out"), *SMALL]
    assert harp.main(command) == 0
    first = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "harp.json").read_text())
    costs = {row["layer"]: row["ppl"] for row in report["layer_costs"]}
    assert len(costs) == 5
    assert {step["layer"] for step in report["steps"]} == set(sorted(costs, key=costs.__getitem__)[:2])
    assert load(tmp_path / "out").blocks[report["steps"][0]["layer"]].constant is not None
    assert report["heldout_ppl"]["saved"] == pytest.approx(report["heldout_ppl"]["pruned"], rel=1e-4)
    assert harp.main(command) == 0  # the same table, from the report
    assert capsys.readouterr().out == first


def test_an_interrupted_run_with_both_ends_the_same(toy, tmp_path, monkeypatch):
    command = ["--ckpt", str(toy), "--top", "3", "--select", "cost", "--bias", *SMALL]
    assert harp.main([*command, "--out", str(tmp_path / "whole")]) == 0
    step = harp.print_step
    monkeypatch.setattr(harp, "print_step", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert harp.main([*command, "--out", str(tmp_path / "twice")]) == 130
    monkeypatch.setattr(harp, "print_step", step)
    monkeypatch.setattr(harp, "layer_costs", None)  # they are on disk
    assert harp.main([*command, "--out", str(tmp_path / "twice")]) == 0
    whole, twice = (json.loads((tmp_path / name / "harp.json").read_text()) for name in ("whole", "twice"))
    for key in ("layer_costs", "heldout_ppl"):
        assert whole[key] == twice[key]
    assert [s["tried"] for s in whole["steps"]] == [s["tried"] for s in twice["steps"]]


def test_a_list_of_layers_leaves_nothing_to_select(toy, capsys):
    assert harp.main(["--ckpt", str(toy), "--layers", "3", "--select", "cost"]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_alphas_after_are_unchanged_without_means(stock, windows):
    """The default is the paper's method: no constant anywhere."""
    model = load(stock("llama")[0], torch.float32)
    steps = search(model, windows, [4], [0, 0.5])
    assert all(block.constant is None for block in model.blocks) and set(alphas_after(steps)) == {4}
