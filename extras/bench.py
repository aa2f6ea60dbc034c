"""Is it as fast as it should be? Whatever is measured here stands beside what cost.py predicts.

    python -m extras.bench search    the textbook loop, the cached grid search, the Fibonacci search
    python -m extras.bench prefill   dense against pruned over context lengths
    python -m extras.bench decode    tokens per second and KV bytes
    python -m extras.bench memory    peak memory against the weights' bytes
    python -m extras.bench paper     the four published models' shapes, for one large GPU

What is compared runs in turns (dense, pruned, dense, pruned, ...), so that a machine that slows down slows both, and
medians are reported. Speed needs no trained weights: --config makes random ones, and lengths may pass the trained one.
"""

import argparse
import copy
import importlib.util
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

import cost
from checkpoint import UserError, read_config
from eval_ppl import (
    DTYPE_NAMES, ROOT, Window, add_run_arguments, choose_device, choose_dtype, dtype_name, make_windows,
    named_checkpoint, perplexity, prepare, read_windows, short_count,
)  # fmt: skip
from harp import GRID, Step, choose_layers, parse_grid, search, set_alphas
from load_weights import load, model_config
from model import KVCache, ModelConfig, RMSNorm, Transformer

ALPHA = 0.5  # of pruned layers where only speed matters: any value but 0, which would drop V and O too
NEW_TOKENS = 64
REPEATS = {"search": 1, "prefill": 5, "decode": 5, "memory": 1, "paper": 3}
LENGTHS = {"search": [], "prefill": [512, 1024, 2048, 4096, 8192], "decode": [512], "memory": [32768],
           "paper": [8192, 16384, 32768, 65536]}  # fmt: skip


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


# ------------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Subject:
    """The model to measure: a checkpoint folder, or the folder of a config.json that gets random weights."""

    folder: Path
    random: bool
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return "random weights" if self.random else self.folder.resolve().name

    def build(self) -> Transformer:
        if self.random:
            return random_model(self.config, self.device, self.dtype)
        return load(self.folder, self.dtype, self.device)

    def build_stock(self) -> torch.nn.Module:
        """The same shape in stock transformers, with random weights. Its sdpa does not know softcaps: a model that has
        one takes eager attention."""
        from transformers import AutoConfig, AutoModelForCausalLM

        attention = "eager" if self.config.attn_softcap else "sdpa"
        with self.device:
            stock = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(self.folder), dtype=self.dtype, attn_implementation=attention
            )
        return stock.eval()


def choose_subject(args: argparse.Namespace) -> Subject:
    """The model that --ckpt or --config names, or the demo model; no weight is read yet. Raises UserError."""
    device, _ = choose_device(args.device)
    if args.config:
        folder = args.config.parent if args.config.name == "config.json" else args.config
        dtype = DTYPE_NAMES["bfloat16" if args.dtype == "auto" else args.dtype]
        return Subject(folder, True, model_config(read_config(folder)), device, dtype)
    checkpoint = named_checkpoint(args.ckpt)
    if checkpoint.config["harp"]:
        raise UserError(f"{checkpoint.path} is pruned already: take the checkpoint that it was made from")
    config = model_config(checkpoint.config)
    dtype, _ = choose_dtype(args.dtype, checkpoint, config, device)
    return Subject(checkpoint.path, False, config, device, dtype)


@torch.no_grad()
def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model of this shape, made where and as it is wanted: its weights never exist anywhere else."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model.to_empty(device=device)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                parameter.fill_(1 - module.offset)
            elif name == "bias":
                parameter.zero_()
            else:  # a variance of 1 / inputs: what passes through keeps its size
                parameter.uniform_(-1, 1).mul_((3 / parameter.shape[1]) ** 0.5)
    return model.eval()


