"""A checkpoint folder on disk: its config.json, validated, and an index of its tensors.

The untidy world ends here. Every way in which a folder can be wrong becomes a `UserError`, one sentence that says
what is wrong, where, and what to do; what comes out is safe to build a model from.
"""

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class UserError(Exception):
    """A mistake of the user's, told in one sentence. `main()` prints it to stderr and exits with code 2."""


FAMILIES = ("llama", "mistral", "qwen2", "gemma2")
ABSENT = object()  # the family does not know this key

# What a config.json may say, and what stock transformers (5.24, configuration_*.py) assumes when it is silent.
# A "?" marks a kind that may also be null.
CONFIG_KEYS = [
    # key                      kind      llama    mistral  qwen2    gemma2
    ("vocab_size",             "size",   32000,   32000,   151936,  256000),
    ("hidden_size",            "size",   4096,    4096,    4096,    2304),
    ("intermediate_size",      "size",   11008,   14336,   22016,   9216),
    ("num_hidden_layers",      "size",   32,      32,      32,      26),
    ("num_attention_heads",    "size",   32,      32,      32,      8),
    ("num_key_value_heads",    "size?",  None,    8,       32,      4),
    ("head_dim",               "size?",  None,    None,    None,    256),
    ("max_position_embeddings", "size",  2048,    131072,  32768,   8192),
    ("rms_norm_eps",           "number", 1e-6,    1e-6,    1e-6,    1e-6),
    ("hidden_act",             "name",   "silu",  "silu",  "silu",  ABSENT),
    ("hidden_activation",      "name",   ABSENT,  ABSENT,  ABSENT,  "gelu_pytorch_tanh"),
    ("attention_bias",         "flag",   False,   ABSENT,  ABSENT,  False),
    ("mlp_bias",               "flag",   False,   ABSENT,  ABSENT,  ABSENT),
    ("tie_word_embeddings",    "flag",   False,   False,   False,   True),
    ("sliding_window",         "size?",  ABSENT,  4096,    4096,    4096),
    ("use_sliding_window",     "flag",   ABSENT,  ABSENT,  False,   ABSENT),
    ("max_window_layers",      "count",  ABSENT,  ABSENT,  28,      ABSENT),
    ("layer_types",            "names?", ABSENT,  ABSENT,  None,    None),
    ("query_pre_attn_scalar",  "number", ABSENT,  ABSENT,  ABSENT,  256),
    ("attn_logit_softcapping", "number?", ABSENT, ABSENT,  ABSENT,  50.0),
    ("final_logit_softcapping", "number?", ABSENT, ABSENT, ABSENT,  30.0),
    ("bos_token_id",           "count?", 1,       1,       None,    2),
    ("eos_token_id",           "ids?",   2,       2,       None,    1),
]  # fmt: skip

