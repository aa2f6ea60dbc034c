"""The model against golden logits, against stock transformers, and against itself with a bug in it."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from conftest import FAMILIES, GOLDEN, TOLERANCE, VARIANTS
from safetensors.torch import load_file

import load_weights
import model as model_module
from load_weights import load
from model import Block, ModelConfig, RMSNorm, Transformer, attend, rope_frequencies


def prune(model: Transformer, alphas: dict[int, float]) -> Transformer:
    for layer, alpha in alphas.items():
        model.blocks[layer].attention_mode = "vo"
        model.blocks[layer].alpha = alpha
    return model


@torch.inference_mode()
def worst(model: Transformer, ids: torch.Tensor, logits: torch.Tensor) -> float:
    return (model(ids) - logits).abs().max().item()


# ------------------------------------------------------------------------------------------------------------ parity


@pytest.mark.parametrize("made_final", [False, True], ids=["flags", "prune_"])
@pytest.mark.parametrize("case", ["logits_full", "logits_top2", "logits_top3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family, case, made_final):
    golden = load_file(GOLDEN / family / "golden.safetensors")
    facts = json.loads((GOLDEN / family / "golden.json").read_text())["cases"][case]
    model = prune(load(GOLDEN / family), dict(zip(facts["pruned_layers"], facts["alphas"])))
    before = sum(p.numel() for p in model.parameters())
    if made_final:
        model.prune_()
        assert (sum(p.numel() for p in model.parameters()) < before) == (case != "logits_full")
    assert worst(model, golden["input_ids"], golden[case]) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_stock_transformers_logits(stock, ids, variant):
    folder, reference = stock(variant)
    with torch.inference_mode():
        assert worst(load(folder), ids, reference(ids).logits) < TOLERANCE


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2-window", "gemma2"])
def test_bfloat16_is_as_good_as_stock_bfloat16(stock, ids, variant):
    import transformers

    folder, reference = stock(variant)
    half = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    ours = load(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = reference(ids).logits
        stock_error = (half(ids).logits.float() - exact).pow(2).mean().sqrt()
        our_error = (ours(ids).float() - exact).pow(2).mean().sqrt()
    assert ours(ids).dtype == torch.bfloat16
    assert our_error < 1.25 * stock_error


@pytest.mark.parametrize("variant", ["mistral-window", "qwen2-window", "gemma2", "gemma2-reversed"])
def test_slices_of_queries_do_not_change_the_logits(stock, ids, variant, monkeypatch):
    folder, reference = stock(variant)
    monkeypatch.setattr(model_module, "QUERY_ROWS", 11)  # 40 tokens: slices of 11, 11, 11, 7
    with torch.inference_mode():
        assert worst(load(folder), ids, reference(ids).logits) < TOLERANCE


# --------------------------------------------------------------------------------- a bug in it: parity must turn red


def without_offset(x, rope):
    cos, sin = rope
    return torch.cat((x[..., ::2] * cos - x[..., 1::2] * sin, x[..., 1::2] * cos + x[..., ::2] * sin), dim=-1)


def tiled(x, n_heads):  # k0 k1 k0 k1 in place of k0 k0 k1 k1
    return x.repeat(1, n_heads // x.shape[1], 1, 1)


def scale_before_norm(self, h, rope, cache=None):  # Gemma2's trap: the norm swallows alpha
    if self.attention_mode == "full":
        return self.add_mlp(h + self.attn_post_norm(self.attn(self.attn_norm(h), rope, cache)))
    return self.add_mlp(h + self.attn_post_norm(self.alpha * self.attn.value_path(self.attn_norm(h))))


def everything_visible(q, k, v, scale, *_):
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


def no_softcap(q, k, v, scale, window=None, softcap=None):
    return attend(q, k, v, scale, window, None)


CONFIG_BUGS = {
    "norm without 1 + w": ("gemma2", dict(norm_offset=0.0)),
    "norm with 1 + w": ("llama", dict(norm_offset=1.0)),
    "norm eps": ("llama", dict(norm_eps=1e-2)),
    "rope theta": ("llama", dict(rope_theta=10000.0)),
    "rope scaling dropped": ("llama", dict(rope_type="default")),
    "linear scaling dropped": ("llama-biases", dict(rope_type="default")),
    "query scale from head_dim": ("gemma2", dict(query_scale=24**-0.5)),
    "query scale from hidden size": ("mistral-window", dict(query_scale=16**-0.5)),
    "attention softcap dropped": ("gemma2", dict(attn_softcap=None)),
    "final softcap dropped": ("gemma2", dict(logit_softcap=None)),
    "embedding not scaled": ("gemma2", dict(embed_scale=1.0)),
    "silu for gelu": ("gemma2", dict(activation="silu")),
    "odd layers slide": ("gemma2", dict(sliding_windows=(None, 7, None, 7, None))),
    "window one too long": ("mistral-window", dict(sliding_windows=(8,) * 5)),
    "window one too short": ("qwen2-window", dict(sliding_windows=(None, None, 6, 6, 6))),
    "all layers slide": ("qwen2-window", dict(sliding_windows=(7,) * 5)),
    "no layer slides": ("mistral-window", dict(sliding_windows=(None,) * 5)),
}


@pytest.mark.parametrize("bug", CONFIG_BUGS)
def test_parity_catches_a_wrong_config(stock, ids, bug, monkeypatch):
    variant, change = CONFIG_BUGS[bug]
    folder, reference = stock(variant)
    translate = load_weights.model_config
    monkeypatch.setattr(load_weights, "model_config", lambda c: dataclasses.replace(translate(c), **change))
    with torch.inference_mode():
        assert not worst(load(folder), ids, reference(ids).logits) < TOLERANCE


CODE_BUGS = {
    "neighbours rotated": ("llama", model_module, "rotate", without_offset),
    "heads tiled": ("gemma2", model_module, "repeat_kv", tiled),
    "exact gelu": ("gemma2", model_module, "ACTIVATIONS", {"gelu_pytorch_tanh": F.gelu}),
    "not causal": ("llama", model_module, "attend", everything_visible),
    "softcap forgotten": ("gemma2", model_module, "attend", no_softcap),
}


@pytest.mark.parametrize("bug", CODE_BUGS)
def test_parity_catches_wrong_code(stock, ids, bug, monkeypatch):
    variant, owner, name, broken = CODE_BUGS[bug]
    folder, reference = stock(variant)
    monkeypatch.setattr(owner, name, broken)
    with torch.inference_mode():
        assert not worst(load(folder), ids, reference(ids).logits) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_catches_swapped_norms_and_lost_biases(family, monkeypatch):
    golden = load_file(GOLDEN / family / "golden.safetensors")
    swapped = load(GOLDEN / family)
    for block in swapped.blocks:
        block.attn_norm, block.mlp_norm = block.mlp_norm, block.attn_norm
    assert not worst(swapped, golden["input_ids"], golden["logits_full"]) < TOLERANCE
    if family == "qwen2":
        biasless = load(GOLDEN / family)
        biasless.blocks[0].attn.v_proj.bias.data.zero_()
        assert not worst(biasless, golden["input_ids"], golden["logits_full"]) < TOLERANCE


def test_parity_catches_gemma2s_alpha_inside_the_norm(monkeypatch):
    golden = load_file(GOLDEN / "gemma2" / "golden.safetensors")
    monkeypatch.setattr(Block, "forward", scale_before_norm)
    model = prune(load(GOLDEN / "gemma2"), {5: 0.7, 4: 0.3})
    assert not worst(model, golden["input_ids"], golden["logits_top2"]) < TOLERANCE


# ------------------------------------------------------------------------------- what must hold without any reference


def small_config(**changes) -> ModelConfig:
    config = ModelConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        sliding_windows=(None,) * 3,
        query_scale=16**-0.5,
    )
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "gemma2"])
def test_a_window_of_one_is_the_value_path_at_alpha_1(stock, ids, variant):
    folder, _ = stock(variant)
    windowed, pruned = load(folder), load(folder)
    for layer in (2, 4):
        windowed.blocks[layer].attn.window = 1
    prune(pruned, {2: 1.0, 4: 1.0})
    with torch.inference_mode():
        assert worst(windowed, ids, pruned(ids)) < TOLERANCE


@pytest.mark.parametrize("variant", ["llama-biases", "gemma2"])
def test_alpha_0_is_no_attention(stock, ids, variant):
    folder, _ = stock(variant)
    silent, pruned = load(folder), prune(load(folder), {3: 0.0})
    silent.blocks[3].attn.o_proj.weight.data.zero_()
    if silent.blocks[3].attn.o_proj.bias is not None:
        silent.blocks[3].attn.o_proj.bias.data.zero_()
    with torch.inference_mode():
        expected = silent(ids)
        assert worst(pruned, ids, expected) == 0
        assert worst(pruned.prune_(), ids, expected) == 0
    assert pruned.blocks[3].attn is None


def test_flags_flip_freely_and_pruning_is_final(stock, ids):
    folder, _ = stock("llama")
    model = load(folder)
    with torch.inference_mode():
        dense = model(ids)
        prune(model, {4: 0.5})
        assert worst(model, ids, dense) > 0.01
        model.blocks[4].attention_mode = "full"
        assert worst(model, ids, dense) == 0
    with pytest.raises(ValueError, match="full"):
        model.blocks[4].attention_mode = "ov"
    prune(model, {4: 0.5}).prune_()
    with pytest.raises(ValueError, match="pruned"):
        model.blocks[4].attention_mode = "full"


@pytest.mark.parametrize("alphas", [{}, {4: 0.7, 3: 0.0, 1: 0.4}], ids=["dense", "pruned"])
@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2-window", "gemma2"])
def test_decoding_with_a_cache_changes_nothing(stock, ids, variant, alphas):
    model = prune(load(stock(variant)[0]), alphas)
    prompt, n_new = ids[:, :5], 25  # well past the window of 7
    without_cache = prompt
    with torch.inference_mode():
        for _ in range(n_new):
            best = model(without_cache)[:, -1:].argmax(-1)
            without_cache = torch.cat((without_cache, best), dim=1)
        assert torch.equal(model.generate(prompt, n_new), without_cache)
        cache = model_module.KVCache(len(model.blocks), 40)
        pieces = [model(piece, cache) for piece in ids.split((9, 1, 13, 17), dim=1)]  # a prompt may come in parts
        assert (torch.cat(pieces, dim=1) - model(ids)).abs().max() < TOLERANCE
    assert [layer is None for layer in cache.layers] == [layer in alphas for layer in range(5)]


def test_generate_stops(stock, ids):
    model = load(stock("llama")[0])
    whole = model.generate(ids[:1, :5], 10)
    third = whole[0, 7].item()
    stopped = model.generate(ids[:1, :5], 10, stop_ids=(third,))
    assert torch.equal(stopped, whole[:, : stopped.shape[1]]) and stopped[0, -1] == third


def test_llama_31_frequencies():
    """Of Llama 3.1's 64 rotary pairs 29 keep their speed, 6 are blended and 29 are slowed by 8."""
    config = small_config(
        head_dim=128,
        rope_theta=5e5,
        rope_type="llama3",
        rope_factor=8.0,
        rope_original_context=8192,
    )
    plain = rope_frequencies(dataclasses.replace(config, rope_type="default"))
    ratio = plain / rope_frequencies(config)
    assert ratio[:29].eq(1).all() and ratio[35:].sub(8).abs().max() < 1e-5
    assert (ratio[29:35] > 1.001).all() and (ratio[29:35] < 7.999).all()