def pruned_twin(model: Transformer, alphas: Mapping[int, float]) -> Transformer:
    """A pruned copy (`Transformer.prune_`) that shares all weights with `model` but the folded ones."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    set_alphas(twin, alphas)
    return twin.prune_()


def random_ids(config: ModelConfig, tokens: int) -> Tensor:  # (1, T)
    return torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------- measuring and printing


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def now(device: torch.device) -> float:
    """Seconds on a clock, read once the device has done all that it was asked to do."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def take_turns(
    runs: Mapping[object, Callable[[], object]], repeats: int, device: torch.device, warm_up: int = 1
) -> dict[object, float]:
    """Median seconds of every run. All run once, then all again: `repeats` times, after `warm_up` rounds more."""
    seconds = {name: [] for name in runs}
    for turn in range(warm_up + repeats):
        for name, run in runs.items():
            started = now(device)
            run()
            seconds[name].append(now(device) - started)
            if seconds[name][-1] > 1:  # shorter runs need no sign of life
                say(f"  round {turn + 1} of {warm_up + repeats}: {name}, {seconds[name][-1]:.1f} s")
    return {name: statistics.median(turns[warm_up:]) for name, turns in seconds.items()}


def print_table(*rows: Sequence[str]) -> None:
    """Columns as wide as their widest cell: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip(), flush=True)


def print_header(subject: Subject, layers: Sequence[int], how: str) -> None:
    config, threads = subject.config, torch.get_num_threads()
    print(f"model    {subject.name} · {config.n_layers} layers · {short_count(cost.parameters(config))} parameters")
    print(f"pruned   {len(layers)} layers: {' '.join(map(str, layers))}")
    print(f"device   {subject.device} · {dtype_name(subject.dtype)} · {threads} threads · {how}", flush=True)


def megabytes(n: float) -> str:
    return f"{n / 1e6:,.1f} MB"


# ----------------------------------------------------------------------------------------------------------- search


def naive_search(
    model: Transformer, windows: Sequence[Window], layers: Iterable[int], grid: Sequence[float]
) -> list[Step]:
    """Algorithm 1 as it stands in the paper: the whole model for every alpha of every layer, from the top down."""
    set_alphas(model, {})
    steps = []
    for layer in sorted(layers, reverse=True):
        block, tried, started = model.blocks[layer], [], time.perf_counter()
        block.attention_mode = "vo"
        for alpha in grid:
            block.alpha = alpha
            tried.append((alpha, perplexity(model, windows).ppl))
        block.alpha, ppl = min(tried, key=lambda pair: pair[1])
        steps.append(Step(layer, block.alpha, ppl, tuple(tried), time.perf_counter() - started))
    return steps


def search_flops(config: ModelConfig, windows: Sequence[Window], steps: Sequence[Step], cached: bool) -> float:
    """FLOPs of a search that took these steps: the textbook loop's, or those of `harp.search` (`cached`)."""

    def flops(layers: Iterable[int], alphas: cost.Alphas = cost.DENSE) -> float:  # pruned by flag: nothing is folded
        lengths = [len(window.ids) for window in windows]
        return sum(cost.layer_flops(config, i, T, alphas.get(i), folded=False) for i in layers for T in lengths)

    head = sum(cost.head_flops(config, len(window.targets)) for window in windows)
    n_layers, lowest, above = config.n_layers, min(step.layer for step in steps), {}
    total = flops(range(lowest)) if cached else 0.0
    for layer, alpha, tried in ((step.layer, step.alpha, step.tried) for step in steps):
        if cached:  # once a layer: its input, and what V and O make of it; each trial: its MLP and the layers above
            total += flops(range(lowest, layer)) + flops([layer], {layer: 1.0}) - flops([layer], {layer: 0.0})
            total += len(tried) * (flops(range(layer, n_layers), above | {layer: 0.0}) + head)
        else:
            total += sum(flops(range(n_layers), above | {layer: trial}) + head for trial, _ in tried)
        above[layer] = alpha
    return total


def compare_steps(textbook: Sequence[Step], steps: Sequence[Step]) -> str:
    """Whether two searches end with the same alphas; if so, how far apart (relatively) any perplexity of both is."""
    if [step.alpha for step in textbook] != [step.alpha for step in steps]:
        return "alphas DIFFER from the naive loop's"
    expected = {(step.layer, alpha): ppl for step in textbook for alpha, ppl in step.tried}
    found = {(step.layer, alpha): ppl for step in steps for alpha, ppl in step.tried if ppl is not None}
    difference = max(abs(ppl / expected[trial] - 1) for trial, ppl in found.items())
    return f"alphas identical to the naive loop's · perplexities within {difference:.0e}"