# Keys of models that look like ours and are not; null, false or 0 is as good as absent.
FOREIGN_KEYS = {
    "quantization_config": "the weights are quantised",
    "compression_config": "the weights are quantised",
    "quantization": "the weights are quantised",
    "num_experts": "it is a mixture of experts",
    "num_local_experts": "it is a mixture of experts",
    "n_routed_experts": "it is a mixture of experts",
    "text_config": "it is a multimodal model",
    "vision_config": "it is a multimodal model",
    "audio_config": "it is a multimodal model",
    "use_bidirectional_attention": "its attention is not causal",
    "attention_chunk_size": "its attention is cut into chunks",
    "per_layer_config": "its layers have different shapes",
}
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                   "special_tokens_map.json", "added_tokens.json", "generation_config.json")  # fmt: skip
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # that weights may be stored in


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str  # in safetensors' spelling: F32, F16, BF16
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    config: dict  # the family's CONFIG_KEYS, "model_type", "rope", "harp" (layer -> alpha), "harp_constants" (layers)
    tensors: dict[str, StoredTensor]

    @property
    def n_bytes(self) -> int:
        return sum(math.prod(t.shape) * (4 if t.dtype == "F32" else 2) for t in self.tensors.values())


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read config.json and the headers of the weight files; no weight is read yet. Raises UserError."""
    path = check_folder(path)
    checkpoint = Checkpoint(path, read_config(path), read_index(path))
    n_layers, n_tensors = checkpoint.config["num_hidden_layers"], len(checkpoint.tensors)
    if n_layers > n_tensors:  # seen before anything is built: a billion empty layers take forever too
        raise UserError(f"{path / 'config.json'} has num_hidden_layers = {n_layers}, but there are {n_tensors} tensors")
    return checkpoint


def check_folder(path: str | Path) -> Path:
    path = Path(path)
    takes = "--ckpt takes the folder that holds config.json and *.safetensors"
    if not os.path.exists(path):  # unlike Path.exists, it also says no to a name that is too long
        raise UserError(f"{path} does not exist; {takes}")
    if not path.is_dir():
        raise UserError(f"{path} is a file; {takes}")
    if not os.path.lexists(path / "config.json"):
        raise UserError(f"{path} has no config.json{found_instead(path)}; {takes}")
    return path


def has(file: Path) -> bool:
    """Whether there is such a file. A folder, a pipe or a link that leads nowhere bears its name in vain: UserError."""
    if os.path.isfile(file) or not os.path.lexists(file):
        return os.path.isfile(file)
    if file.is_symlink():
        raise UserError(f"{file} is a link to {os.readlink(file)}, which is no file; download the checkpoint again, or "
                        "copy it with its links followed")  # fmt: skip
    raise UserError(f"{file} is not a file; download it again")


def read_json(file: Path) -> dict:
    """A JSON object from a file, or a UserError that says why there is none."""
    if not has(file):
        raise UserError(f"{file} does not exist; download it again")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file} is not valid JSON{what_it_is(file)}; download it again") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold a JSON object; download it again")
    return content


def fits(value: object, shape: object) -> bool:
    """Whether a JSON value has a shape: a type, [the shape of every item] or {key: the shape of its value}."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(fits(value.get(key), item) for key, item in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(item, shape[0]) for item in value)
    return isinstance(value, shape) and not isinstance(value, bool)


def what_it_is(file: Path) -> str:
    """What often lies where a file should be, as a clause to put into a message, or an empty string."""
    with file.open("rb") as handle:
        start = handle.read(512)
    if not start:
        return " (it is empty)"
    if start.startswith(b"version https://git-lfs"):
        return " (it is a git-lfs pointer, not the file itself: run `git lfs pull` in that folder)"
    if re.match(rb'\s*(<|\{\s*"(error|message|detail)")', start):
        return " (it is a web page or an error message that was saved in the file's place)"
    if not start.strip(b"\0"):
        return " (it begins with zeros only: its download or its disk broke off)"
    if start.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        return " (it begins with a byte-order mark: save it as UTF-8 without one)"
    return ""


# ---------------------------------------------------------------------------------------------------- config.json


