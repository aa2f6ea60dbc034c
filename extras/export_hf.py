"""A pruned model for other people's software: stock architecture, stock names, no custom code.

    python -m extras.export_hf --ckpt out/pruned --out out/for-transformers

Stock software always attends, so a pruned layer becomes an attention in which every token looks at itself alone:

    spike    q and k have no weights, only constant biases. RoPE turns these, so that scores depend on the distance
             alone, and at distance 0 they are so much higher that softmax gives the token itself exactly 1.
    window   sliding_window = 1 in the pruned layers. A model has one window, so layers that had another get full
             attention, and the export is exact only as far as theirs reached. For Qwen2 and Gemma2.

An export does all the work of full attention and keeps the whole KV cache: it is there to be evaluated and to be run by
other engines, not to be fast.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from checkpoint import Checkpoint, UserError, open_checkpoint, read_json
from eval_ppl import choose_dtype, dtype_name, exit_code
from extras.model_card import model_card
from extras.spike import make_spike
from load_weights import checkpoint_names, load, model_config, stored_dtype, write_folder
from model import Attention, Block, ModelConfig, RMSNorm, Transformer

# Whose architecture an export has. Stock Mistral has no biases, and is a Llama but for them and its window. Qwen2 would
# have both, but transformers 5.24 gives every folder of that family Qwen2's way of splitting text, silently.
FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "gemma2": "gemma2"}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gemma2": "Gemma2ForCausalLM"}
NEEDED_LEAD = 40.0  # softmax weights of exp(-40) are lost in float32, even 131,072 of them together
NEW_TOKENS = 64  # that the check decodes
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # of the largest logit
DROPPED_KEYS = (
    "harp", "harp_constants", "rope", "rope_parameters", "dtype", "auto_map", "cache_implementation", "sliding_window",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plan:
    encoding: str  # "spike" or "window"
    family: str  # whose architecture the export has
    config: ModelConfig  # of the export, a dense model; it is exact up to max_position_embeddings
    spike: tuple[Tensor, Tensor] | None  # biases of q and k (`make_spike`)


def make_plan(checkpoint: Checkpoint, encoding: str | None) -> Plan:
    """Choose the encoding (None: a spike, unless a softcap flattens it) and what follows from it. Raises UserError."""
    config, pruned = model_config(checkpoint.config), checkpoint.config["harp"]
    family = FAMILIES[checkpoint.config["model_type"]]
    if checkpoint.config["harp_constants"]:  # they become biases of o_proj
        if config.post_norms:
            raise UserError("stock Gemma2 has no bias after its norm for a constant to go to; prune without --bias")
        family = "llama"
    spike, lead = make_spike(config)
    if encoding is None:
        encoding = "spike" if lead >= NEEDED_LEAD or family == "llama" else "window"
    if encoding == "window" and family == "llama":
        raise UserError("a stock Llama, which this would become, has no windows layer by layer; use --encoding spike")
    if encoding == "spike" and lead < NEEDED_LEAD:
        hint = "" if family == "llama" else "; use --encoding window"
        raise UserError(f"a spike stands out by {lead:.0f} nats here, and {NEEDED_LEAD:.0f} are needed{hint}")
    if encoding == "spike":  # what Llama and Gemma2 call attention_bias puts a bias on o_proj too
        config = dataclasses.replace(config, qkv_bias=True, o_bias=family != "qwen2")
    windows = config.sliding_windows
    if encoding == "window" or family == "llama":
        windows = tuple(1 if encoding == "window" and layer in pruned else None for layer in range(config.n_layers))
    lost = [old for old, new in zip(config.sliding_windows, windows) if old and new is None]
    exact = min([config.max_position_embeddings, *lost])
    config = dataclasses.replace(config, sliding_windows=windows, max_position_embeddings=exact)
    return Plan(encoding, family, config, spike if encoding == "spike" else None)


# -------------------------------------------------------------------------------------------------------- the weights


def make_dense_(model: Transformer, plan: Plan) -> None:
    """Turn a pruned model into the dense one of `plan.config`, which computes the same, in place."""
    for layer, block in enumerate(model.blocks):
        if layer in model.pruned:
            attend_again_(block, model.pruned[layer], layer, plan)
        attn, config, constant = block.attn, plan.config, block.constant
        for linear in [attn.q_proj, attn.k_proj, attn.v_proj] * config.qkv_bias + [attn.o_proj] * config.o_bias:
            if linear.bias is None:  # a layer that was not pruned
                linear.bias = nn.Parameter(linear.weight.new_zeros(linear.out_features))
        if constant is not None:
            attn.o_proj.bias = nn.Parameter(attn.o_proj.bias + constant)
            block.constant = None


def attend_again_(block: Block, alpha: float, layer: int, plan: Plan) -> None:
    """Give a pruned block a full attention that adds what its V·O path with this alpha has added."""
    config, dtype, old = plan.config, block.mlp_norm.weight.dtype, block.attn
    block.attn = self_attention(layer, plan, dtype)
    if old is None:  # alpha was 0: the values stay zero, and so the norms around them may be any
        block.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset).to(dtype)
        if config.post_norms:
            block.attn_post_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset).to(dtype)
    else:
        for name, parameter in old.v_proj.named_parameters():
            setattr(block.attn.v_proj, name, parameter)
        block.attn.o_proj = unfold(old.o_proj, config)
        if config.post_norms:  # w -> alpha * (1 + w) - 1, in float32
            offset, norm = config.norm_offset, block.attn_post_norm
            norm.weight = nn.Parameter(alpha * (offset + norm.weight.detach().float()) - offset)
    block.attention_mode, block.alpha = "full", 1.0


def self_attention(layer: int, plan: Plan, dtype: torch.dtype) -> Attention:
    """An attention in which every token looks at itself alone, and sees zeros as yet."""
    with torch.device("meta"):
        attn = Attention(plan.config, layer)
    zeros = {name: torch.zeros(parameter.shape, dtype=dtype) for name, parameter in attn.named_parameters()}
    attn.load_state_dict(zeros, assign=True)
    if plan.spike is not None:
        for linear, pairs in zip((attn.q_proj, attn.k_proj), plan.spike):
            linear.bias.data.view(-1, attn.head_dim)[:, : len(pairs)] = pairs  # in every head alike
    return attn


def unfold(folded: nn.Linear, config: ModelConfig) -> nn.Linear:
    """o_proj with n_kv_heads inputs -> one with n_heads inputs (`model.Attention.fold_`, undone).

    The first query head of a group gets the whole slice and the others zeros. Equal shares would do as well, were they
    not rounded in groups of 3 or 7.
    """
    shape = len(folded.weight), config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim
    weight = folded.weight.new_zeros(shape)
    weight[:, :, 0] = folded.weight.detach().unflatten(1, (config.n_kv_heads, config.head_dim))
    unfolded = nn.Linear(config.n_heads * config.head_dim, len(weight), bias=False, device="meta")
    unfolded.weight, unfolded.bias = nn.Parameter(weight.flatten(1)), folded.bias
    return unfolded


# ---------------------------------------------------------------------------------------------------------- the files


def write_export(model: Transformer, checkpoint: Checkpoint, plan: Plan, folder: Path) -> None:
    """Write a model that `make_dense_` has changed, in the pruned folder's dtype, as a folder for stock software."""
    dtype, parameters = stored_dtype(checkpoint), model.state_dict()
    # In bfloat16, a norm with a small alpha inside would be off by 1 to 2 %: whoever loads it may decide that
    exact = {f"blocks.{layer}.attn_post_norm.weight" for layer in model.pruned}
    weights = {
        theirs: parameters[ours].to(torch.float32 if ours in exact else dtype).contiguous()
        for theirs, ours in checkpoint_names(model).items()
        if ours is not None
    }
    write_folder(folder, weights, export_config(checkpoint, plan), checkpoint.path)
    if plan.encoding == "window":  # with a window of 1, the default cache of transformers 5.24 shows all it ever saw
        file = folder / "generation_config.json"
        ends = {key: checkpoint.config[key] for key in ("bos_token_id", "eos_token_id")}
        write_json(file, ends | (read_json(file) if file.exists() else {}) | {"cache_implementation": "static"})
    if plan.family != checkpoint.config["model_type"]:  # read the tokenizer's files as they are, not as this family's
        file = folder / "tokenizer_config.json"
        stored = read_json(file) if file.exists() else {}
        write_json(file, stored | {"tokenizer_class": "PreTrainedTokenizerFast"})