def test_a_window_of_5_shows_5_tokens():
    T = 12
    q = k = torch.zeros(1, 1, T, 4)
    v = torch.eye(T).view(1, 1, T, T)
    visible = (attend(q, k, v, 1.0, window=5) > 0).sum(-1).flatten().tolist()
    assert visible == [1, 2, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]


def test_rope_stays_exact_in_bfloat16():
    model = Transformer(small_config()).to(torch.bfloat16)
    cos, _ = model.rope(torch.zeros(1, 2, 32, dtype=torch.bfloat16), start=1500)
    exact, _ = Transformer(small_config()).rope(torch.zeros(1, 2, 32), start=1500)
    assert (cos.float() - exact).abs().max() < 0.005  # rounding of the table, not of the angle


def test_gemma_norm_with_zero_weight_only_normalises():
    norm = RMSNorm(8, 1e-6, offset=1.0)
    x = torch.randn(3, 8)
    assert norm.weight.eq(0).all() and torch.allclose(norm(x), x / x.pow(2).mean(-1, keepdim=True).sqrt(), atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_memory_of_the_sliced_path_does_not_grow_with_t_squared(softcap, monkeypatch):
    """No tensor of the sliced path may hold more than QUERY_ROWS rows of scores."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    monkeypatch.setattr(model_module, "QUERY_ROWS", 16)
    q = torch.randn(1, 1, 512, 8)
    with Watch(), torch.inference_mode():
        attend(q, q, q, 1.0, window=32, softcap=softcap)
    assert largest <= 512 * 8 * 2