def read_config(path: Path) -> dict:
    """config.json with the family's defaults filled in, and RoPE's facts under "rope" whatever their spelling."""
    file = path / "config.json"
    stored = read_json(file)
    family = stored.get("model_type")
    for key, why in FOREIGN_KEYS.items():
        if stored.get(key) not in (None, False, 0):
            raise UserError(f"{file} has {key!r}: {why}, which is not supported; use a plain dense checkpoint")
    if stored.get("is_causal", True) is not True:
        raise UserError(f"{file} has is_causal = {stored['is_causal']!r}; only causal attention is supported")
    if family not in FAMILIES:
        raise UserError(f"{file} has model_type {family!r}; supported are {', '.join(FAMILIES)}")
    if family in ("llama", "mistral") and "layer_types" in stored:  # stock takes such a Mistral for a Ministral
        raise UserError(f"{file} has layer_types, which {family} does not know; it is a model of another family")
    config = {"model_type": family}
    for key, kind, *defaults in CONFIG_KEYS:
        default = defaults[FAMILIES.index(family)]
        if default is ABSENT:
            continue
        config[key] = stored.get(key, default)
        if not is_of_kind(config[key], kind):
            raise UserError(f"{file} has {key} = {config[key]!r:.80}, expected {KIND_NAMES[kind.rstrip('?')]}")
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise UserError(
            f"{file}: {config['num_attention_heads']} attention heads cannot share "
            f"{config['num_key_value_heads']} key/value heads (num_key_value_heads must divide num_attention_heads)"
        )
    if config["head_dim"] is None:
        if config["hidden_size"] % config["num_attention_heads"]:
            raise UserError(f"{file} has no head_dim, and hidden_size is not a multiple of num_attention_heads")
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if config["head_dim"] % 2:
        raise UserError(f"{file} has head_dim = {config['head_dim']}, expected an even number (RoPE turns pairs)")
    if config["num_attention_heads"] * config["head_dim"] > LARGEST:
        raise UserError(f"{file}: num_attention_heads x head_dim is above {LARGEST:,}; download it again")
    if family == "gemma2" and config["sliding_window"] is None and config["layer_types"] is None:
        raise UserError(f"{file} has sliding_window = null, but every other layer of Gemma2 slides; download it again")
    config["rope"] = read_rope(file, stored)
    config["rope"].setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    config["harp"] = read_harp(file, stored, config["num_hidden_layers"])
    config["harp_constants"] = stored["harp"].get("constants", []) if config["harp"] else []
    if not isinstance(config["harp_constants"], list) or not all(
        type(layer) is int and layer in config["harp"] for layer in config["harp_constants"]
    ):
        raise UserError(f"{file} has 'constants' in 'harp' that are no list of pruned layers; prune the original again")
    return config


def read_harp(file: Path, stored: dict, n_layers: int) -> dict[int, float]:
    """Layer -> alpha of what `load_weights.save` wrote; empty for an ordinary checkpoint."""
    if "harp" not in stored:
        return {}
    harp = stored["harp"]
    alphas = harp.get("alphas") if isinstance(harp, dict) and harp.get("version") == 1 else None
    layers = {str(layer): layer for layer in range(n_layers)}
    if not isinstance(alphas, dict) or not alphas.keys() <= layers.keys():
        raise UserError(f"{file} has a 'harp' object that this version cannot read; prune the original again")
    if not all(value == 0 or is_of_kind(value, "number") for value in alphas.values()):
        raise UserError(f"{file} has an alpha in 'harp' that is not a finite number of at least 0")
    return {layers[name]: float(value) for name, value in alphas.items()}


# Far above any real size, and low enough that the entries of a matrix with such sides can still be counted.
LARGEST = 1 << 28
KIND_NAMES = {
    "size": f"a whole number from 1 to {LARGEST:,}",
    "count": f"a whole number from 0 to {LARGEST:,}",
    "number": "a number above 0 that float32 can hold",
    "flag": "true or false",
    "name": "a name",
    "names": "a list of names",
    "ids": "a token id or a list of them",
}


def is_of_kind(value: object, kind: str) -> bool:
    if value is None:
        return kind.endswith("?")
    whole = isinstance(value, int) and not isinstance(value, bool)
    match kind.rstrip("?"):
        case "size":
            return whole and 0 < value <= LARGEST
        case "count":
            return whole and 0 <= value <= LARGEST
        case "number":
            return (whole or isinstance(value, float)) and 1e-37 < value < 1e37
        case "flag":
            return isinstance(value, bool)
        case "name":
            return isinstance(value, str)
        case "names":
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case "ids":
            return all(is_of_kind(i, "count") for i in (value if isinstance(value, list) else [value]))


