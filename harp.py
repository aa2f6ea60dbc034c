"""HARP: remove the queries and keys of a model's top layers, and find by search how loud what remains should be.

    python harp.py                                    # the demo model
    python harp.py --ckpt path/to/checkpoint --top 8  # any Llama, Mistral, Qwen2 or Gemma2 folder

Method: "High-Layer Attention Pruning with Rescaling", Liu & Liu, TMLR 2026, arXiv 2507.01900. The search below is
its Algorithm 1; everything after it is about running that search on real files without losing anything.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import cost
from checkpoint import Checkpoint, UserError, read_json
from eval_ppl import (
    Window,
    add_run_arguments,
    advance,
    check_ctx,
    choose_device,
    choose_dtype,
    clock,
    describe_model,
    describe_windows,
    dtype_name,
    embed,
    find_checkpoint,
    load_reported,
    own_text,
    perplexity,
    read_windows,
    score,
)
from load_weights import model_config
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, load_tokenizer

GRID = "0:1:0.1"
TOP = 8
PROMPT_TOKENS = 48


# ------------------------------------------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Step:
    """What the search decided for one layer."""

    layer: int
    alpha: float
    ppl: float
    tried: tuple[tuple[float, float | None], ...]  # (alpha, perplexity) in order; None: not finite
    seconds: float


@torch.inference_mode()
def search(
    model: Transformer,
    windows: Sequence[Window],
    layers: Sequence[int],
    grid: Sequence[float],
    *,
    done: Sequence[Step] = (),
    on_trial: Callable[[int, int], None] = lambda layer, trials: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Prune `layers` from the top down, giving each the alpha of the grid with the lowest perplexity.

    For every layer: switch it to its V·O path, try every alpha, keep the best (the smaller one of equals), go on to
    the next layer below. Layers not yet reached stay dense (Algorithm 1 of the paper). The model carries the alphas
    afterwards. `done` holds the steps of an earlier, interrupted search; `on_trial(layer, trials so far)` and
    `on_step(step)` are told about progress. Raises UserError if no alpha of a layer gives a finite perplexity.

    The textbook loop runs the whole model for every alpha of every layer. But whatever lies below the searched layer
    does not depend on its alpha, and neither does the update that alpha scales: both are computed once per layer, and
    a trial is h + alpha * u, one MLP, the pruned layers above, the head. Same numbers, a fraction of the work.
    """
    order = sorted(set(layers), reverse=True)
    steps = list(done)
    set_alphas(model, {step.layer: step.alpha for step in steps})
    lowest, n_layers = order[-1], len(model.blocks)
    at_lowest = advance(model, embed(model, windows), range(lowest))  # the one tensor of hidden states that is kept
    for layer in order[len(steps) :]:
        started = time.perf_counter()
        block = model.blocks[layer]
        block.attention_mode = "vo"
        inputs = advance(model, at_lowest, range(lowest, layer))
        updates = [block.vo_update(h) for h in inputs]

        def trial(alpha: float) -> float | None:
            outputs = [block.add_mlp(h + alpha * u if alpha else h) for h, u in zip(inputs, updates)]
            ppl = score(model, advance(model, outputs, range(layer + 1, n_layers)), windows).ppl
            return ppl if math.isfinite(ppl) else None

        tried = []
        for alpha in sorted(grid):
            tried.append((alpha, trial(alpha)))
            on_trial(layer, len(tried))
        finite = [(ppl, alpha) for alpha, ppl in tried if ppl is not None]
        if not finite:
            raise UserError(f"layer {layer} has no finite perplexity at any alpha; try --dtype float32")
        ppl, block.alpha = min(finite)
        steps.append(Step(layer, block.alpha, ppl, tuple(tried), time.perf_counter() - started))
        on_step(steps[-1])
    return steps


def set_alphas(model: Transformer, alphas: Mapping[int, float]) -> None:
    """Prune exactly these layers, by flag: layer -> alpha. All others become dense again."""
    for layer, block in enumerate(model.blocks):
        block.attention_mode = "vo" if layer in alphas else "full"
        block.alpha = alphas.get(layer, 1.0)