class MatmulLog(TorchFunctionMode):
    """While active, counts the matrix products that run, by kind and shapes, and keeps one example of each."""

    KINDS = {F.linear, F.scaled_dot_product_attention, Tensor.matmul}

    def __init__(self):
        super().__init__()
        self.count: Counter[tuple] = Counter()
        self.example: dict[tuple, Callable[[], Tensor]] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        call = partial(function, *args, **(kwargs or {}))
        if function in self.KINDS:
            key = function.__name__, *(tuple(x.shape) for x in args if isinstance(x, Tensor))
            self.count[key] += 1
            self.example.setdefault(key, call)
        return call()

    def seconds_alone(self, device: torch.device) -> float:
        """What all the counted products would take with nothing in between: each timed at its own shape."""
        each = take_turns(self.example, 5, device)
        return sum(times * each[key] for key, times in self.count.items())


def bench_search(args: argparse.Namespace) -> None:
    subject, layers = choose(args)
    grid, count = parse_grid(args.grid), args.windows or 4
    if subject.random:
        ctx = args.ctx or 512
        windows = make_windows(random_ids(subject.config, ctx * count)[0].tolist(), ctx)
    else:
        setup = prepare(args.ckpt, args.device, args.dtype, args.ctx)
        ctx, windows = setup.ctx, read_windows(setup, args.text, count)
    print_header(subject, layers, f"median of {args.repeats}")
    print(f"search   {len(grid)} alphas · {len(windows)} windows of {ctx:,} tokens", flush=True)
    model, steps = subject.build(), {}
    say("counting the matrix products of a search")
    with MatmulLog() as log:  # this run is the warm-up, too
        search(model, windows, layers, grid)
    methods = {"naive": naive_search, "cached grid": search, "Fibonacci": partial(search, method="fibonacci")}

    def run(name: str) -> None:
        say(f"{name} search")
        steps[name] = methods[name](model, windows, layers, grid)

    seconds = take_turns({name: partial(run, name) for name in methods}, args.repeats, subject.device, warm_up=0)
    flops = {name: search_flops(subject.config, windows, steps[name], cached=name != "naive") for name in methods}
    rows = [["", "trials", "TFLOPs", "seconds", "predicted", "measured", "ratio"]]
    for name in methods:
        predicted, measured = flops["naive"] / flops[name], seconds["naive"] / seconds[name]
        trials = sum(len(step.tried) for step in steps[name])
        rows.append([name, str(trials), f"{flops[name] / 1e12:.3f}", f"{seconds[name]:.2f}", f"{predicted:.2f}x",
                     f"{measured:.2f}x", f"{measured / predicted:.2f}"])  # fmt: skip
    print_table(*rows)
    print(f"alphas   {' '.join(f'{step.alpha:g}' for step in steps['naive'])}")
    for name in ("cached grid", "Fibonacci"):
        print(f"{name:11}  {compare_steps(steps['naive'], steps[name])}")
    alone = log.seconds_alone(subject.device)
    print(f"matmuls  the cached grid search's {sum(log.count.values()):,} take {alone:.2f} s alone; "
          f"search / matmuls {seconds['cached grid'] / alone:.2f}")  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- prefill


@torch.inference_mode()
def last_logits(model: Transformer, ids: Tensor) -> Tensor:
    """A prefill: ids (1, T) to the logits (1, 1, V) of the last position alone."""
    return model.head(model.hidden(ids)[:, -1:])


def predicted_speed_up(config: ModelConfig, alphas: cost.Alphas, tokens: int) -> float:
    return cost.prefill_flops(config, tokens) / cost.prefill_flops(config, tokens, alphas)