def read_rope(file: Path, stored: dict) -> dict:
    """RoPE's facts from either spelling: transformers 5 nests all of them in `rope_parameters`, transformers 4 has
    `rope_theta` at the top and `rope_scaling` beside it. Both may stand there if they say the same."""
    spelled = [stored[key] for key in ("rope_parameters", "rope_scaling") if stored.get(key) not in (None, {})] or [{}]
    facts = [rope_facts(file, stored, rope) for rope in spelled]
    if facts[0] != facts[-1]:
        raise UserError(f"{file} has both rope_parameters and rope_scaling, and they differ; delete the wrong one")
    return facts[0]


def rope_facts(file: Path, stored: dict, rope: object) -> dict:
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{file} has RoPE parameters that are not one flat object, which is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_KEYS or rope.get("type", kind) != kind:
        raise UserError(f"{file} asks for RoPE scaling of type {kind!r}; supported are {', '.join(ROPE_KEYS)}")
    outer = stored.get("partial_rotary_factor")
    partial = rope.get("partial_rotary_factor", 1 if outer is None else outer)
    if partial != 1:
        raise UserError(f"{file} has partial_rotary_factor = {partial!r}; only whole-head RoPE is supported")
    facts = {"rope_type": kind, "rope_theta": rope.get("rope_theta", stored.get("rope_theta", 10000.0))}
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
    extra = sorted(rope.keys() - known - set(ROPE_KEYS[kind]))
    if extra:  # a factor without its rope_type, say: whoever wrote it meant something by it
        raise UserError(f"{file} has {extra[0]!r}, which RoPE scaling of type {kind!r} does not use; one is wrong")
    for key in ROPE_KEYS[kind]:
        if key in rope:
            facts[key] = rope[key]
        elif key != "original_max_position_embeddings":  # stock falls back on max_position_embeddings
            raise UserError(f"{file} asks for RoPE scaling of type {kind!r} without {key!r}; download it again")
    # stock lets this one stand at the top, too, and go before the one inside
    outer = stored.get("original_max_position_embeddings")
    if kind == "llama3" and outer is not None and facts.setdefault("original_max_position_embeddings", outer) != outer:
        raise UserError(f"{file} has two original_max_position_embeddings, and they differ; delete the wrong one")
    for key, value in facts.items():
        if key != "rope_type" and not is_of_kind(value, "number"):
            raise UserError(f"{file} has {key} = {value!r:.80}, expected {KIND_NAMES['number']}")
    if kind == "llama3" and facts["low_freq_factor"] >= facts["high_freq_factor"]:
        raise UserError(f"{file}: RoPE's low_freq_factor must be smaller than its high_freq_factor")
    return facts


