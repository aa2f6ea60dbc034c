"""Checkpoint folder -> Transformer and back: translate the config, translate the names, assign the tensors."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from checkpoint import DTYPES, TOKENIZER_FILES, Checkpoint, UserError, check_values, open_checkpoint, read_json
from model import ACTIVATIONS, ModelConfig, Transformer

# Hugging Face's names -> ours; {} is the layer, None means: left out on purpose.
TENSOR_NAMES = {
    "model.embed_tokens.weight": "embed_tokens.weight",
    "model.layers.{}.self_attn.q_proj.weight": "blocks.{}.attn.q_proj.weight",
    "model.layers.{}.self_attn.q_proj.bias": "blocks.{}.attn.q_proj.bias",
    "model.layers.{}.self_attn.k_proj.weight": "blocks.{}.attn.k_proj.weight",
    "model.layers.{}.self_attn.k_proj.bias": "blocks.{}.attn.k_proj.bias",
    "model.layers.{}.self_attn.v_proj.weight": "blocks.{}.attn.v_proj.weight",
    "model.layers.{}.self_attn.v_proj.bias": "blocks.{}.attn.v_proj.bias",
    "model.layers.{}.self_attn.o_proj.weight": "blocks.{}.attn.o_proj.weight",
    "model.layers.{}.self_attn.o_proj.bias": "blocks.{}.attn.o_proj.bias",
    "model.layers.{}.self_attn.constant": "blocks.{}.constant",  # of our own pruned folders only
    "model.layers.{}.mlp.gate_proj.weight": "blocks.{}.mlp.gate_proj.weight",
    "model.layers.{}.mlp.gate_proj.bias": "blocks.{}.mlp.gate_proj.bias",
    "model.layers.{}.mlp.up_proj.weight": "blocks.{}.mlp.up_proj.weight",
    "model.layers.{}.mlp.up_proj.bias": "blocks.{}.mlp.up_proj.bias",
    "model.layers.{}.mlp.down_proj.weight": "blocks.{}.mlp.down_proj.weight",
    "model.layers.{}.mlp.down_proj.bias": "blocks.{}.mlp.down_proj.bias",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.layers.{}.self_attn.rotary_emb.inv_freq": None,  # old files store what the config already says
}
# "post_attention_layernorm" is the norm before the MLP in three families, and the norm after attention in Gemma2.
TWO_NORM_NAMES = {
    "model.layers.{}.input_layernorm.weight": "blocks.{}.attn_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blocks.{}.mlp_norm.weight",
}
FOUR_NORM_NAMES = {
    "model.layers.{}.input_layernorm.weight": "blocks.{}.attn_norm.weight",
    "model.layers.{}.post_attention_layernorm.weight": "blocks.{}.attn_post_norm.weight",
    "model.layers.{}.pre_feedforward_layernorm.weight": "blocks.{}.mlp_norm.weight",
    "model.layers.{}.post_feedforward_layernorm.weight": "blocks.{}.mlp_post_norm.weight",
}


def load(path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> Transformer:
    """Build the model that a checkpoint folder describes and give it the folder's weights.

    `dtype=None` keeps the dtype in which most of the weights are stored. On the CPU, weights that need no conversion
    stay memory-mapped. A pruned folder (`save`) comes back pruned. Returns the model in eval mode, its config at
    `.config`. Raises UserError.
    """
    checkpoint = open_checkpoint(path)
    with torch.device("meta"):  # shapes only, no memory
        model = Transformer(model_config(checkpoint.config))
        for layer, alpha in checkpoint.config["harp"].items():
            model.blocks[layer].attention_mode, model.blocks[layer].alpha = "vo", alpha
            if layer in checkpoint.config["harp_constants"]:
                model.blocks[layer].constant = nn.Parameter(torch.empty(model.config.hidden_size))
        model.prune_()
    sources = match_tensors(model, checkpoint)
    if dtype is None:
        dtype = stored_dtype(checkpoint)
    model.load_state_dict(read_tensors(checkpoint, sources, dtype, device), strict=True, assign=True)
    return model.eval()


def save(model: Transformer, path: str | Path, source: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a model that was loaded from the folder `source`, its pruning made final, as a folder that `load` reads.

    The new folder has the source's tokenizer files and its config.json plus a "harp" object; weights are rounded once
    to `dtype` (None: as they are). Raises UserError if the disk is full.
    """
    parameters = model.prune_().state_dict()
    weights = {
        theirs: parameters[ours].to(device="cpu", dtype=dtype).contiguous()
        for theirs, ours in checkpoint_names(model).items()
        if ours is not None
    }
    harp = {
        "version": 1,
        "alphas": {str(layer): alpha for layer, alpha in sorted(model.pruned.items(), reverse=True)},
        "folded": ["o_proj"] if model.config.post_norms else ["o_proj", "alpha"],
    }
    constants = [layer for layer, block in enumerate(model.blocks) if block.constant is not None]
    if constants:
        harp["constants"] = constants
    write_folder(Path(path), weights, read_json(Path(source) / "config.json") | {"harp": harp}, Path(source))


