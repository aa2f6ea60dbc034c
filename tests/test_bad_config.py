"""config.json in the spellings and states in which people have met it: the function it means, or one sentence."""

import json

import pytest
import torch
from conftest import FAMILIES, TOLERANCE
from test_fuzz import IDS, stock_logits

from checkpoint import UserError
from load_weights import load

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3_16 = LLAMA3 | dict(original_max_position_embeddings=16)
FULL, SLIDING = "full_attention", "sliding_attention"

# family, what is changed (... drops a key); the logits must be stock transformers', and not those of the file as it was
MEANS_ANOTHER_FUNCTION = [
    ("llama", dict(rope_theta=..., rope_scaling=..., rope_parameters=LLAMA3_16 | dict(rope_theta=700.0))),
    ("llama", dict(rope_theta=10.0, rope_scaling=..., rope_parameters=LLAMA3_16 | dict(rope_theta=700.0))),
    ("llama", dict(rope_theta=700.0)),
    ("llama", dict(rope_theta=...)),
    ("llama", dict(rope_scaling=None)),
    ("llama", dict(rope_scaling={})),
    ("llama", dict(rope_scaling=dict(type="linear", factor=2.0))),
    ("llama", dict(rope_scaling=dict(rope_type="linear", type="linear", factor=2))),
    ("llama", dict(rope_scaling=LLAMA3)),  # without the original context: max_position_embeddings stands in
    ("llama", dict(rope_scaling=LLAMA3, original_max_position_embeddings=16)),
    ("llama", dict(rms_norm_eps=0.5)),
    ("llama", dict(hidden_act="gelu_pytorch_tanh")),
    ("mistral", dict(sliding_window=3)),
    ("mistral", dict(rope_theta=700.0)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=3, max_window_layers=2)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=3, layer_types=[SLIDING, FULL] * 2 + [FULL])),
    ("gemma2", dict(sliding_window=3)),
    ("gemma2", dict(sliding_window=...)),
    ("gemma2", dict(layer_types=[FULL, SLIDING] * 3)),
    ("gemma2", dict(attn_logit_softcapping=None)),
    ("gemma2", dict(attn_logit_softcapping=0.5)),
    ("gemma2", dict(attn_logit_softcapping=...)),
    ("gemma2", dict(final_logit_softcapping=None)),
    ("gemma2", dict(final_logit_softcapping=0.5)),
    ("gemma2", dict(query_pre_attn_scalar=5)),
    ("gemma2", dict(query_pre_attn_scalar=...)),
    ("gemma2", dict(hidden_activation="silu")),
]
# the same, and nothing may change
MEANS_THE_SAME = [
    ("llama", dict(head_dim=None)),
    ("llama", dict(head_dim=16)),
    ("llama", dict(rope_scaling=LLAMA3 | dict(original_max_position_embeddings=32, type="llama3"))),
    ("llama", dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=32, rope_theta=50000.0))),
    ("llama", dict(torch_dtype=..., dtype="float32")),
    ("llama", dict(torch_dtype=...)),
    ("llama", dict(torch_dtype="bfloat16")),  # load() keeps what is stored
    ("llama", dict(torch_dtype="torch.float32")),
    ("llama", dict(torch_dtype="auto")),
    ("llama", dict(eos_token_id=[1, 2, 3], bos_token_id=None, pad_token_id=None)),
    ("llama", dict(eos_token_id=None, pad_token_id=-1)),
    ("llama", dict(quantization_config=None, num_local_experts=0, vision_config=None, text_config=None)),
    ("mistral", dict(sliding_window=None)),
    ("mistral", dict(sliding_window=64)),
    ("mistral", dict(sliding_window=...)),  # 4096
    ("qwen2", dict(use_sliding_window=False, sliding_window=3, max_window_layers=0)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=3, max_window_layers=6)),
    ("qwen2", dict(attention_bias=False)),  # Qwen2 does not know the key: its biases are always there
    ("gemma2", dict(tie_word_embeddings=...)),
    ("gemma2", dict(hidden_activation=..., hidden_act="gelu")),  # Gemma2 does not know hidden_act
    ("gemma2", dict(rms_norm_eps=...)),
    ("gemma2", dict(layer_types=[SLIDING, FULL] * 3)),
]


def name(row) -> str:
    return f"{row[0]} " + ", ".join(f"{k}={'absent' if v is ... else v}" for k, v in row[1].items())