class Point(NamedTuple):
    """One context length: the speed-up that the count predicts, and median seconds by name."""

    tokens: int
    predicted: float
    seconds: dict[str, float]

    @property
    def measured(self) -> float:
        return self.seconds["dense"] / self.seconds["pruned"]


def measure_prefill(
    model: Transformer, alphas: cost.Alphas, args: argparse.Namespace, stock: torch.nn.Module | None = None,
    deadline: float = math.inf,
) -> list[Point]:  # fmt: skip
    """`model` against its pruned twin, and against stock transformers' if there is one, at every length. A length that
    would end after `deadline`, a time of time.perf_counter, by the speed of the length before, is left out."""
    config, device = model.config, model.device
    prefills = {"dense": partial(last_logits, model), "pruned": partial(last_logits, pruned_twin(model, alphas))}
    if stock:
        prefills["stock"] = partial(stock, logits_to_keep=1, use_cache=False)
    points, speed = [], math.inf  # FLOPs per second
    for tokens in args.lengths:
        flops = sum((1 + args.repeats) * cost.prefill_flops(config, tokens, some) for some in (cost.DENSE, alphas))
        started = now(device)
        if started + flops / speed > deadline:
            say(f"{tokens:,} tokens are left out, to end in time: they would take about {flops / speed:.0f} s")
            continue
        say(f"{tokens:,} tokens")
        ids = random_ids(config, tokens).to(device)
        seconds = take_turns({name: partial(run, ids) for name, run in prefills.items()}, args.repeats, device)
        points.append(Point(tokens, predicted_speed_up(config, alphas, tokens), seconds))
        speed = flops / (now(device) - started)
    return points


def print_prefill(points: Sequence[Point]) -> None:
    rows = [["tokens", "dense s", "pruned s", "predicted", "measured", "gain"]]
    for point in points:
        gain = (point.measured - 1) / (point.predicted - 1)
        rows.append([f"{point.tokens:,}", f"{point.seconds['dense']:.3f}", f"{point.seconds['pruned']:.3f}",
                     f"{point.predicted:.3f}x", f"{point.measured:.3f}x", f"{gain:.2f}"])  # fmt: skip
    if any("stock" in point.seconds for point in points):
        rows[0] += ["stock s", "stock/dense"]
        for row, point in zip(rows[1:], points):
            row += [f"{point.seconds['stock']:.3f}", f"{point.seconds['stock'] / point.seconds['dense']:.2f}x"]
    print_table(*rows)
    print("gain: what was measured beyond 1, over what was predicted beyond 1", flush=True)


def bench_prefill(args: argparse.Namespace) -> None:
    subject, layers = choose(args)
    alphas = dict.fromkeys(layers, ALPHA)
    print_header(subject, layers, f"median of {args.repeats}")
    points = measure_prefill(subject.build(), alphas, args, subject.build_stock() if args.against else None)
    print_prefill(points)
    if args.plot:
        plot_speed_up([(subject.name, subject.config, alphas, points)], args.plot, max(args.lengths))


# ----------------------------------------------------------------------------------------------------------- decode


@torch.inference_mode()
def decoder(model: Transformer, ids: Tensor, cache: KVCache) -> Callable[[], None]:
    """A run that decodes NEW_TOKENS after the prompt ids (1, T), which is read here, once."""
    first = model.head(model.hidden(ids, cache)[:, -1:]).argmax(-1)  # (1, 1)

    def run() -> None:
        cache.length, token = ids.shape[1], first  # rewound
        for _ in range(NEW_TOKENS):
            token = model(token, cache).argmax(-1)

    return run


@torch.inference_mode()
def stock_decoder(stock: torch.nn.Module, ids: Tensor) -> Callable[[], None]:
    """The same bare loop over stock transformers' forward and its own cache."""
    prompt = stock(ids, use_cache=True, logits_to_keep=1)
    cache, first = prompt.past_key_values, prompt.logits.argmax(-1)

    def run() -> None:
        token = first
        for _ in range(NEW_TOKENS):
            token = stock(token, cache=cache, use_cache=True).logits.argmax(-1)
        cache.crop(-NEW_TOKENS)  # rewound: so many tokens fewer

    return run