def write_folder(path: Path, weights: dict[str, torch.Tensor], config: dict, source: Path) -> None:
    """A checkpoint folder with these weights, this config.json and the tokenizer files of `source`. config.json comes
    last, so that an unfinished folder is no checkpoint. Raises UserError if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        for name in TOKENIZER_FILES:
            if (source / name).exists():
                shutil.copyfile(source / name, path / name)
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from None


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of most of the stored tensors' entries."""
    size = dict.fromkeys(DTYPES, 0)
    for tensor in checkpoint.tensors.values():
        size[tensor.dtype] += torch.Size(tensor.shape).numel()
    return DTYPES[max(size, key=size.get)]


def model_config(config: dict) -> ModelConfig:
    """Translate a validated config.json (`checkpoint.read_config`); past this, nothing of the model asks which family
    it is. Raises UserError."""
    family, rope = config["model_type"], config["rope"]
    gemma = family == "gemma2"
    activation = config["hidden_activation" if gemma else "hidden_act"]
    if activation not in ACTIVATIONS:
        raise UserError(f"config.json asks for the activation {activation!r}; supported are {', '.join(ACTIVATIONS)}")
    eos = config["eos_token_id"]
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        sliding_windows=sliding_windows(config),
        query_scale=(config["query_pre_attn_scalar"] if gemma else config["head_dim"]) ** -0.5,
        norm_eps=config["rms_norm_eps"],
        norm_offset=1.0 if gemma else 0.0,
        post_norms=gemma,
        qkv_bias=family == "qwen2" or config.get("attention_bias", False),
        o_bias=config.get("attention_bias", False),
        mlp_bias=config.get("mlp_bias", False),
        attn_softcap=config.get("attn_logit_softcapping"),
        logit_softcap=config.get("final_logit_softcapping"),
        embed_scale=config["hidden_size"] ** 0.5 if gemma else 1.0,
        activation=activation,
        tied=config["tie_word_embeddings"],
        rope_theta=rope["rope_theta"],
        rope_type=rope["rope_type"],
        rope_factor=rope.get("factor", 1.0),
        rope_low_freq_factor=rope.get("low_freq_factor", 1.0),
        rope_high_freq_factor=rope.get("high_freq_factor", 4.0),
        rope_original_context=rope["original_max_position_embeddings"],
        eos_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
    )


def sliding_windows(config: dict) -> tuple[int | None, ...]:
    """The window of every layer: all layers of Mistral, Qwen2's upper ones if it is switched on, Gemma2's even ones;
    an explicit list of layer types overrides the rule of the last two."""
    family, n_layers, window = config["model_type"], config["num_hidden_layers"], config.get("sliding_window")
    if family == "qwen2" and not config["use_sliding_window"]:
        window = None
    if config.get("layer_types") is not None:
        kinds = config["layer_types"]
        if len(kinds) != n_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise UserError(
                f"config.json's layer_types must name full_attention or sliding_attention for each of {n_layers} layers"
            )
        slides = [kind == "sliding_attention" for kind in kinds]
        if any(slides) and window is None:
            raise UserError("config.json's layer_types has sliding layers, but no sliding_window is in force")
    elif family == "qwen2":
        slides = [layer >= config["max_window_layers"] for layer in range(n_layers)]
    elif family == "gemma2":
        slides = [layer % 2 == 0 for layer in range(n_layers)]
    else:
        slides = [True] * n_layers
    return tuple(window if slide else None for slide in slides)