def move(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return ((logits - reference).abs().max() / reference.abs().max()).item()


@torch.inference_mode()
@pytest.mark.parametrize("row", MEANS_ANOTHER_FUNCTION + MEANS_THE_SAME, ids=name)
def test_means_what_it_means_to_stock(golden_copy, row):
    family, changes = row
    folder = golden_copy(family, **changes)
    ours = load(folder)(IDS)
    assert move(ours, stock_logits(folder)) < TOLERANCE
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    folder.rmdir()
    moved = move(load(golden_copy(family))(IDS), ours)
    assert moved < TOLERANCE if row in MEANS_THE_SAME else moved > 1e-3


MOE, QUANTISED, MULTIMODAL = "mixture of experts", "quantised", "multimodal"
REFUSED = [
    # other families and other kinds of model
    *[("llama", dict(model_type=t), "supported are llama") for t in ("qwen3", "gemma3", "mixtral", "", None, [])],
    ("qwen2", dict(model_type="qwen2_moe", num_experts=60), MOE),
    ("mistral", dict(num_local_experts=8), MOE),
    ("llama", dict(n_routed_experts=8), MOE),
    ("llama", dict(text_config={"hidden_size": 64}), MULTIMODAL),
    ("gemma2", dict(vision_config={"depth": 2}), MULTIMODAL),
    ("llama", dict(quantization_config={"quant_method": "awq"}), QUANTISED),
    ("llama", dict(quantization_config={}), QUANTISED),
    ("llama", dict(compression_config={"format": "pack"}), QUANTISED),
    ("llama", dict(quantization={"group_size": 64, "bits": 4}), QUANTISED),
    ("llama", dict(is_causal=False), "only causal"),
    ("gemma2", dict(use_bidirectional_attention=True), "not causal"),
    ("llama", dict(attention_chunk_size=8), "chunks"),
    ("llama", dict(per_layer_config={"0": {"num_attention_heads": 2}}), "different shapes"),
    ("mistral", dict(layer_types=[FULL] * 5), "layer_types, which mistral does not know"),
    # RoPE
    *[("llama", dict(rope_scaling=dict(rope_type=kind, factor=2.0)), f"type '{kind}'")
      for kind in ("yarn", "dynamic", "longrope", "su", "mrope", "proportional")],
    ("llama", dict(rope_scaling=dict(rope_type=["linear"], factor=2.0)), "RoPE scaling of type"),
    ("llama", dict(rope_scaling=dict(rope_type="linear", type="yarn", factor=2.0)), "RoPE scaling of type"),
    ("llama", dict(rope_scaling=dict(factor=2.0)), "has 'factor', which RoPE scaling of type 'default' does not use"),
    ("llama", dict(rope_scaling=dict(rope_type="linear")), "without 'factor'"),
    ("llama", dict(rope_scaling=dict(rope_type="linear", factor="2")), "factor = '2', expected a number"),
    ("llama", dict(rope_scaling=dict(rope_type="linear", factor=0)), "factor = 0, expected a number above 0"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(high_freq_factor=1.0)), "must be smaller"),
    ("llama", dict(rope_scaling=[2.0]), "not one flat object"),
    ("llama", dict(rope_parameters={FULL: LLAMA3, SLIDING: LLAMA3}), "not one flat object"),
    ("llama", dict(rope_parameters=LLAMA3_16), "they differ"),
    ("llama", dict(rope_theta=0), "rope_theta = 0"),
    ("llama", dict(rope_theta=None), "rope_theta = None"),
    ("llama", dict(rope_theta=True), "rope_theta = True"),
    ("llama", dict(original_max_position_embeddings=64), "two original_max_position_embeddings"),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
    ("llama", dict(rope_scaling=LLAMA3 | dict(partial_rotary_factor=None)), "partial_rotary_factor = None"),
    # sizes
    ("llama", dict(hidden_size=None), "hidden_size = None, expected a whole number"),
    ("llama", dict(hidden_size=64.0), "hidden_size = 64.0"),
    ("llama", dict(num_hidden_layers=True), "num_hidden_layers = True"),
    ("llama", dict(num_hidden_layers=0), "num_hidden_layers = 0"),
    ("llama", dict(num_hidden_layers=10**8), "there are 48 tensors"),  # and not an hour of building
    ("llama", dict(vocab_size=2**63), "vocab_size = 9223372036854775808"),
    ("llama", dict(num_attention_heads=2**20, head_dim=2**20), "num_attention_heads x head_dim"),
    ("llama", dict(num_attention_heads=3), "not a multiple of|cannot share"),
    ("llama", dict(num_attention_heads=6, num_key_value_heads=2), "not a multiple of"),
    ("llama", dict(head_dim=15), "even number"),
    ("llama", dict(head_dim=32), r"q_proj.weight .* has shape \[64, 64\], .* makes it \[128, 64\]"),
    ("llama", dict(num_key_value_heads=...), r"k_proj.weight .* has shape \[32, 64\], .* makes it \[64, 64\]"),
    ("llama", dict(vocab_size=319), r"embed_tokens.weight .* has shape \[320, 64\], .* makes it \[319, 64\]"),
    ("llama", dict(max_position_embeddings="256"), "max_position_embeddings = '256'"),
    ("gemma2", dict(sliding_window=None), "sliding_window = null"),
    ("mistral", dict(sliding_window=0), "sliding_window = 0"),
    ("mistral", dict(sliding_window=-1), "sliding_window = -1"),
    ("mistral", dict(sliding_window=2**63), "sliding_window = 9223372036854775808"),
    ("qwen2", dict(use_sliding_window="true"), "use_sliding_window = 'true', expected true or false"),
    ("qwen2", dict(max_window_layers=None), "max_window_layers = None"),
    ("gemma2", dict(layer_types=[FULL, SLIDING]), "layer_types must name"),
    ("gemma2", dict(layer_types=[FULL, "linear_attention"] * 3), "layer_types must name"),
    ("gemma2", dict(layer_types=[FULL, [SLIDING]] * 3), "layer_types"),
    # numbers and switches
    *[(family, dict(rms_norm_eps=eps), "rms_norm_eps = ") for family in FAMILIES for eps in (-1e-6, float("nan"))],
    ("llama", dict(rms_norm_eps="1e-5"), "rms_norm_eps = '1e-5'"),
    ("gemma2", dict(attn_logit_softcapping=0), "attn_logit_softcapping = 0"),
    ("gemma2", dict(final_logit_softcapping=float("inf")), "final_logit_softcapping = inf"),
    ("gemma2", dict(query_pre_attn_scalar=10**400), "query_pre_attn_scalar = 1000"),
    ("llama", dict(hidden_act="gelu"), "activation 'gelu'"),
    ("llama", dict(hidden_act=None), "hidden_act = None"),
    ("gemma2", dict(hidden_activation="relu"), "activation 'relu'"),
    ("llama", dict(tie_word_embeddings=None), "tie_word_embeddings = None, expected true or false"),
    ("llama", dict(tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens.weight"),
    ("gemma2", dict(tie_word_embeddings=False), "has no lm_head.weight"),
    ("llama", dict(attention_bias=True), "lacks 20 tensors .*q_proj.bias"),
    ("llama", dict(mlp_bias=True), "lacks 15 tensors .*gate_proj.bias"),
    ("llama", dict(eos_token_id="2"), "eos_token_id = '2', expected a token id"),
    ("llama", dict(eos_token_id=[[1]]), "eos_token_id"),
    ("llama", dict(bos_token_id=[1]), "bos_token_id"),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=name)
def test_refused(golden_copy, row):
    family, changes, complaint = row
    with pytest.raises(UserError, match=complaint) as error:
        load(golden_copy(family, **changes))
    assert "\n" not in str(error.value) and "config.json" in str(error.value)


BAD_FILES = {
    "empty": (b"", "it is empty"),
    "cut": (b'{"model_type": "llama"', "not valid JSON"),
    "nested too deep": (b'{"a":' * 100_000, "not valid JSON"),
    "a number of 5,000 digits": (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "a list": (b"[]", "does not hold a JSON object"),
    "null": (b"null", "does not hold a JSON object"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n", "git lfs pull"),
    "web page": (b"\n<!DOCTYPE html><html>", "web page"),
    "error message": (b'{ "error": "Repository not found', "web page or an error message"),
    "zeros": (bytes(700), "zeros only"),
    "UTF-16": (json.dumps({"model_type": "llama"}).encode("utf-16"), "byte-order mark"),
    "UTF-8 with a mark": (b"\xef\xbb\xbf{}", "byte-order mark"),
}


@pytest.mark.parametrize("state", BAD_FILES)
def test_a_file_that_is_no_config(golden_copy, state):
    content, complaint = BAD_FILES[state]
    folder = golden_copy("llama")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=complaint) as error:
        load(folder)
    assert "\n" not in str(error.value) and "config.json" in str(error.value)
