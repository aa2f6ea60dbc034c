"""The paper's four models: their shapes, the authors' alphas, and a prepared run for one large GPU.

`python -m extras.bench paper` runs it: the golden checkpoints' logits, prefill of the published shapes with random
weights, and a search with most of the model left in main memory.
"""

import json
import time
from collections.abc import Sequence

import torch
from safetensors.torch import load_file

import cost
from checkpoint import UserError
from eval_ppl import ROOT, dtype_name, free_memory, make_windows
from extras.timing import (
    Point,
    Series,
    measure_prefill,
    megabytes,
    now,
    peak_bytes,
    predicted_speed_up,
    print_prefill,
    print_table,
    pruned_twin,
    random_ids,
    random_model,
)
from harp import search, set_alphas
from load_weights import load
from model import ModelConfig

# -------------------------------------------------------------------------------------------------- what was published


def shape(
    V: int, D: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int, context: int, **family
) -> ModelConfig:
    """All that decides a model's cost and speed. RoPE's constants decide neither and keep their defaults."""
    windows = family.pop("sliding_windows", (None,) * layers)
    return ModelConfig(V, D, mlp, layers, heads, kv_heads, head_dim, context, windows, head_dim**-0.5, **family)


GEMMA2 = dict(
    sliding_windows=(4096, None) * 21, norm_offset=1.0, post_norms=True, attn_softcap=50.0, logit_softcap=30.0,
    embed_scale=3584**0.5, activation="gelu_pytorch_tanh", tied=True,
)  # fmt: skip
# The paper's models: shape, and the authors' alphas from the topmost layer down. The paper's headline is the first's.
PUBLISHED = {
    "Llama-3.1-8B": (
        shape(128256, 4096, 14336, 32, 32, 8, 128, 131072), (0.8, 0.2, 0.1, 0.1, 0.0, 0.1, 0.0, 0.0)),
    "Mistral-7B-v0.3": (
        shape(32768, 4096, 14336, 32, 32, 8, 128, 32768), (0.7, 0.2, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0)),
    "Qwen2-7B": (
        shape(152064, 3584, 18944, 28, 28, 4, 128, 131072, qkv_bias=True), (0.9, 0.3, 0.3, 0.2)),
    "Gemma2-9B": (
        shape(256000, 3584, 14336, 42, 16, 8, 256, 8192, **GEMMA2), (0.5, 0.4, 0.3, 0.4, 0.5, 0.4)),
}  # fmt: skip
HEADLINE = "Llama-3.1-8B", 65536, 0.167  # model, tokens, share of the prefill's time that the paper saves


def from_the_top(config: ModelConfig, listed: Sequence[float]) -> dict[int, float]:
    """Layer -> alpha of a list that begins with the topmost layer."""
    return {config.n_layers - 1 - i: alpha for i, alpha in enumerate(listed)}


# ------------------------------------------------------------------------------------------------------------- the run


@torch.inference_mode()
def check_golden(device: torch.device) -> None:
    """The golden checkpoints' logits on this device, pruned by flag and for good, in float32 without TF32."""
    torch.set_float32_matmul_precision("highest")
    for folder in sorted((ROOT / "tests" / "golden").iterdir()):
        expected, worst, model = load_file(folder / "golden.safetensors"), 0.0, load(folder, torch.float32, device)
        for case, facts in json.loads((folder / "golden.json").read_text())["cases"].items():
            alphas = dict(zip(facts["pruned_layers"], facts["alphas"], strict=True))
            set_alphas(model, alphas)
            for variant in (model, pruned_twin(model, alphas)):
                logits = variant(expected["input_ids"].to(device)).cpu()
                worst = max(worst, (logits - expected[case]).abs().max().item())
        print(f"golden   {folder.name:8} logits within {worst:.1e} · {'OK' if worst <= 2e-5 else 'ABOVE 2e-05'}")


def streamed_search(one: Series, device: torch.device, dtype: torch.dtype) -> None:
    """Search with everything on the device, then with the layers below the pruned ones (and an embedding that is not
    the head) left in main memory while the device may hold half the weights' bytes: the same, or the cap ends it."""
    config, layers, weights = one.config, list(one.alphas), dtype.itemsize * cost.parameters(one.config)
    windows = make_windows(random_ids(config, 1024)[0].tolist(), 512)
    model = random_model(config, device, dtype)
    whole = search(model, windows, layers, [0.0, 0.5, 1.0])
    model.blocks[: min(layers)].to("cpu")
    if not config.tied:
        model.embed_tokens.to("cpu")
    peak = "no cap, this is no GPU"
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(weights / 2 / total, device)
    started = now(device)
    streamed = search(model, windows, layers, [0.0, 0.5, 1.0])
    seconds = now(device) - started
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        peak = f"cap {megabytes(weights / 2)}, peak {megabytes(peak_bytes(device))}"
    same = [step.tried for step in whole] == [step.tried for step in streamed]
    print(f"\nstreamed {one.name} · {min(layers)} of {config.n_layers} layers in main memory · 2 windows of 512")
    print(f"         {seconds:.1f} s · perplexities {'unchanged' if same else 'CHANGED'} · {peak}", flush=True)


def print_savings(name: str, points: Sequence[Point]) -> None:
    for point in points:
        paper = f", paper {HEADLINE[2]:.1%}" if (name, point.tokens) == HEADLINE[:2] else ""
        print(f"time saved at {point.tokens:,} tokens: predicted {1 - 1 / point.predicted:.1%}, "
              f"measured {1 - 1 / point.measured:.1%}{paper}", flush=True)  # fmt: skip


def print_predictions(series: Sequence[Series], lengths: Sequence[int]) -> None:
    print("paper    prefill speed-up, dense over pruned, by counted operations")
    rows = [["tokens", *(f"{tokens:,}" for tokens in lengths)]]
    for one in series:
        rows.append([one.name, *(f"{predicted_speed_up(one.config, one.alphas, tokens):.3f}" for tokens in lengths)])
    print_table(*rows)


def measure_published(
    series: Sequence[Series], device: torch.device, dtype: torch.dtype, lengths: Sequence[int], repeats: int
) -> list[Series]:
    """Golden logits, prefill of every series' shape, a streamed search: within 8 minutes on one large GPU. Returns the
    series with their points. Raises UserError."""
    deadline = time.perf_counter() + 400  # of the prefills
    needed = max(dtype.itemsize * cost.parameters(one.config) for one in series)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > free:
        raise UserError(f"the largest of these models takes {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free on "
                        f"{device}; --predict-only counts without building them")  # fmt: skip
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "not a GPU"
    print(f"device   {device} ({card}) · {dtype_name(dtype)} · random weights · median of {repeats}")
    check_golden(device)
    measured = []
    for one in series:
        print(f"\nprefill  {one.name} · {len(one.alphas)} of {one.config.n_layers} layers pruned", flush=True)
        points = measure_prefill(
            random_model(one.config, device, dtype), one.alphas, lengths, repeats, deadline=deadline
        )
        print_prefill(points)
        print_savings(one.name, points)
        measured.append(one._replace(points=points))
    streamed_search(next(one for one in series if one.name == HEADLINE[0]), device, dtype)
    return measured