def checkpoint_names(model: Transformer) -> dict[str, str | None]:
    """Every name that this model's checkpoint may hold -> the parameter it fills, or None if it is left out."""
    patterns = TENSOR_NAMES | (FOUR_NORM_NAMES if model.config.post_norms else TWO_NORM_NAMES)
    parameters = model.state_dict().keys()
    names = {}
    for theirs, ours in patterns.items():
        for layer in range(model.config.n_layers) if "{}" in theirs else [0]:
            if ours is None:
                names[theirs.format(layer)] = None
            elif ours.format(layer) in parameters:
                names[theirs.format(layer)] = ours.format(layer)
    return names


def match_tensors(model: Transformer, checkpoint: Checkpoint) -> dict[str, str]:
    """Parameter of ours -> tensor of the checkpoint's. Strict both ways: every parameter is filled with a tensor of
    its shape, every tensor is used or left out by name. Raises UserError."""
    path, stored = checkpoint.path, checkpoint.tensors
    prefix = "" if "embed_tokens.weight" in stored else "model."  # a bare decoder is saved without it
    names = {
        (prefix + theirs.removeprefix("model.") if theirs.startswith("model.") else theirs): ours
        for theirs, ours in checkpoint_names(model).items()
    }
    if model.config.tied and "lm_head.weight" in stored:
        names["lm_head.weight"] = None
        check_tied(checkpoint, prefix + "embed_tokens.weight")
    sources = {ours: theirs for theirs, ours in names.items() if ours is not None}
    parameters = model.state_dict()
    missing = [theirs for theirs in sources.values() if theirs not in stored]
    extra = [name for name in stored if name not in names]
    if missing == ["lm_head.weight"]:
        raise UserError(f"{path} has no lm_head.weight, but config.json says tie_word_embeddings = false; one is wrong")
    if missing:
        raise UserError(f"{path} lacks {len(missing)} tensors that config.json asks for: {first_names(missing)}")
    if extra:
        raise UserError(f"{path} holds {len(extra)} tensors that config.json does not ask for: {first_names(extra)}")
    for ours, theirs in sources.items():
        found, expected = stored[theirs].shape, tuple(parameters[ours].shape)
        if found != expected:
            raise UserError(
                f"{theirs} in {stored[theirs].file} has shape {list(found)}, but config.json makes it "
                f"{list(expected)}; config.json and the weights do not belong together"
            )
    return sources


def first_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def check_tied(checkpoint: Checkpoint, embedding: str) -> None:
    """A tied checkpoint may store its head too, as long as it is the embedding."""
    if embedding in checkpoint.tensors:
        pair = {"head": "lm_head.weight", "embedding": embedding}
        tensors = read_tensors(checkpoint, pair, stored_dtype(checkpoint), "cpu")
        if not torch.equal(tensors["head"], tensors["embedding"]):
            raise UserError(
                f"{checkpoint.path}: config.json says tie_word_embeddings = true, but lm_head.weight differs from "
                f"{embedding}; one is wrong"
            )


def read_tensors(
    checkpoint: Checkpoint, sources: dict[str, str], dtype: torch.dtype, device: str | torch.device
) -> dict[str, torch.Tensor]:
    """Read the tensors that `sources` names, one at a time; what is converted is not kept in its old dtype too."""
    tensors = {}
    for file in sorted({checkpoint.tensors[theirs].file for theirs in sources.values()}):
        with safe_open(file, framework="pt") as handle:
            for ours, theirs in sources.items():
                if checkpoint.tensors[theirs].file == file:
                    tensor = handle.get_tensor(theirs).to(dtype)
                    check_values(checkpoint, theirs, tensor)
                    tensors[ours] = tensor.to(device)
    return tensors
