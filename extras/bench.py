"""Is it as fast as it should be? Whatever is measured here stands beside what cost.py predicts.

    python -m extras.bench search    the textbook loop, the cached grid search, the Fibonacci search
    python -m extras.bench prefill   dense against pruned over context lengths
    python -m extras.bench decode    tokens per second and KV bytes
    python -m extras.bench memory    peak memory against the weights' bytes
    python -m extras.bench paper     the four published models' shapes, for one large GPU

What is compared runs in turns (dense, pruned, dense, pruned, ...), so that a machine that slows down slows both, and
medians are reported. Speed needs no trained weights: --config makes random ones, and lengths may pass the trained one.
The stopwatch, the models and the prefill are in timing.py beside this file, the published shapes in bench_paper.py.
"""

import argparse
import copy
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import cost
from checkpoint import UserError
from eval_ppl import (
    Window,
    add_run_arguments,
    choose_device,
    dtype_name,
    exit_code,
    make_windows,
    perplexity,
    prepare,
    read_windows,
    short_count,
)
from extras.bench_paper import PUBLISHED, from_the_top, measure_published, print_predictions
from extras.timing import (
    Series,
    Subject,
    choose_subject,
    last_logits,
    measure_prefill,
    megabytes,
    peak_bytes,
    plot_speed_up,
    print_prefill,
    print_table,
    pruned_twin,
    random_dtype,
    random_ids,
    say,
    take_turns,
)
from harp import GRID, Step, choose_layers, parse_grid, search, set_alphas
from model import KVCache, ModelConfig, Transformer

ALPHA = 0.5  # of pruned layers where only speed matters: any value but 0, which would drop V and O too
NEW_TOKENS = 64
REPEATS = {"search": 1, "prefill": 5, "decode": 5, "memory": 1, "paper": 3}
LENGTHS = {"search": [], "prefill": [512, 1024, 2048, 4096, 8192], "decode": [512], "memory": [32768],
           "paper": [8192, 16384, 32768, 65536]}  # fmt: skip
PREDICTED_LENGTHS = [2**i for i in range(10, 18)]  # counting takes no time


def print_header(subject: Subject, layers: Sequence[int], how: str) -> None:
    config, threads = subject.config, torch.get_num_threads()
    print(f"model    {subject.name} · {config.n_layers} layers · {short_count(cost.parameters(config))} parameters")
    print(f"pruned   {len(layers)} layers: {' '.join(map(str, layers))}")
    print(f"device   {subject.device} · {dtype_name(subject.dtype)} · {threads} threads · {how}", flush=True)


# -------------------------------------------------------------------------------------------------------------- search


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


def bench_search(
    subject: Subject, layers: Sequence[int], grid: Sequence[float], windows: Sequence[Window], repeats: int
) -> None:
    print_header(subject, layers, f"median of {repeats}")
    tokens = len(windows[0].ids)
    print(f"search   {len(grid)} alphas · {len(windows)} windows of {tokens:,} tokens", flush=True)
    model, steps = subject.build(), {}
    say("counting the matrix products of a search")
    with MatmulLog() as log:  # this run is the warm-up, too
        search(model, windows, layers, grid)
    methods = {"naive": naive_search, "cached grid": search, "Fibonacci": partial(search, method="fibonacci")}

    def run(name: str) -> None:
        say(f"{name} search")
        steps[name] = methods[name](model, windows, layers, grid)

    seconds = take_turns({name: partial(run, name) for name in methods}, repeats, subject.device, warm_up=0)
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


# ------------------------------------------------------------------------------------------------------------- prefill


def bench_prefill(
    subject: Subject,
    layers: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
    against: str | None,
    plot: Path | None,
) -> None:
    alphas = dict.fromkeys(layers, ALPHA)
    print_header(subject, layers, f"median of {repeats}")
    points = measure_prefill(subject.build(), alphas, lengths, repeats, subject.build_stock() if against else None)
    print_prefill(points)
    if plot:
        plot_speed_up([Series(subject.name, subject.config, alphas, points)], plot, max(lengths))


# -------------------------------------------------------------------------------------------------------------- decode


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
    first, after_prompt = prompt.logits.argmax(-1), prompt.cache

    def run() -> None:
        # rewound: a token more makes new tensors, so a shallow copy leaves the prompt's as they are. Cropping would not
        # do: a layer past its sliding window has forgotten what it would go back to.
        token, cache = first, copy.copy(after_prompt)
        cache.layers = [copy.copy(layer) for layer in after_prompt.layers]
        for _ in range(NEW_TOKENS):
            token = stock(token, cache=cache, use_cache=True).logits.argmax(-1)

    return run


def bytes_read(config: ModelConfig, tokens: int, alphas: cost.Alphas, size: int) -> int:
    """What one decoded token reads, and mostly waits for: all weights, without an embedding that is not the head (one
    row of it is read), and the cache of `tokens`. `size` is the bytes of a value."""
    lookup = 0 if config.tied else config.vocab_size * config.hidden_size
    return size * (cost.parameters(config, alphas) - lookup) + cost.kv_bytes(config, tokens, alphas, size)