def heldout_perplexities(model: Transformer, windows: Sequence[Window], alphas: Mapping[int, float]) -> dict[str, float]:
    """Perplexity on a text the search has not seen: dense, with the searched alphas, and with the same layers at
    alpha 1 and alpha 0. The model carries the searched alphas afterwards."""
    lowest = min(alphas)
    at_lowest = advance(model, embed(model, windows), range(lowest))
    found = {}
    for name, variant in (
        ("dense", {}),
        ("alpha_1", dict.fromkeys(alphas, 1.0)),
        ("alpha_0", dict.fromkeys(alphas, 0.0)),
        ("pruned", alphas),
    ):
        set_alphas(model, variant)
        found[name] = score(model, advance(model, at_lowest, range(lowest, len(model.blocks))), windows).ppl
    return found


# ----------------------------------------------------------------------------------------------- what a user asks for


def parse_grid(text: str) -> list[float]:
    """ "0,0.1,1" or "0:1:0.1" (first, last, step) -> alphas in rising order. Raises UserError."""
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            count = math.floor((last - first) / step + 1e-9) + 1  # the step may not fit exactly in binary
            grid = [round(first + i * step, 10) for i in range(count)]
        else:
            grid = [float(part) for part in text.split(",")]
    except (ValueError, OverflowError, ZeroDivisionError):
        grid = []
    if not grid or not all(0 <= alpha < math.inf for alpha in grid):
        raise UserError(f"--grid {text!r} is no grid: it takes alphas like 0,0.1,1 or 0:1:0.1, finite and not below 0")
    return sorted(set(grid))


def choose_layers(top: int | None, listed: str | None, n_layers: int) -> list[int]:
    """The layers to prune, topmost first. Raises UserError."""
    if listed is None:
        top = TOP if top is None else top
        if not 1 <= top <= n_layers:
            raise UserError(f"--top {top} is out of range: this model has {n_layers} layers")
        return list(range(n_layers - 1, n_layers - 1 - top, -1))
    try:
        layers = sorted({int(part) for part in listed.split(",")}, reverse=True)
    except ValueError:
        raise UserError(f"--layers {listed!r} is no list of layers, such as 29,28,26") from None
    if not 0 <= layers[-1] <= layers[0] < n_layers:
        raise UserError(f"--layers {listed} is out of range: this model has layers 0 to {n_layers - 1}")
    return layers


# -------------------------------------------------------------------------------------------------- state and report


