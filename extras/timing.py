"""What the measurements of extras/bench.py are made of: a model of any shape and its pruned twin, runs that take turns,
and prefill beside what cost.py predicts of it, as a table and as a picture.
"""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import cost
from checkpoint import UserError, read_config
from eval_ppl import DTYPE_NAMES, choose_device, choose_dtype, named_checkpoint
from harp import NO_CONSTANTS, Means, set_alphas
from load_weights import load, model_config
from model import ModelConfig, RMSNorm, Transformer

# ---------------------------------------------------------------------------------------------------- what is measured


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


def choose_subject(ckpt: str | None, config_file: Path | None, asked_device: str, asked_dtype: str) -> Subject:
    """The model that --ckpt or --config names, or the demo model; no weight is read yet. Raises UserError."""
    device, _ = choose_device(asked_device)
    if config_file:
        folder = config_file.parent if config_file.name == "config.json" else config_file
        return Subject(folder, True, model_config(read_config(folder)), device, random_dtype(asked_dtype))
    checkpoint = named_checkpoint(ckpt)
    if checkpoint.config["harp"]:
        raise UserError(f"{checkpoint.path} is pruned already: take the checkpoint that it was made from")
    config = model_config(checkpoint.config)
    dtype, _ = choose_dtype(asked_dtype, checkpoint, config, device)
    return Subject(checkpoint.path, False, config, device, dtype)


def random_dtype(asked: str) -> torch.dtype:
    """Random weights have no dtype that they are stored in."""
    return DTYPE_NAMES["bfloat16" if asked == "auto" else asked]


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


def pruned_twin(model: Transformer, alphas: Mapping[int, float], means: Means = NO_CONSTANTS) -> Transformer:
    """A pruned copy (`Transformer.prune_`) that shares all weights with `model` but the folded ones."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    set_alphas(twin, alphas, means)
    return twin.prune_()


def random_ids(config: ModelConfig, tokens: int) -> Tensor:  # (1, T)
    return torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------------------------------------- measuring and printing


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


def peak_bytes(device: torch.device) -> int:
    """The most that this process has held so far: device memory, or resident main memory as Linux counts it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()  # getrusage would count the parent process as well
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def print_table(*rows: Sequence[str]) -> None:
    """Columns as wide as their widest cell: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]).rstrip(), flush=True)


def megabytes(n: float) -> str:
    return f"{n / 1e6:,.1f} MB"


# ------------------------------------------------------------------------------------------------------------- prefill


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
    model: Transformer, alphas: cost.Alphas, lengths: Sequence[int], repeats: int,
    stock: torch.nn.Module | None = None, deadline: float = math.inf,
) -> list[Point]:  # fmt: skip
    """`model` against its pruned twin, and against stock transformers' if there is one, at every length. A length that
    would end after `deadline`, a time of time.perf_counter, by the speed of the length before, is left out."""
    config, device = model.config, model.device
    prefills = {"dense": partial(last_logits, model), "pruned": partial(last_logits, pruned_twin(model, alphas))}
    if stock:
        prefills["stock"] = partial(stock, logits_to_keep=1, use_cache=False)
    points, speed = [], math.inf  # FLOPs per second
    for tokens in lengths:
        flops = sum((1 + repeats) * cost.prefill_flops(config, tokens, some) for some in (cost.DENSE, alphas))
        started = now(device)
        if started + flops / speed > deadline:
            say(f"{tokens:,} tokens are left out, to end in time: they would take about {flops / speed:.0f} s")
            continue
        say(f"{tokens:,} tokens")
        ids = random_ids(config, tokens).to(device)
        seconds = take_turns({name: partial(run, ids) for name, run in prefills.items()}, repeats, device)
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


# --------------------------------------------------------------------------------------------------------- the picture

# From Okabe and Ito's palette for colour-blind readers; line styles and markers say the same once more.
LOOKS = [("#0072B2", "-", "o"), ("#D55E00", "--", "s"), ("#009E73", "-.", "^"), ("#CC79A7", ":", "D")]


class Series(NamedTuple):
    """One model of a picture or a table, and what was measured of it: nothing, or a point for every length."""

    name: str
    config: ModelConfig
    alphas: cost.Alphas
    points: Sequence[Point]


def plot_speed_up(series: Sequence[Series], file: Path, longest: int) -> None:
    """Speed-up over context length up to `longest` tokens: lines as counted, dots as measured."""
    from matplotlib.figure import Figure  # nothing else needs it

    axes = Figure(figsize=(6.4, 4.0), layout="constrained").subplots()
    shortest = min([max(1, longest // 128), *(point.tokens for *_, points in series for point in points)])
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
