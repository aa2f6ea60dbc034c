"""Loading: both spellings of config.json, shards, and what is refused; saving: the same logits from a smaller file."""

import json

import pytest
import torch
from conftest import FAMILIES, GOLDEN, TOLERANCE, rewrite_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint import UserError, open_checkpoint
from load_weights import load, model_config, save

IDS = torch.arange(40).view(1, 40) * 5 % 256


@torch.inference_mode()
def logits(folder, **kwargs):
    return load(folder, **kwargs)(IDS)


# ------------------------------------------------------------------------------------------------------- config.json


def test_transformers_4_and_5_spell_rope_differently(golden_copy, tmp_path):
    expected = logits(GOLDEN / "llama")
    scaling = json.loads((GOLDEN / "llama" / "config.json").read_text())["rope_scaling"]
    v5 = golden_copy("llama", rope_theta=..., rope_scaling=..., rope_parameters=scaling | {"rope_theta": 50000.0})
    assert torch.equal(logits(v5), expected)
    config = json.loads((v5 / "config.json").read_text())
    (v5 / "config.json").write_text(json.dumps(config | {"rope_theta": 123.0}))  # transformers 5's facts win
    assert torch.equal(logits(v5), expected)
    (v5 / "config.json").write_text(json.dumps(config | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}))
    with pytest.raises(UserError, match="they differ"):
        load(v5)


@pytest.mark.parametrize(
    "family, changes, windows",
    [
        ("mistral", {"sliding_window": 5}, [5, 5, 5, 5, 5]),
        ("mistral", {"sliding_window": None}, [None] * 5),
        ("mistral", {"sliding_window": ...}, [4096] * 5),
        ("llama", {"sliding_window": 5}, [None] * 5),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}, [None] * 5),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, [None, None, 8, 8, 8]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 5}, [None] * 5),
        ("gemma2", {}, [8, None, 8, None, 8, None]),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 3}, [None, 8, None, 8, None, 8]),
    ],
)
def test_which_layers_slide(golden_copy, family, changes, windows):
    folder = golden_copy(family, **changes)
    assert list(model_config(open_checkpoint(folder).config).sliding_windows) == windows


def test_gemma2_says_little_and_means_much(golden_copy):
    folder = golden_copy("gemma2", hidden_activation=..., hidden_act="gelu", sliding_window=..., rope_theta=...)
    config = model_config(open_checkpoint(folder).config)
    assert (config.activation, config.tied, config.sliding_windows[0]) == ("gelu_pytorch_tanh", True, 4096)


def test_heads_can_be_left_to_the_family(golden_copy):
    assert model_config(open_checkpoint(golden_copy("llama", num_key_value_heads=None)).config).n_kv_heads == 4
    with pytest.raises(UserError, match="k_proj.weight .* has shape"):
        load(golden_copy("mistral", num_key_value_heads=4))


# ----------------------------------------------------------------------------------------------------------- weights