# -------------------------------------------------------------------------------------------------------- weights


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: by the index, else the single file, else a complete set of
    numbered shards. Never a blind `*.safetensors`: some folders also hold the same weights under other names."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if has(path / "adapter_config.json"):  # stock would add it to the weights beside it
        raise UserError(f"{path} holds an adapter (adapter_config.json); merge it into its base model first")
    if has(index):
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(map(is_file_name, weight_map.values())):
            raise UserError(f"{index} has no weight_map from tensor names to file names; download it again")
        files = [path / name for name in sorted(set(weight_map.values()))]
        if has(single) and single not in files:
            raise UserError(f"{path} holds both model.safetensors and an index of other files; delete the stale one")
    elif has(single):
        files = [single]
    else:
        shards = sorted(path.glob("model-*-of-*.safetensors"))
        total = shards[0].stem.rpartition("-of-")[2] if shards else ""
        if not re.fullmatch("[0-9]{1,5}", total):
            raise UserError(f"{path} has no model.safetensors{found_instead(path)}")
        files = [path / f"model-{i:0{len(total)}}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
    missing = [file.name for file in files if not has(file)]
    if missing:
        raise UserError(f"{path} lacks {len(missing)} of {len(files)} weight files ({', '.join(missing[:3])}"
                        f"{', ...' if len(missing) > 3 else ''}); download them again")  # fmt: skip
    return files


def is_file_name(name: object) -> bool:
    """A plain name, not a path: what an index lists lies beside it."""
    return isinstance(name, str) and name.endswith(".safetensors") and name.isprintable() and name == Path(name).name


def found_instead(path: Path) -> str:
    """What a folder without config.json or without weights holds in their place, as a clause for a message."""
    names = sorted(os.listdir(path))
    for pattern, why in (
        (r"\.incomplete$", "its download is not finished; run it again"),
        (r"^snapshots$", "it is a download cache, the checkpoint is one of the folders in snapshots"),
        (r"^(consolidated.*|params\.json)$", "its maker's own files have another layout; take Hugging Face's"),
        (r"\.gguf$", "GGUF files are not read; take the safetensors checkpoint"),
        (r"\.(bin|pth|pt|ckpt|pkl)$", "pickled weights are not read; convert them to safetensors"),
        (r"\.(h5|msgpack|npz|onnx)$", "only safetensors weights are read; convert them"),
    ):
        found = [name for name in names if re.search(pattern, name)]
        if found:
            return f" but has {found[0]}: {why}"
    return "; it is empty" if not names else ""


def read_index(path: Path) -> dict[str, StoredTensor]:
    """Where every tensor of the checkpoint lies, from the files' headers alone."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():
                    entry = handle.get_slice(name)
                    tensor = StoredTensor(file, entry.get_dtype(), tuple(entry.get_shape()))
                    if name in tensors:
                        raise UserError(f"{name} is in both {tensors[name].file.name} and {file.name} of {path}")
                    if tensor.dtype not in DTYPES:
                        raise UserError(
                            f"{name} in {file} is stored as {tensor.dtype}: quantised or integer weights are not "
                            f"supported; use a checkpoint in {', '.join(DTYPES)}"
                        )
                    if not math.prod(tensor.shape):
                        raise UserError(f"{name} in {file} is empty (shape {list(tensor.shape)}); download it again")
                    tensors[name] = tensor
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror or error}") from None
        except SafetensorError as error:
            raise UserError(
                f"{file} ({size_facts(file)}) is not a complete safetensors file{what_it_is(file)}: {error}; "
                "download it again"
            ) from None
    index = path / "model.safetensors.index.json"
    if has(index):
        listed = set(read_json(index)["weight_map"])
        if listed != set(tensors):
            name = sorted(listed ^ set(tensors))[0]
            where = "not in the files" if name in listed else "not in the index"
            raise UserError(f"{index} does not fit its files: {name} is {where}; download both again")
    return tensors


def size_facts(file: Path) -> str:
    """A safetensors file's size and the size that its header promises: 8 bytes, the header, the last offset."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        header_size = int.from_bytes(handle.read(8), "little")
        header = handle.read(min(header_size, size))
    ends = [int(end) for end in re.findall(rb'"data_offsets":\s*\[\s*\d+\s*,\s*(\d{1,15})\s*\]', header)]
    promised = 8 + header_size + max(ends, default=0)
    return f"{size:,} bytes" + (f", {promised:,} expected" if ends and size != promised else "")


MAY_BE_ZERO = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "lm_head.weight",
    ".bias",
    ".constant",
)


def check_values(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    """Refuse a tensor with NaN or infinity in it, as it is or after conversion to another dtype, and one of zeros where
    zeros can only be a hole in the file. One pass at the speed of memory, nothing is copied. Raises UserError."""
    lowest, highest = (bound.item() for bound in tensor.aminmax())  # NaN if there is any
    where = f"{name} in {checkpoint.tensors[name].file}"
    if not (math.isfinite(lowest) and math.isfinite(highest)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{where} holds NaN or infinity as {dtype}; download it again, or take --dtype float32")
    # Gemma2 multiplies by 1 + weight: there a norm of zeros only normalises, and is what an untrained model has
    no_hole = MAY_BE_ZERO + (("norm.weight",) if checkpoint.config["model_type"] == "gemma2" else ())
    if lowest == highest == 0 and not name.endswith(no_hole):
        raise UserError(f"{where} holds nothing but zeros, so that part of the file is missing; download it again")