def bytes_read(config: ModelConfig, tokens: int, alphas: cost.Alphas, size: int) -> int:
    """What one decoded token reads, and mostly waits for: all weights, without an embedding that is not the head (one
    row of it is read), and the cache of `tokens`. `size` is the bytes of a value."""
    lookup = 0 if config.tied else config.vocab_size * config.hidden_size
    return size * (cost.parameters(config, alphas) - lookup) + cost.kv_bytes(config, tokens, alphas, size)


def bench_decode(args: argparse.Namespace) -> None:
    subject, layers = choose(args)
    config, size, dense = subject.config, subject.dtype.itemsize, subject.build()
    alphas = {"dense": cost.DENSE, "pruned": dict.fromkeys(layers, ALPHA)}
    models = {"dense": dense, "pruned": pruned_twin(dense, alphas["pruned"])}
    stock = subject.build_stock() if args.against else None
    print_header(subject, layers, f"median of {args.repeats}")
    for prompt in args.lengths:
        ids, tokens = random_ids(config, prompt).to(subject.device), prompt + NEW_TOKENS
        caches = {name: KVCache(config.n_layers, tokens) for name in models}
        runs = {name: decoder(models[name], ids, caches[name]) for name in models}
        if stock:
            forced = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}  # past an end token, like ours
            runs["stock"] = stock_decoder(stock, ids)
            runs["dense generate"] = partial(dense.generate, ids, NEW_TOKENS)
            runs["stock generate"] = partial(stock.generate, ids, do_sample=False, **forced)
        seconds = take_turns(runs, args.repeats, subject.device)
        rows = [["", "tokens/s", "KV counted", "KV held", "predicted", "measured", "ratio"]]
        for name in runs:
            measured = seconds["dense generate" if "generate" in name else "dense"] / seconds[name]
            row = [name, f"{NEW_TOKENS / seconds[name]:.1f}", "", "", "", f"{measured:.3f}x", ""]
            if name in models:
                held = sum(tensor.nbytes for pair in caches[name].layers if pair for tensor in pair)
                row[2:4] = megabytes(cost.kv_bytes(config, tokens, alphas[name], size)), megabytes(held)
                predicted = bytes_read(config, tokens, {}, size) / bytes_read(config, tokens, alphas[name], size)
                row[4], row[6] = f"{predicted:.3f}x", f"{measured / predicted:.2f}"
            rows.append(row)
        print(f"decode   {NEW_TOKENS} tokens after {prompt:,}, one sequence; predicted by the bytes read")
        print_table(*rows)


# ----------------------------------------------------------------------------------------------------------- memory


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held so far: device memory, or resident main memory as Linux counts it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent process as well
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def footprint(subject: Subject, threads: int, task: str, tokens: int) -> int:
    """Peak bytes of a task, beyond those of the libraries alone. Meant to be all that its process does."""
    torch.set_num_threads(threads)
    before = peak_bytes(subject.device)
    model, ids = subject.build(), random_ids(subject.config, tokens)
    if task == "window":
        perplexity(model, [Window(ids[0], 1)])
    elif task == "prefill":
        last_logits(model, ids.to(subject.device))
    return peak_bytes(subject.device) - before


def bench_memory(args: argparse.Namespace) -> None:
    """The prediction: all weights, and what a block holds where it is widest, in its MLP: the residual stream, its
    norm, and three tensors of the inner width (activated gate, up-projection, their product)."""
    subject, layers = choose(args)
    if subject.device.type != "cuda" and not Path("/proc/self/status").exists():
        raise UserError("memory on a CPU reads /proc/self/status, which this system lacks; run it on Linux")
    config, size = subject.config, subject.dtype.itemsize
    weights, width = size * cost.parameters(config), size * (2 * config.hidden_size + 3 * config.intermediate_size)
    print_header(subject, layers, "unpruned, a new process for every row")
    print(f"memory   weights {megabytes(weights)}", flush=True)
    rows = [["", "predicted", "peak", "ratio", "peak/weights", "beyond weights"]]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for task, tokens in [("load", 0), ("window", args.ctx or 256), *(("prefill", T) for T in args.lengths)]:
            name = f"{task} of {tokens:,}" if tokens else task
            say(name)
            peak = processes.submit(footprint, subject, torch.get_num_threads(), task, tokens).result()
            predicted = weights + tokens * width
            rows.append([name, megabytes(predicted), megabytes(peak), f"{peak / predicted:.2f}",
                         f"{peak / weights:.2f}", megabytes(peak - weights)])  # fmt: skip
    print_table(*rows)