def bench_decode(
    subject: Subject, layers: Sequence[int], lengths: Sequence[int], repeats: int, against: str | None
) -> None:
    config, size, dense = subject.config, subject.dtype.itemsize, subject.build()
    alphas = {"dense": cost.DENSE, "pruned": dict.fromkeys(layers, ALPHA)}
    models = {"dense": dense, "pruned": pruned_twin(dense, alphas["pruned"])}
    stock = subject.build_stock() if against else None
    print_header(subject, layers, f"median of {repeats}")
    for prompt in lengths:
        ids, tokens = random_ids(config, prompt).to(subject.device), prompt + NEW_TOKENS
        caches = {name: KVCache(config.n_layers, tokens) for name in models}
        runs = {name: decoder(models[name], ids, caches[name]) for name in models}
        if stock:
            forced = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}  # past an end token, like ours
            runs["stock"] = stock_decoder(stock, ids)
            runs["dense generate"] = partial(dense.generate, ids, NEW_TOKENS)
            runs["stock generate"] = partial(stock.generate, ids, do_sample=False, **forced)
        seconds = take_turns(runs, repeats, subject.device)
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


# -------------------------------------------------------------------------------------------------------------- memory


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


def bench_memory(subject: Subject, layers: Sequence[int], ctx: int, lengths: Sequence[int]) -> None:
    """The prediction: all weights, and what a block holds where it is widest, in its MLP: the residual stream, its
    norm, and three tensors of the inner width (activated gate, up-projection, their product)."""
    if subject.device.type != "cuda" and not Path("/proc/self/status").exists():
        raise UserError("memory on a CPU reads /proc/self/status, which this system lacks; run it on Linux")
    config, size = subject.config, subject.dtype.itemsize
    weights, width = size * cost.parameters(config), size * (2 * config.hidden_size + 3 * config.intermediate_size)
    print_header(subject, layers, "unpruned, a new process for every row")
    print(f"memory   weights {megabytes(weights)}", flush=True)
    rows = [["", "predicted", "peak", "ratio", "peak/weights", "beyond weights"]]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for task, tokens in [("load", 0), ("window", ctx), *(("prefill", T) for T in lengths)]:
            name = f"{task} of {tokens:,}" if tokens else task
            say(name)
            try:
                peak = processes.submit(footprint, subject, torch.get_num_threads(), task, tokens).result()
            except BrokenProcessPool:
                raise UserError(f"the process of {name} was killed, most likely for want of memory") from None
            predicted = weights + tokens * width
            rows.append([name, megabytes(predicted), megabytes(peak), f"{peak / predicted:.2f}",
                         f"{peak / weights:.2f}", megabytes(peak - weights)])  # fmt: skip
    print_table(*rows)


# --------------------------------------------------------------------------------------------------------------- paper


def bench_paper(
    asked_device: str, asked_dtype: str, lengths: Sequence[int], repeats: int, predict_only: bool, plot: Path | None
) -> None:
    series = [Series(name, config, from_the_top(config, listed), []) for name, (config, listed) in PUBLISHED.items()]
    if predict_only:
        print_predictions(series, lengths)
    else:
        device, _ = choose_device(asked_device)
        series = measure_published(series, device, random_dtype(asked_dtype), lengths, repeats)
    if plot:
        plot_speed_up(series, plot, max(lengths))


# ---------------------------------------------------------------------------------------------------- the command line


def check_arguments(args: argparse.Namespace) -> None:
    """Fill in what depends on the measure, and refuse what makes no sense. Raises UserError."""
    args.lengths = args.lengths or (PREDICTED_LENGTHS if args.predict_only else LENGTHS[args.what])
    args.repeats = REPEATS[args.what] if args.repeats is None else args.repeats
    if args.ckpt and args.config:
        raise UserError("--ckpt and --config name two models; leave one out")
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.py", description="Measured speed and memory beside the predicted.")
    parser.add_argument("what", choices=list(LENGTHS), help="paper: the four published shapes, for one large GPU")
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
    return exit_code("bench.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Whatever can be refused is refused before a weight is read."""
    check_arguments(args)
    if args.what == "paper":
        bench_paper(args.device, args.dtype, args.lengths, args.repeats, args.predict_only, args.plot)
        return
    subject = choose_subject(args.ckpt, args.config, args.device, args.dtype)
    layers = choose_layers(args.top, args.layers, subject.config.n_layers)
    if args.what == "search":
        grid, count = parse_grid(args.grid), args.windows or 4
        if subject.random:
            ctx = args.ctx or 512
            windows = make_windows(random_ids(subject.config, ctx * count)[0].tolist(), ctx)
        else:
            windows = read_windows(prepare(args.ckpt, args.device, args.dtype, args.ctx), args.text, count)
        bench_search(subject, layers, grid, windows, args.repeats)
    elif args.what == "prefill":
        bench_prefill(subject, layers, args.lengths, args.repeats, args.against, args.plot)
    elif args.what == "decode":
        bench_decode(subject, layers, args.lengths, args.repeats, args.against)
    else:
        bench_memory(subject, layers, args.ctx or 256, args.lengths)


if __name__ == "__main__":
    sys.exit(main())