def sampled_hash(checkpoint: Checkpoint) -> str:
    """Which weights these are: every file's name, size and 64 samples of 4 KB, hashed in a moment."""
    digest = hashlib.sha256()
    for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as handle:
            for sample in range(64):
                handle.seek(sample * max(0, size - 4096) // 63)
                digest.update(handle.read(4096))
    return digest.hexdigest()


def file_hash(file: str | Path) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def write_json(file: Path, content: dict) -> None:
    """All of it or nothing: a crash while writing leaves the old file in place."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def earlier_report(out: Path, identity: dict) -> dict | None:
    """The report of a finished or interrupted run with the same identity, if there is one. Raises UserError if
    there is one of another identity: it is left as it is."""
    for folder in (out, partial(out)):
        if not folder.exists():
            continue
        if not (folder / "harp.json").exists():
            raise UserError(f"{folder} exists and is no run of harp.py; name another folder with --out")
        report = read_json(folder / "harp.json")
        found = report.get("identity", {})
        other = [key for key in identity if found.get(key) != identity[key]]
        if other:
            raise UserError(f"{folder} holds a run with another {', '.join(other)}; name another folder with --out")
        return report
    return None


def partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


# -------------------------------------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prune the attention of a model's top layers with HARP.")
    add_run_arguments(parser)
    method = parser.add_argument_group("method")
    which = method.add_mutually_exclusive_group()
    which.add_argument("--top", type=int, metavar="N", help=f"prune the N highest layers (default: {TOP})")
    which.add_argument("--layers", metavar="LIST", help="prune these layers instead, such as 29,28,26 (0 is lowest)")
    method.add_argument("--grid", default=GRID, help="alphas to try: 0,0.1,1 or first:last:step (default: %(default)s)")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, metavar="DIR", help="result folder (default: out/<model>-harp<N>)")
    output.add_argument("--heldout", metavar="FILE", help="UTF-8 text for the final check (default: %(default)s)")
    output.add_argument("--prompt", metavar="TEXT", help="also print its continuation before and after pruning")
    parser.set_defaults(text=own_text("calibration.txt"), heldout=own_text("heldout.txt"))
    args = parser.parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"harp.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on after the last finished layer", file=sys.stderr)
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    # Everything that can be refused is refused before a weight is read.
    grid = parse_grid(args.grid)
    checkpoint = find_checkpoint(args.ckpt)
    config = model_config(checkpoint.config)
    layers = choose_layers(args.top, args.layers, config.n_layers)
    device, device_why = choose_device(args.device)
    dtype, dtype_why = choose_dtype(args.dtype, checkpoint, config, device)
    tokenizer = load_tokenizer(checkpoint.path)
    ctx = check_ctx(args.ctx, 512 if args.ckpt is None else 2048, config)
    count = args.windows if args.windows is not None else (4 if args.ckpt is None else 16)
    windows = read_windows(args.text, tokenizer, config, ctx, count)
    heldout = read_windows(args.heldout, tokenizer, config, ctx, count)
    prompt = None if args.prompt is None else prompt_ids(args.prompt, tokenizer, config)
    name = checkpoint.path.resolve().name
    out = args.out or Path("out") / f"{name}-harp{len(layers)}"
    identity = {
        "config": file_hash(checkpoint.path / "config.json"),
        "weights": sampled_hash(checkpoint),
        "text": file_hash(args.text),
        "heldout text": file_hash(args.heldout),
        "layers": layers,
        "grid": grid,
        "ctx": ctx,
        "windows": count,
        "BOS rule": tokenizer.bos_rule,
        "dtype": dtype_name(dtype),
        "device": device.type,
    }
    report = earlier_report(out, identity) or {
        "identity": identity,
        "model": name,
        "text": window_facts(args.text, windows),
        "heldout_text": window_facts(args.heldout, heldout),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": [],
    }

    print(f"model    {describe_model(checkpoint, config)}")
    print(f"device   {device} ({device_why}) · dtype {dtype_name(dtype)} ({dtype_why})")
    print(f"text     {describe_windows(args.text, windows, ctx, tokenizer.bos_rule)}", flush=True)
    finished = "heldout_ppl" in report
    model = None if finished and prompt is None else load_reported(checkpoint, dtype, device)
    if finished:
        print_steps(report)
    else:
        run_search(model, windows, heldout, layers, grid, out, report)
    print_summary(report, args.heldout, config)
    print(f"wrote    {out / 'harp.json'}")
    if prompt is not None:
        print_continuations(model, tokenizer, prompt, alphas_of(report))


def run_search(
    model: Transformer,
    windows: Sequence[Window],
    heldout: Sequence[Window],
    layers: list[int],
    grid: list[float],
    out: Path,
    report: dict,
) -> None:
    """Search, or go on with the search that `report` is of: save it after every layer, rename when all is done."""
    folder = partial(out)
    folder.mkdir(parents=True, exist_ok=True)
    if "dense_ppl" not in report:
        report["dense_ppl"] = perplexity(model, windows).ppl
        if not math.isfinite(report["dense_ppl"]):
            raise UserError(f"the unpruned model's perplexity is {report['dense_ppl']}; try --dtype float32")
        write_json(folder / "harp.json", report)
    print_steps(report)
    done = [Step(**step | {"tried": tuple(map(tuple, step["tried"]))}) for step in report["steps"]]
    progress = Progress(model.config, windows, layers, len(grid), len(done))

    def on_step(step: Step) -> None:
        report["steps"].append(asdict(step))
        write_json(folder / "harp.json", report)
        progress.clear()
        print_step(report["steps"][-1], report["dense_ppl"])

    search(model, windows, layers, grid, done=done, on_trial=progress.show, on_step=on_step)
    found = heldout_perplexities(model, heldout, alphas_of(report))
    report["heldout_ppl"] = {name: ppl if math.isfinite(ppl) else None for name, ppl in found.items()}
    write_json(folder / "harp.json", report)
    folder.rename(out)


def alphas_of(report: dict) -> dict[int, float]:
    return {step["layer"]: step["alpha"] for step in report["steps"]}


def window_facts(file: str, windows: Sequence[Window]) -> dict:
    return {
        "file": Path(file).name,
        "windows": len(windows),
        "tokens_scored": sum(len(window.targets) for window in windows),
    }


class Progress:
    """How far a search is and how long the rest will take, on stderr. The estimate goes by counted operations, since
    a trial grows dearer with every layer that the search moves down."""

    def __init__(self, config: ModelConfig, windows: Sequence[Window], layers: Sequence[int], trials: int, done: int):
        tokens, scored = len(windows[0].ids), len(windows[0].targets)
        pruned = dict.fromkeys(layers, 1.0)
        self.trials = trials
        self.layers = layers[done:]
        self.trial_work = [cost.trial_flops(config, layer, tokens, scored, pruned) for layer in self.layers]
        self.work_before = sum(cost.layer_flops(config, layer, tokens, None) for layer in range(min(layers)))
        self.started = time.perf_counter()

    def show(self, layer: int, tried: int) -> None:
        at = self.layers.index(layer)
        finished = self.work_before + self.trials * sum(self.trial_work[:at]) + tried * self.trial_work[at]
        total = self.work_before + self.trials * sum(self.trial_work)
        left = (time.perf_counter() - self.started) * (total / finished - 1)
        line = f"layer {layer} · {tried} of {self.trials} alphas tried · about {clock(left)} left"
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif tried == self.trials:
            print(line, file=sys.stderr)

    def clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_steps(report: dict) -> None:
    print(f"dense    ppl {report['dense_ppl']:.4f}", flush=True)
    for step in report["steps"]:
        print_step(step, report["dense_ppl"])


def print_step(step: dict, dense: float) -> None:
    change = 100 * (step["ppl"] / dense - 1)
    print(
        f"layer {step['layer']:>2} | alpha {step['alpha']:<4g} | ppl {step['ppl']:9.4f} ({change:+6.1f} %) | "
        f"{len(step['tried'])} tried | {clock(step['seconds'])}",
        flush=True,
    )


def print_summary(report: dict, heldout_file: str, config: ModelConfig) -> None:
    alphas = alphas_of(report)
    ppl = {name: "not finite" if value is None else f"{value:.4f}" for name, value in report["heldout_ppl"].items()}
    tokens = min(65536, config.max_position_embeddings)
    saved = {
        "parameters": 1 - cost.linear_parameters(config, alphas) / cost.linear_parameters(config),
        "cache": 1 - cost.kv_bytes(config, 1, alphas) / cost.kv_bytes(config, 1),
        "prefill": 1 - cost.prefill_flops(config, tokens, alphas) / cost.prefill_flops(config, tokens),
    }
    print(f"heldout  {heldout_file} · dense {ppl['dense']} -> pruned {ppl['pruned']}")
    print(f"         the same layers at alpha 1: {ppl['alpha_1']}, at alpha 0: {ppl['alpha_0']}")
    print(
        f"saved    linear parameters -{saved['parameters']:.2%} · KV cache -{saved['cache']:.1%}\n"
        f"         FLOPs of a prefill of {tokens:,} tokens -{saved['prefill']:.1%}"
    )


def prompt_ids(prompt: str, tokenizer: Tokenizer, config: ModelConfig) -> torch.Tensor:
    """A prompt's ids, (1, T), with BOS where the model wants one. Raises UserError."""
    ids = ([] if tokenizer.bos_rule == "none" else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    if not 1 <= len(ids) <= config.max_position_embeddings - PROMPT_TOKENS:
        raise UserError(f"--prompt has {len(ids)} tokens; it takes 1 to {config.max_position_embeddings - PROMPT_TOKENS}")
    return torch.tensor([ids])


def print_continuations(model: Transformer, tokenizer: Tokenizer, prompt: torch.Tensor, alphas: dict) -> None:
    for name, variant in (("dense", {}), ("pruned", alphas)):
        set_alphas(model, variant)
        ids = model.generate(prompt, PROMPT_TOKENS, model.config.eos_ids)[0].tolist()
        text = tokenizer.decode([i for i in ids if i not in (*model.config.eos_ids, tokenizer.bos_id)])
        print(f"\n{name}:\n{text}")


if __name__ == "__main__":
    sys.exit(main())