def export_config(checkpoint: Checkpoint, plan: Plan) -> dict:
    """config.json of the export. No default is left to be filled in, since another family has others; RoPE has its
    older spelling, which old and new software reads."""
    config = read_json(checkpoint.path / "config.json") | checkpoint.config
    config = {key: value for key, value in config.items() if key not in DROPPED_KEYS}
    rope, windows = checkpoint.config["rope"], plan.config.sliding_windows
    config |= {
        "architectures": [ARCHITECTURES[plan.family]],
        "model_type": plan.family,
        "max_position_embeddings": plan.config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {key: value for key, value in rope.items() if key != "rope_theta"},
        "torch_dtype": dtype_name(stored_dtype(checkpoint)),
    }
    if rope["rope_type"] == "default":
        config["rope_scaling"] = None
    if plan.family != "qwen2":
        config["attention_bias"] = plan.config.qkv_bias
    if plan.family == "llama":
        for key in ("layer_types", "use_sliding_window", "max_window_layers"):  # Llama has no windows
            config.pop(key, None)
        config["mlp_bias"] = plan.config.mlp_bias
    else:
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
        config["sliding_window"] = next(filter(None, windows), None)
    if plan.family == "qwen2":
        config["use_sliding_window"] = any(windows)
        config["max_window_layers"] = windows.count(None)  # full layers come first, where software knows no list
    return config


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_report(checkpoint: Checkpoint) -> dict:
    """harp.json; empty if the folder was saved without one. Raises UserError if it tells of other alphas."""
    file = checkpoint.path / "harp.json"
    if not file.exists():
        return {}
    report = read_json(file)
    try:
        alphas = {step["layer"]: step["alpha"] for step in report["steps"]}
    except (KeyError, TypeError):
        raise UserError(f"{file} is no report of harp.py; delete it, or prune the original again") from None
    if alphas != checkpoint.config["harp"]:
        raise UserError(f"{file} and config.json beside it tell of other layers or alphas; prune the original again")
    return report


