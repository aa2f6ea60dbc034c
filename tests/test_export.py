"""Exported folders in stock transformers, the spike on its own, refusals, and the downstream tasks' script."""

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import FAMILIES, GOLDEN, ROOT, TRAINING_TEXT, rewrite_weights, write_bpe_tokenizer
from safetensors.torch import load_file

from checkpoint import read_json
from extras import export_hf, spike
from load_weights import load, save
from model import ModelConfig, Transformer, rope_frequencies, rotate
from tokenizer import load_tokenizer

transformers = pytest.importorskip("transformers")
BOUND = 1e-5  # of the largest logit, in float32
ALPHAS = {4: 0.7, 3: 0.0, 1: 0.3}


def pruned_folder(source: Path, folder: Path, alphas: dict[int, float] = ALPHAS, dtype=None) -> Path:
    model = load(source)
    for layer, alpha in alphas.items():
        model.blocks[layer].attention_mode, model.blocks[layer].alpha = "vo", alpha
    save(model, folder, source, dtype)
    return folder


def export(pruned: Path, *options: str) -> Path:
    folder = pruned.with_name(pruned.name + "-export" + "".join(options))
    assert export_hf.main(["--ckpt", str(pruned), "--out", str(folder), "--ctx", "7", *options]) == 0
    return folder


def in_stock(folder: Path, attention: str = "eager", dtype: torch.dtype = torch.float32):
    """Stock transformers' model of a folder; nothing in the folder may be left over and nothing may be missing."""
    model, facts = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    assert not any(facts.values()), facts
    assert type(model).__name__ in export_hf.ARCHITECTURES.values()
    return model.eval()