def shard(folder, count=2):
    weights = load_file(folder / "model.safetensors")
    names, weight_map = sorted(weights), {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name] for name in names[i::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def test_shards_with_and_without_an_index(golden_copy):
    folder = shard(golden_copy("qwen2"))
    assert torch.equal(logits(folder), logits(GOLDEN / "qwen2"))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "consolidated.safetensors").write_bytes(b"the same weights under other names")
    assert torch.equal(logits(folder), logits(GOLDEN / "qwen2"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="lacks 1 of 2 weight files"):
        load(folder)


def test_a_stale_index(golden_copy):
    folder = shard(golden_copy("llama"))
    (folder / "model.safetensors").write_bytes((GOLDEN / "llama" / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="delete the stale one"):
        load(folder)
    (folder / "model.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model.norm.weight is not in the index"):
        load(folder)


def test_dtype_as_stored_or_asked(golden_copy):
    folder = golden_copy("llama")
    rewrite_weights(folder, lambda w: w.update({k: v.to(torch.bfloat16) for k, v in w.items() if v.ndim > 1}))
    assert {p.dtype for p in load(folder).parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(folder, dtype=torch.float32).parameters()} == {torch.float32}


def test_known_buffers_and_bare_decoders(golden_copy):
    folder = golden_copy("llama")
    rewrite_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert torch.equal(logits(folder), logits(GOLDEN / "llama"))
    rewrite_weights(folder, lambda w: [w.update({k.removeprefix("model."): w.pop(k)}) for k in list(w)])
    assert torch.equal(logits(folder), logits(GOLDEN / "llama"))


def test_a_tied_checkpoint_may_store_its_head_if_it_is_the_embedding(golden_copy):
    folder = golden_copy("gemma2")
    rewrite_weights(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(folder), logits(GOLDEN / "gemma2"))
    rewrite_weights(folder, lambda w: w["lm_head.weight"].add_(1))
    with pytest.raises(UserError, match="lm_head.weight differs"):
        load(folder)


def test_weights_are_mapped_and_not_copied(demo):
    """Loading as stored must not bring the file into the process's own memory; as float32 one copy is right."""
    import subprocess
    import sys

    code = (
        "import torch; from load_weights import load\n"
        "def own(): return int([l for l in open('/proc/self/status') if 'RssAnon' in l][0].split()[1]) / 1e3\n"
        f"load({str(GOLDEN / 'llama')!r})  # what torch itself takes at the first load\n"
        f"before = own(); model = load({str(demo)!r}, dtype=DTYPE); print(own() - before)\n"
    )
    for dtype, limit in (("None", 30), ("torch.float32", 1.15 * 540)):
        run = [sys.executable, "-c", code.replace("DTYPE", dtype)]
        grown = float(subprocess.run(run, capture_output=True, text=True, check=True, cwd=GOLDEN.parent.parent).stdout)
        assert grown < limit  # MB; the file holds 269 MB of bfloat16


# ---------------------------------------------------------------------------------------------------------- refusals


def without(*names):
    return lambda folder: rewrite_weights(folder, lambda w: [w.pop(name) for name in names])


def plus(**tensors):
    return lambda folder: rewrite_weights(folder, lambda w: w.update(tensors))


def weights_are(content: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def renamed(name):
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


UP_PROJ = "model.layers.1.mlp.up_proj.weight"
BAD_FOLDERS = {
    "other family": (dict(model_type="qwen3"), None, "model_type 'qwen3'; supported are llama"),
    "no family": (dict(model_type=...), None, "model_type None"),
    "mixture of experts": (dict(num_local_experts=8), None, "mixture of experts"),
    "quantised": (dict(quantization_config={"quant_method": "gptq"}), None, "quantised"),
    "yarn": (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), None, "RoPE scaling of type 'yarn'"),
    "half a llama3": (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), None, "without 'low_freq_factor'"),
    "size as text": (dict(hidden_size="64"), None, "hidden_size = '64', expected a whole number"),
    "eps of zero": (dict(rms_norm_eps=0), None, "rms_norm_eps = 0"),
    "odd heads": (dict(num_key_value_heads=3), None, "cannot share 3 key/value heads"),
    "activation": (dict(hidden_act="relu"), None, "activation 'relu'"),
    "fewer layers": (dict(num_hidden_layers=4), None, "does not ask for: model.layers.4"),
    "more layers": (dict(num_hidden_layers=6), None, "lacks 9 tensors"),
    "wrong width": (dict(intermediate_size=96), None, "gate_proj.weight .* has shape .128, 64., .* makes it .96, 64."),
    "missing tensor": ({}, without(UP_PROJ), f"lacks 1 tensors .*{UP_PROJ}"),
    "missing head": ({}, without("lm_head.weight"), "tie_word_embeddings = false"),
    "stray bias": (
        {},
        plus(**{"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        "does not ask for: .*q_proj.bias",
    ),
    "query norm": (
        {},
        plus(**{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
        "does not ask for: .*q_norm",
    ),
    "integers": ({}, plus(**{UP_PROJ: torch.ones(128, 64, dtype=torch.int32)}), "stored as I32: quantised"),
    "pointer": ({}, weights_are(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "git lfs pull"),
    "web page": ({}, weights_are(b"<!DOCTYPE html><html>"), "web page"),
    "empty file": ({}, weights_are(b""), "it is empty"),
    "pickles": ({}, renamed("pytorch_model.bin"), "pytorch_model.bin: pickled weights are not read"),
    "unfinished": ({}, renamed("model.safetensors.incomplete"), "download is not finished"),
    "consolidated": ({}, renamed("consolidated.safetensors"), "another layout"),
    "no weights": ({}, lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
    "no config": ({}, lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "config is a list": ({}, lambda folder: (folder / "config.json").write_text("[]"), "does not hold a JSON object"),
    "config is cut": ({}, lambda folder: (folder / "config.json").write_text('{"a": '), "is not valid JSON"),
}


@pytest.mark.parametrize("fault", BAD_FOLDERS)
def test_a_bad_folder_gets_a_sentence(golden_copy, fault):
    changes, spoil, complaint = BAD_FOLDERS[fault]
    folder = golden_copy("llama", **changes)
    if spoil:
        spoil(folder)
    with pytest.raises(UserError, match=complaint) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_a_path_that_is_no_folder(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        load(tmp_path / "file")


def test_a_cut_file_is_named_with_its_size(golden_copy):
    folder = golden_copy("llama")
    whole = (folder / "model.safetensors").read_bytes()
    for content in (whole[:-1], whole[: len(whole) // 2], whole + bytes(16)):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=f"{len(content):,} bytes"):
            load(folder)


# ------------------------------------------------------------------------------------------------------------ saving


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_comes_back_pruned_and_smaller(tmp_path, family):
    golden = load_file(GOLDEN / family / "golden.safetensors")
    facts = json.loads((GOLDEN / family / "golden.json").read_text())["cases"]["logits_top3"]
    model = load(GOLDEN / family)
    for layer, alpha in zip(facts["pruned_layers"], facts["alphas"]):
        model.blocks[layer].attention_mode, model.blocks[layer].alpha = "vo", alpha
    save(model, tmp_path / "pruned", GOLDEN / family)
    again = load(tmp_path / "pruned")
    with torch.inference_mode():
        difference = (again(golden["input_ids"]) - golden["logits_top3"]).abs().max()
        assert torch.equal(again(IDS), model(IDS))
    assert difference < TOLERANCE
    assert again.pruned == dict(zip(facts["pruned_layers"], facts["alphas"]))
    before, after = (f / "model.safetensors" for f in (GOLDEN / family, tmp_path / "pruned"))
    assert after.stat().st_size < before.stat().st_size - 50_000
    with safe_open(after, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}
        assert not [name for name in handle.keys() if f"layers.{facts['pruned_layers'][0]}.self_attn.q_proj" in name]
    assert {f.name for f in (tmp_path / "pruned").iterdir()} == {"config.json", "model.safetensors"}


def test_saving_in_bfloat16_rounds_once(tmp_path):
    """Folding happens in float32 and is rounded once: exact folding of float32 weights, then one rounding."""
    model = load(GOLDEN / "llama")
    model.blocks[4].attention_mode, model.blocks[4].alpha = "vo", 0.3
    o_proj = model.blocks[4].attn.o_proj.weight.detach().view(64, 2, 2, 16)
    save(model, tmp_path, GOLDEN / "llama", torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")["model.layers.4.self_attn.o_proj.weight"]
    assert torch.equal(saved, (0.3 * o_proj.sum(2).flatten(1)).to(torch.bfloat16))


@pytest.mark.parametrize(
    "harp",
    [1, {}, {"version": 2, "alphas": {}}, {"version": 1, "alphas": {"9": 1}}, {"version": 1, "alphas": {"4": -1}}],
)
def test_a_damaged_harp_object(golden_copy, harp):
    with pytest.raises(UserError, match="'harp'"):
        load(golden_copy("llama", harp=harp))