def usage(plan: Plan) -> str:
    """What an export's model card says about loading it."""
    softcap, exact = plan.config.attn_softcap, plan.config.max_position_embeddings
    eager = ', attn_implementation="eager"' if softcap else ""
    return "\n".join([
        f"A stock `{ARCHITECTURES[plan.family]}`, exact up to {exact:,} tokens:",
        f'\n    AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto"{eager})\n',
        f"Every pruned layer is an attention in which each token looks at itself alone (by a {plan.encoding}). It does "
        "all the work of attention and keeps the whole KV cache: for evaluation and other engines, not for speed.",
        *["Only eager attention applies this family's softcap."] * (softcap is not None),
        *["Alpha is inside the norm after attention, and loading in bfloat16 rounds it."] * plan.config.post_norms,
        *["Decode with a static cache, as generation_config.json says, or with none: with a window of 1, the default "
          "cache of transformers 5.24 gives wrong text."] * (plan.encoding == "window"),
    ])  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the check


@torch.inference_mode()
def check(folder: Path, plan: Plan, ids: Tensor, new: int, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare what others compute from the folder with our logits `expected`, (1, T, V), of `ids`, (1, T), the last
    `new` of which we decoded. Prints a line for each. Raises UserError where they differ."""
    compare("ours", load(folder, dtype)(ids), expected, dtype)
    if importlib.util.find_spec("transformers") is None:
        print("stock    not checked: transformers is not installed")
        return
    import transformers

    transformers.utils.logging.disable_progress_bar()
    for attention in ["eager"] if plan.config.attn_softcap else ["eager", "sdpa"]:
        stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        compare(attention, stock(ids).logits, expected, dtype)
        if dtype == torch.float32:  # bfloat16 has ties, and goes on differently after one
            # with the folder's own cache, but without what generation_config.json may ask for: sampling, penalties
            cache = stock.generation_config.cache_implementation
            stock.generation_config = transformers.GenerationConfig(cache_implementation=cache)
            options = {"max_new_tokens": new, "output_logits": True, "return_dict_in_generate": True}
            steps = stock.generate(ids[:, :-new], do_sample=False, **options).logits  # `new` times (1, V)
            compare("decoding", torch.stack(steps, dim=1), expected[:, -new - 1 : -1], dtype)


def compare(name: str, logits: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Print the largest difference between two models' logits. Raises UserError if it is too large."""
    difference, largest = (logits - expected).abs().max().item(), expected.abs().max().item()
    share = difference / largest
    print(f"{name:8} largest logit difference {difference:.1e} · {share:.1e} of the largest logit", flush=True)
    if not share <= TOLERANCE[dtype]:  # nor nan
        raise UserError(f"the exported model computes something else ({name}); not exported")


# --------------------------------------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a pruned model as a folder for stock transformers.")
    parser.add_argument("--ckpt", required=True, metavar="DIR", help="pruned folder, written by harp.py")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--encoding", choices=["spike", "window"], help="default: spike, where the model allows it")
    parser.add_argument("--ctx", type=int, metavar="N", help="tokens of the check (default: 256, or what is exact)")
    args = parser.parse_args(argv)
    return exit_code("export_hf.py", lambda: export(args.ckpt, args.out, args.encoding, args.ctx))


def export(ckpt: str | Path, out: Path, encoding: str | None = None, ctx: int | None = None) -> None:
    """Export the pruned folder `ckpt` to `out`, which appears only once it is checked on `ctx` tokens. Raises
    UserError."""
    checkpoint = open_checkpoint(ckpt)
    alphas = checkpoint.config["harp"]
    if not alphas:
        raise UserError(f"{ckpt} is not pruned: transformers reads it as it is, and harp.py prunes it")
    if out.exists():
        raise UserError(f"{out} exists; name another folder with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {out.parent}: {error.strerror}; name another folder with --out") from None
    report, plan = read_report(checkpoint), make_plan(checkpoint, encoding)
    exact = plan.config.max_position_embeddings
    ctx = min(256, exact) if ctx is None else ctx
    if not 2 <= ctx <= exact:
        raise UserError(f"--ctx {ctx} is out of range: this export is exact for 2 to {exact:,} tokens")
    dtype, why = choose_dtype("auto", checkpoint, plan.config, torch.device("cpu"))
    model = load(ckpt, dtype)
    print(f"model    {checkpoint.config['model_type']} · {len(alphas)} of {plan.config.n_layers} layers pruned")
    print(f"export   {ARCHITECTURES[plan.family]} · {plan.encoding} · exact up to {exact:,} tokens")

    new = min(NEW_TOKENS, ctx // 2)
    print(f"check    {ctx} tokens, {new} of them decoded · {dtype_name(dtype)} ({why})", flush=True)
    prompt = torch.randint(plan.config.vocab_size, (1, ctx - new), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ids = model.generate(prompt, new)
        expected = model(ids)
    make_dense_(model, plan)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        folder = Path(scratch) / out.name
        write_export(model, checkpoint, plan, folder)
        del model  # what was written takes its place in memory
        card = model_card(report.get("model", Path(ckpt).resolve().name), alphas, report, usage(plan))
        (folder / "README.md").write_text(card, encoding="utf-8")
        check(folder, plan, ids, new, expected, dtype)
        folder.rename(out)
    size = (out / "model.safetensors").stat().st_size
    print(f"wrote    {out} · {size / 1e6:,.0f} MB of weights, {checkpoint.n_bytes / 1e6:,.0f} MB where it was pruned")


if __name__ == "__main__":
    sys.exit(main())