@torch.inference_mode()
def share(model, ids: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    logits = model(ids)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return ((logits - expected).abs().max() / expected.abs().max()).item()


@torch.inference_mode()
def decodes_alike(stock, ours: Transformer, prompt: torch.Tensor, new: int = 64) -> bool:
    stock.generation_config.eos_token_id = None
    return torch.equal(stock.generate(prompt, max_new_tokens=new, do_sample=False), ours.generate(prompt, new))


# ------------------------------------------------------------------------------------------------ golden, all families


@pytest.mark.parametrize("case", ["logits_top2", "logits_top3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_checkpoints_reloaded_and_exported(family, case, tmp_path):
    golden = load_file(GOLDEN / family / "golden.safetensors")
    facts = json.loads((GOLDEN / family / "golden.json").read_text())["cases"][case]
    pruned = pruned_folder(GOLDEN / family, tmp_path / "p", dict(zip(facts["pruned_layers"], facts["alphas"])))
    assert share(load(pruned), golden["input_ids"], golden[case]) < BOUND
    assert (pruned / "model.safetensors").stat().st_size < (GOLDEN / family / "model.safetensors").stat().st_size

    folder = export(pruned)
    config = read_json(folder / "config.json")
    exact = 8 if family == "gemma2" else golden["input_ids"].shape[1]  # its softcap of 5 leaves only the window of 8
    assert config["max_position_embeddings"] >= exact and not {"harp", "auto_map"} & config.keys()
    for attention in ["eager"] if family == "gemma2" else ["eager", "sdpa"]:
        stock = in_stock(folder, attention)
        assert share(stock, golden["input_ids"][:, :exact], golden[case][:, :exact]) < BOUND
    if family != "gemma2":
        assert decodes_alike(stock, load(pruned), golden["input_ids"])


@pytest.mark.parametrize("softcap, encoding, cache", [(50.0, "spike", None), (5.0, "window", "static")])
def test_gemma2_decodes_with_the_cache_it_asks_for(softcap, encoding, cache, golden_copy, tmp_path):
    """Released Gemma2 models have a softcap of 50, which leaves room for a spike."""
    source = golden_copy("gemma2", attn_logit_softcapping=softcap, sliding_window=128)
    pruned = pruned_folder(source, tmp_path / "p")
    stock = in_stock(export(pruned))
    assert (1 in (stock.config.sliding_window,)) == (encoding == "window")
    assert stock.generation_config.cache_implementation == cache
    ids = load_file(GOLDEN / "gemma2" / "golden.safetensors")["input_ids"]
    assert share(stock, ids, load(pruned)(ids)) < BOUND
    assert decodes_alike(stock, load(pruned), ids)


@pytest.mark.parametrize("variant", ["llama-biases", "mistral-tied", "qwen2-window"])
def test_variants(variant, stock, ids, tmp_path):
    """Biases, linear RoPE scaling, tied heads, windows of 7 in some layers."""
    pruned = pruned_folder(stock(variant)[0], tmp_path / "p")
    folder = export(pruned)
    with torch.inference_mode():
        expected = load(pruned)(ids)
    for attention in ("eager", "sdpa"):
        assert share(in_stock(folder, attention), ids, expected) < BOUND
    assert decodes_alike(in_stock(folder), load(pruned), ids[:1, :20], 20)


@pytest.mark.parametrize("variant, options", [("mistral-window", ()), ("qwen2-window", ("--encoding", "window"))])
def test_a_lost_window_bounds_what_is_exact(variant, options, stock, ids, tmp_path):
    """Llama has no window, and a model has one: where that was 7 and is now 1, the other layers see everything."""
    pruned = pruned_folder(stock(variant)[0], tmp_path / "p")
    folder = export(pruned, *options)
    assert read_json(folder / "config.json")["max_position_embeddings"] == 7
    for length in (7, 8):
        with torch.inference_mode():
            expected = load(pruned)(ids[:, :length])
        assert (share(in_stock(folder), ids[:, :length], expected) < BOUND) == (length == 7)


def test_the_default_cache_is_wrong_when_the_window_is_1(tmp_path):
    """Why the window encoding asks for a static cache. Red: transformers has mended it, and the request can go."""
    pruned = pruned_folder(GOLDEN / "qwen2", tmp_path / "p")
    model = in_stock(export(pruned, "--encoding", "window"))
    prompt = load_file(GOLDEN / "qwen2" / "golden.safetensors")["input_ids"]
    assert decodes_alike(model, load(pruned), prompt)
    model.generation_config.cache_implementation = None
    assert not decodes_alike(model, load(pruned), prompt)


# ------------------------------------------------------------------------------------------------------ half precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_spike_is_as_sharp_as_a_mask(dtype, tmp_path):
    """A window of 1 is exact by construction, and a spike gives the same bits, up to the longest context."""
    pruned = pruned_folder(GOLDEN / "qwen2", tmp_path / "p", {4: 0.7, 2: 0.3})
    ids = torch.randint(320, (1, 512), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = in_stock(export(pruned, "--encoding", "window"), dtype=dtype)(ids).logits
        assert torch.equal(in_stock(export(pruned), dtype=dtype)(ids).logits, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bfloat16_folders_stay_bfloat16(family, golden_copy, tmp_path):
    pruned = pruned_folder(golden_copy(family), tmp_path / "p", {4: 0.1, 3: 0.0}, torch.bfloat16)
    folder = export(pruned)
    kinds = {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}
    exact = {name for name, dtype in kinds.items() if dtype != torch.bfloat16}
    norms = {f"model.layers.{layer}.post_attention_layernorm.weight" for layer in (3, 4)}
    assert exact == (norms if family == "gemma2" else set())  # a norm with alpha inside is kept in float32
    assert read_json(folder / "config.json")["torch_dtype"] == "bfloat16"
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        expected = load(pruned, torch.float32)(ids)
        ours = share(load(pruned), ids, expected)
        assert share(in_stock(folder, dtype=torch.bfloat16), ids, expected) < 3 * ours < 0.2


# ------------------------------------------------------------------------------------------------------ the spike alone

SHAPES = {
    "Llama-3.1-8B": dict(max_position_embeddings=131072, rope_theta=5e5, rope_type="llama3", rope_factor=8.0),
    "Mistral-7B-v0.3": dict(rope_theta=1e6),
    "Qwen2-7B": dict(max_position_embeddings=131072, rope_theta=1e6),
    "Gemma2-9B": dict(max_position_embeddings=8192, head_dim=256, query_scale=1 / 16, attn_softcap=50.0),
    "Gemma2-27B": dict(max_position_embeddings=8192, query_scale=1 / 12, attn_softcap=50.0),
    "Llama-2 x 4": dict(max_position_embeddings=16384, rope_type="linear", rope_factor=4.0),  # neighbours look alike
    "Mistral-7B-v0.1": dict(),  # a context in which the slowest pair turns by half
}


def config_of(name: str) -> ModelConfig:
    base = ModelConfig(
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=128,
        max_position_embeddings=32768,
        sliding_windows=(None,),
        query_scale=128**-0.5,
    )
    return dataclasses.replace(base, **SHAPES[name])


@pytest.mark.parametrize("name", SHAPES)
def test_the_token_itself_wins_at_every_distance(name):
    """Through the model's own RoPE, rounded as eager attention rounds in bfloat16."""
    config, half = config_of(name), torch.bfloat16
    (q, k), lead = spike.make_spike(config)
    assert lead > 99
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(config))
    rope = angles.cos().to(half), angles.sin().to(half)
    biases = (torch.cat((bias, torch.zeros_like(bias))).to(half) for bias in (q, k))
    q, k = (rotate(bias.expand(len(positions), -1), rope) for bias in biases)
    for position in (1, 2, 7, 500, len(positions) // 3, len(positions) - 1):
        scores = (k[: position + 1] @ q[position]) * torch.tensor(config.query_scale, dtype=half)
        if config.attn_softcap:
            scores = config.attn_softcap * torch.tanh(scores / config.attn_softcap)
        weights = scores.float().softmax(0)
        assert weights[-1] == 1 and weights[:-1].sum() < 1e-30


# ------------------------------------------------------------------------------------------- a bug in it: must turn red


def tiled(folded, config):  # k0 k1 k0 k1 in place of k0 k0 k1 k1
    shell = torch.nn.Linear(config.n_heads * config.head_dim, len(folded.weight), bias=False, device="meta")
    shell.weight = torch.nn.Parameter(folded.weight.detach().repeat(1, config.n_heads // config.n_kv_heads) / 2)
    shell.bias = folded.bias
    return shell


def flat_spike(config):
    (q, k), lead = real_spike(config)
    return (q / 10, k / 10), lead


real_spike = spike.make_spike
def without_window(checkpoint, plan):
    return real_config(checkpoint, plan) | {"layer_types": ["full_attention"] * plan.config.n_layers}


def without_static_cache(file, content):
    real_write(file, content | {"cache_implementation": None})


real_config, real_write = export_hf.export_config, export_hf.write_json
BUGS = {
    "spike too small": ("llama", "make_spike", flat_spike),
    "o_proj tiled": ("llama", "unfold", tiled),
    "no window": ("gemma2", "export_config", without_window),
    "default cache": ("gemma2", "write_json", without_static_cache),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_check_catches_a_wrong_export(bug, tmp_path, golden_copy, monkeypatch, capsys):
    family, name, broken = BUGS[bug]
    changes = dict(sliding_window=128) if family == "gemma2" else {}
    pruned = pruned_folder(golden_copy(family, **changes), tmp_path / "pruned", {4: 0.7})
    monkeypatch.setattr(export_hf, name, broken)
    assert export_hf.main(["--ckpt", str(pruned), "--out", str(tmp_path / "x")]) == 2
    assert "not exported" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {family, "pruned"}  # nothing half-made stays behind


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.fixture
def qwen(tmp_path) -> Path:
    """A pruned folder with a report, as harp.py leaves it."""
    folder = pruned_folder(GOLDEN / "qwen2", tmp_path / "pruned", {4: 0.7, 3: 0.0})
    steps = [dict(layer=layer, alpha=alpha, ppl=30.0 + layer) for layer, alpha in ((4, 0.7), (3, 0.0))]
    facts = {"file": "a.txt", "windows": 4, "tokens_scored": 2044}
    ppl = {"dense": 19.5, "pruned": 21.25, "alpha_1": 30.0, "alpha_0": None, "saved": 21.25}
    report = {"model": "Tiny-Qwen", "steps": steps, "dense_ppl": 29.0, "text": facts, "heldout_text": facts}
    (folder / "harp.json").write_text(json.dumps(report | {"heldout_ppl": ppl}))
    return folder


def other_alpha(folder):
    report = read_json(folder / "harp.json")
    report["steps"][0]["alpha"] = 0.6
    (folder / "harp.json").write_text(json.dumps(report))


def other_config_alpha(folder):  # a layer that is there is said to have nothing left
    config = read_json(folder / "config.json")
    config["harp"]["alphas"]["4"] = 0.0
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "harp.json").unlink()


def lost_layer(folder):
    rewrite_weights(folder, lambda weights: weights.pop("model.layers.4.self_attn.o_proj.weight"))


def dense_instead(folder):
    shutil.copy(GOLDEN / "qwen2" / "config.json", folder)
    shutil.copy(GOLDEN / "qwen2" / "model.safetensors", folder)


REFUSALS = {
    "dense": (dense_instead, (), "is not pruned"),
    "report of other alphas": (other_alpha, (), "other layers or alphas"),
    "report of something else": (lambda folder: (folder / "harp.json").write_text('{"steps": [1]}'), (), "no report"),
    "config of other alphas": (other_config_alpha, (), "does not ask for"),
    "lost weights": (lost_layer, (), "lacks"),
    "output exists": (lambda folder: (folder.parent / "x").mkdir(), (), "exists"),
    "context too long": (lambda folder: None, ("--ctx", "513"), "exact for 2 to 512"),
    "context too short": (lambda folder: None, ("--ctx", "1"), "exact for 2 to 512"),
}


@pytest.mark.parametrize("mistake", REFUSALS)
def test_mistakes_end_in_one_sentence(mistake, qwen, tmp_path, capsys):
    spoil, options, words = REFUSALS[mistake]
    spoil(qwen)
    before = sorted(tmp_path.rglob("*"))
    assert export_hf.main(["--ckpt", str(qwen), "--out", str(tmp_path / "x"), *options]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "family, options, words",
    [
        ("gemma2", ("--encoding", "spike"), "use --encoding window"),  # a softcap of 5 leaves a lead of 10 nats
        ("gemma2", ("--ctx", "9"), "exact for 2 to 8"),
        ("mistral", ("--encoding", "window"), "use --encoding spike"),
    ],
)
def test_what_an_encoding_cannot_do_is_refused(family, options, words, tmp_path, capsys):
    pruned = pruned_folder(GOLDEN / family, tmp_path / "p")
    assert export_hf.main(["--ckpt", str(pruned), "--out", str(tmp_path / "x"), *options]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_without_transformers_it_says_so(qwen, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_hf.importlib.util, "find_spec", lambda name: None)
    assert export_hf.main(["--ckpt", str(qwen), "--out", str(tmp_path / "x")]) == 0
    assert "not checked: transformers is not installed" in capsys.readouterr().out


def test_model_card(qwen):
    card = (export(qwen) / "README.md").read_text()
    assert card.startswith("---\n") and "# Tiny-Qwen, pruned with HARP" in card
    assert "| 4 | 0.7 | 34.0000 |\n| 3 | 0 | 33.0000 |" in card
    assert "a.txt (4 windows, 2,044 tokens scored), where the original has 29.0000" in card
    assert "19.5000 before, 21.2500 pruned" in card and "at alpha 0: not finite" in card
    assert "Qwen2ForCausalLM" in card and "not for speed" in card and "eager" not in card


def test_model_card_without_a_report(tmp_path):
    card = (export(pruned_folder(GOLDEN / "gemma2", tmp_path / "tiny", {4: 0.7})) / "README.md").read_text()
    assert "# tiny, pruned" in card and "| 4 | 0.7 |  |" in card
    assert "exact up to 8 tokens" in card and 'attn_implementation="eager"' in card and "static cache" in card


def test_the_tokenizer_survives_the_change_of_family(tmp_path):
    """A Mistral becomes a Llama, whose tokenizer class splits text in its own way, whatever tokenizer.json says."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pruned = pruned_folder(GOLDEN / "mistral", tmp_path / "p")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([TRAINING_TEXT], trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>"]))
    tokenizer.save(str(pruned / "tokenizer.json"))
    (pruned / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    text = "It is a truth,  universally\n\nacknowledged: 1234 + 1 = 2."
    stock = transformers.AutoTokenizer.from_pretrained(export(pruned))
    assert stock(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).ids


# ---------------------------------------------------------------------------------------------------- downstream tasks

PROTOCOL = {
    "nq_open": 5,
    "winogrande": 5,
    "arc_challenge": 25,
    "boolq": 0,
    "openbookqa": 0,
    "piqa": 0,
    "mmlu": 5,
    "triviaqa": 5,
    "gsm8k": 5,
    "leaderboard_math_hard": 4,
    "bbh_cot_fewshot": 3,
    "longbench": 0,
}


def downstream(folder: Path, tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess, list[list[str]]]:
    """Run the script with an lm_eval in the path that only writes its arguments down."""
    (tmp_path / "bin").mkdir()
    log, fake = tmp_path / "log", tmp_path / "bin" / "lm_eval"
    fake.write_text(f"#!/bin/sh\nprintf '%s\\t' \"$@\" >> {log}\necho >> {log}\n")
    fake.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", ROOT / "extras" / "downstream.sh", folder, *options]
    result = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    return result, [line.split("\t")[:-1] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_downstream_runs_the_papers_protocol(family, tmp_path):
    folder = GOLDEN / family
    result, calls = downstream(folder, tmp_path, "--limit", "2")
    assert result.returncode == 0, result.stderr
    options = [dict(zip(call[::2], call[1::2])) for call in calls]
    assert {call["--tasks"]: int(call["--num_fewshot"]) for call in options} == PROTOCOL
    assert len(calls) == len(PROTOCOL) and all(call["--limit"] == "2" for call in options)
    eager = ",attn_implementation=eager" if family == "gemma2" else ""
    assert {call["--model_args"] for call in options} == {f"pretrained={folder},dtype=auto{eager}"}
    assert options[0]["--output_path"] == f"{folder}.lm-eval/nq_open"


def test_downstream_refuses_what_transformers_cannot_load(qwen, tmp_path):
    result, calls = downstream(qwen, tmp_path)
    assert result.returncode == 2 and "export_hf" in result.stderr and calls == []


TASK = """
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
"""


def test_lm_eval_sees_the_same_log_likelihoods(toy, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [
        {"question": "A single man in possession of a good fortune is in want of a", "choices": ["wife", "horse"]},
        {"question": "It was said that he was", "choices": ["rich", "a gentleman", "at home"]},
    ]
    data = tmp_path / "data.json"
    data.write_text("\n".join(json.dumps(question | {"answer": 0}) for question in questions))
    (tmp_path / "local.yaml").write_text(TASK.replace("DATA", str(data)))
    source = tmp_path / "toy"
    shutil.copytree(toy, source)
    write_bpe_tokenizer(source, tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>", add_bos_token=False)
    pruned = pruned_folder(source, tmp_path / "pruned")
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={export(pruned)},dtype=float32,device=cpu",
        tasks=["local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    model, tokenizer = load(pruned), load_tokenizer(pruned)
    for sample in result["samples"]["local"]:
        for choice, ((theirs, _),) in zip(sample["doc"]["choices"], sample["resps"]):
            question = sample["doc"]["question"]
            ids = torch.tensor(tokenizer.encode(f"{question} {choice}"))
            with torch.inference_mode():
                scores = model(ids[None])[0, :-1].log_softmax(-1).gather(1, ids[1:, None])
            answer = scores[len(tokenizer.encode(question)) - 1 :].sum().item()
            assert abs(answer - theirs) < 1e-4
