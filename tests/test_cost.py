"""The published accounting, and the count against real models."""

import pytest
import torch
from conftest import FAMILIES, GOLDEN

import cost
from extras.bench import PUBLISHED, from_the_top
from load_weights import load
from model import KVCache


# What the authors' alphas remove: unfolded, folded, of the cache.
REMOVED = {
    "Llama-3.1-8B": (230_686_720, 293_601_280, 0.250),
    "Mistral-7B-v0.3": (251_658_240, 301_989_888, 0.250),
    "Qwen2-7B": (58_736_640, 102_776_832, 4 / 28),
    "Gemma2-9B": (132_120_576, 176_160_768, 6 / 42),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_and_cache(name):
    config, listed = PUBLISHED[name]
    alphas = from_the_top(config, listed)
    unfolded, folded, cache = REMOVED[name]
    dense = cost.linear_parameters(config)
    assert dense - cost.linear_parameters(config, alphas, folded=False) == unfolded
    assert dense - cost.linear_parameters(config, alphas) == folded
    assert 1 - cost.kv_bytes(config, 1, alphas) / cost.kv_bytes(config, 1) == pytest.approx(cache)


def test_published_llama_share_and_prefill():
    config, listed = PUBLISHED["Llama-3.1-8B"]
    alphas = from_the_top(config, listed)
    dense = cost.linear_parameters(config)
    assert 1 - cost.linear_parameters(config, alphas, folded=False) / dense == pytest.approx(0.0331, abs=5e-5)
    saved = [
        1 - cost.prefill_flops(config, 65536, alphas, folded) / cost.prefill_flops(config, 65536)
        for folded in (False, True)
    ]
    assert saved == pytest.approx([0.1527, 0.1568], abs=5e-5)  # the paper measures 16.7 % of the time


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alphas", [{}, {4: 0.5, 3: 0.0}], ids=["dense", "pruned"])
def test_counts_are_those_of_the_built_model(family, alphas):
    model = load(GOLDEN / family)
    for layer, alpha in alphas.items():
        model.blocks[layer].attention_mode, model.blocks[layer].alpha = "vo", alpha
    model.prune_()
    counted = {name: p.numel() for name, p in model.named_parameters()}
    assert cost.parameters(model.config, alphas) == sum(counted.values())
    linear = sum(size for name, size in counted.items() if "_proj" in name)
    assert cost.linear_parameters(model.config, alphas) == linear
    cache = KVCache(len(model.blocks), 6)
    with torch.inference_mode():
        model(torch.zeros(1, 6, dtype=torch.int64), cache)
    held = sum(t.numel() * t.element_size() for layer in cache.layers if layer for t in layer)
    assert cost.kv_bytes(model.config, 6, alphas, bytes_per_value=4) == held


def test_flops_are_those_that_torch_counts():
    """torch's own counter sees the matrix products of a short prefill; causal attention is half of its T squared."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = load(GOLDEN / "qwen2")
    T, config = 24, model.config
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.inference_mode():
        model.head(model.hidden(torch.zeros(1, T, dtype=torch.int64))[:, -1:])
    masked_half = config.n_layers * 4 * config.n_heads * config.head_dim * T**2 / 2
    assert cost.prefill_flops(config, T) == pytest.approx(counter.get_total_flops() - masked_half, rel=1e-6)


def test_pairs_of_a_window_layer():
    for tokens, window in ((10, None), (10, 4), (3, 8)):
        exact = sum(min(t + 1, window or tokens) for t in range(tokens))
        assert cost.seen_pairs(tokens, window) == pytest.approx(exact, abs=tokens / 2)  # up to the diagonal's half