# ------------------------------------------------------------------------------------------------------------ paper


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


def streamed_search(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Search with everything on the device, then with the layers below the pruned ones (and an embedding that is not
    the head) left in main memory while the device may hold half the weights' bytes: the same, or the cap ends it."""
    config, listed = PUBLISHED[name]
    layers, weights = list(from_the_top(config, listed)), dtype.itemsize * cost.parameters(config)
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
    print(f"\nstreamed {name} · {min(layers)} of {config.n_layers} layers in main memory · 2 windows of 512")
    print(f"         {seconds:.1f} s · perplexities {'unchanged' if same else 'CHANGED'} · {peak}", flush=True)


def print_savings(name: str, points: Sequence[Point]) -> None:
    for point in points:
        paper = f", paper {HEADLINE[2]:.1%}" if (name, point.tokens) == HEADLINE[:2] else ""
        print(f"time saved at {point.tokens:,} tokens: predicted {1 - 1 / point.predicted:.1%}, "
              f"measured {1 - 1 / point.measured:.1%}{paper}", flush=True)  # fmt: skip


def bench_paper(args: argparse.Namespace) -> None:
    """Golden logits, prefill of the four published shapes, a streamed search: within 8 minutes on one large GPU."""
    deadline = time.perf_counter() + 400  # of the prefills
    series = [(name, config, from_the_top(config, listed), []) for name, (config, listed) in PUBLISHED.items()]
    if args.predict_only:
        args.lengths = [2**i for i in range(10, 18)]
        print("paper    prefill speed-up, dense over pruned, by counted operations")
        counts = [[predicted_speed_up(config, alphas, T) for T in args.lengths] for _, config, alphas, _ in series]
        rows = [[name, *(f"{ratio:.3f}" for ratio in ratios)] for (name, *_), ratios in zip(series, counts)]
        print_table(["tokens", *(f"{T:,}" for T in args.lengths)], *rows)
    else:
        device, dtype = choose_device(args.device)[0], DTYPE_NAMES["bfloat16" if args.dtype == "auto" else args.dtype]
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "not a GPU"
        print(f"device   {device} ({card}) · {dtype_name(dtype)} · random weights · median of {args.repeats}")
        check_golden(device)
        for name, config, alphas, points in series:
            print(f"\nprefill  {name} · {len(alphas)} of {config.n_layers} layers pruned", flush=True)
            points += measure_prefill(random_model(config, device, dtype), alphas, args, deadline=deadline)
            print_prefill(points)
            print_savings(name, points)
        streamed_search(HEADLINE[0], device, dtype)
    if args.plot:
        plot_speed_up(series, args.plot, max(args.lengths))


# ------------------------------------------------------------------------------------------------------- the picture

# From Okabe and Ito's palette for colour-blind readers; line styles and markers say the same once more.
LOOKS = [("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D")]


def plot_speed_up(
    series: Sequence[tuple[str, ModelConfig, cost.Alphas, Sequence[Point]]], file: Path, longest: int
) -> None:
    """Speed-up over context length up to `longest` tokens: lines as counted, dots as measured. `series` holds (name,
    config, alphas, points)."""
    from matplotlib.figure import Figure  # nothing else needs it

    axes = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
    shortest = min([longest // 128, *(point.tokens for *_, points in series for point in points)])
    lengths = [round(shortest * (longest / shortest) ** (i / 80)) for i in range(81)]
    for (name, config, alphas, points), (colour, line, marker) in zip(series, LOOKS):
        label = f"{name}, {len(alphas)} of {config.n_layers} layers"
        counted = [predicted_speed_up(config, alphas, T) for T in lengths]
        axes.plot(lengths, counted, line, color=colour, linewidth=2.5, label=label)
        axes.plot([p.tokens for p in points], [p.measured for p in points], marker, color=colour, markersize=8)
    axes.set_xscale("log", base=2)
    ticks = [2**i for i in range(21) if shortest <= 2**i <= longest]
    axes.set_xticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axes.set_xlabel("context length (tokens; 1k = 1,024)", fontsize=13)
    axes.set_ylabel("prefill speed-up (times)", fontsize=13)
    dots = " · dots: measured" if any(points for *_, points in series) else ""
    axes.set_title(f"Dense over pruned · lines: counted operations{dots}", fontsize=12)
    axes.tick_params(labelsize=12)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=11, frameon=False)
    axes.figure.savefig(file, dpi=150)
    say(f"wrote {file}")


# -------------------------------------------------------------------------------------------------- the command line


def check_arguments(args: argparse.Namespace) -> None:
    """Fill in what depends on the measure, and refuse what makes no sense. Raises UserError."""
    args.lengths = args.lengths or LENGTHS[args.what]
    args.repeats = REPEATS[args.what] if args.repeats is None else args.repeats
    for flag, values, least in (("--lengths", args.lengths, 1), ("--repeats", [args.repeats], 1),
                                ("--windows", [args.windows], 1), ("--ctx", [args.ctx], 2)):  # fmt: skip
        if any(value is not None and value < least for value in values):
            raise UserError(f"{flag} takes whole numbers from {least} up")
    for flag, given, measures in (
        ("--plot", args.plot, ("prefill", "paper")),
        ("--against", args.against, ("prefill", "decode")),
        ("--predict-only", args.predict_only, ("paper",)),
        ("a model of your own", args.ckpt or args.config, ("search", "prefill", "decode", "memory")),
    ):
        if given and args.what not in measures:
            raise UserError(f"{flag} goes with {' or '.join(measures)}, not with {args.what}")
    for flag, given, library in (("--plot", args.plot, "matplotlib"), ("--against", args.against, "transformers")):
        if given and importlib.util.find_spec(library) is None:
            raise UserError(f"{flag} needs {library}: pip install {library}")
    if args.plot and (args.plot.suffix != ".png" or not args.plot.parent.is_dir()):
        raise UserError(f"--plot {args.plot} must be a .png file in a folder that exists")


def choose(args: argparse.Namespace) -> tuple[Subject, list[int]]:
    """The model to measure and the layers to prune, topmost first. Raises UserError."""
    if args.ckpt and args.config:
        raise UserError("--ckpt and --config name two models; leave one out")
    subject = choose_subject(args)
    return subject, choose_layers(args.top, args.layers, subject.config.n_layers)


MEASURES = {"search": bench_search, "prefill": bench_prefill, "decode": bench_decode, "memory": bench_memory,
            "paper": bench_paper}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measured speed and memory beside the predicted.")
    parser.add_argument("what", choices=list(MEASURES), help="paper: the four published shapes, for one large GPU")
    add_run_arguments(parser, "calibration.txt", windows="4", ctx="2,048; demo model or --config: 512; memory: 256")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a config.json to fill with random weights")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--top", type=int, metavar="N", help="prune the N highest layers (default: 8)")
    which.add_argument("--layers", metavar="LIST", help="prune these layers instead, such as 29,28,26 (0 is lowest)")
    parser.add_argument("--grid", default=GRID, help="alphas that search tries (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens of each prompt")
    parser.add_argument("--repeats", type=int, metavar="N", help="turns behind each median (default: 1 for search, "
                        "3 for paper, 5 for the others)")  # fmt: skip
    parser.add_argument("--against", choices=["transformers"], help="stock transformers takes its turns, too")
    parser.add_argument("--predict-only", action="store_true", help="paper: only count, up to 131,072 tokens")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw speed-up over context length, a .png file")
    args = parser.parse_args(argv)
    try:
        check_arguments(args)
        MEASURES[args.what](args)
    except UserError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
