"""HARP: remove the queries and keys of a model's top layers, and find by search how loud what remains should be.

    python harp.py                                    # the demo model
    python harp.py --ckpt path/to/checkpoint --top 8  # any Llama, Mistral, Qwen2 or Gemma2 folder

Method: "High-Layer Attention Pruning with Rescaling", Liu & Liu, TMLR 2026, arXiv 2507.01900. The search below is
its Algorithm 1; everything after it is about running that search on real files without losing anything.
"""

import argparse
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

import cost
from checkpoint import UserError, open_checkpoint
from eval_ppl import (
    Setup,
    Window,
    add_run_arguments,
    advance,
    clock,
    describe_windows,
    embed,
    exit_code,
    own_text,
    perplexity,
    prepare,
    read_windows,
    score,
    show_share,
    show_status,
)
from extras.layer_scores import attention_updates, cheapest, layer_costs
from extras.model_card import model_card
from extras.run_state import earlier_report, hold, replace_json, run_identity
from load_weights import save, stored_dtype
from model import ModelConfig, Transformer

TOP = 8
GRID = "0:1:0.1"
MOST_ALPHAS = 10_000
PROMPT_TOKENS = 48


# ------------------------------------------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Step:
    """What the search decided for one layer."""

    layer: int
    alpha: float
    ppl: float
    tried: tuple[tuple[float, float | None], ...]  # (alpha, perplexity) in the order of trying; None: not finite
    seconds: float


Means = Mapping[
    int, tuple[Tensor, Tensor]
]  # layer -> what attention adds to a token on average, and what V·O does: (D,)
NO_CONSTANTS: Means = {}


@torch.inference_mode()
def search(
    model: Transformer,
    windows: Sequence[Window],
    layers: Sequence[int],
    grid: Sequence[float],
    *,
    method: str = "grid",
    sweeps: int = 0,
    means: Means = NO_CONSTANTS,
    done: Sequence[Step] = (),
    on_trial: Callable[[int, int], None] = lambda layer, trials: None,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Prune `layers` from the top down, giving each the alpha of the grid with the lowest perplexity.

    Algorithm 1 of the paper: switch the topmost layer to its V·O path, try the alphas, keep the best, go on to the
    next layer below; layers not yet reached stay dense. The model carries the alphas afterwards.

    The textbook loop runs the whole model for every alpha of every layer. But whatever lies below the searched layer
    does not depend on its alpha, so that is computed once per layer: same numbers, a fraction of the work.

    `method` is a key of METHODS. `sweeps` searches every layer again that many times, with all the others pruned
    (coordinate descent; ours, not the paper's). `means` adds a constant to what the layers in it keep (`set_alphas`).
    `done` holds the steps of an earlier, interrupted search.
    `on_trial(layer, trials)` and `on_step(step)` hear of progress. Raises UserError if a layer has no finite
    perplexity at any alpha.
    """
    order = sorted(set(layers), reverse=True)
    steps = list(done)
    set_alphas(model, alphas_after(steps), means)
    lowest = order[-1]
    at_lowest = advance(model, embed(model, windows), range(lowest))  # the only hidden states that are kept
    for layer in (order * (1 + sweeps))[len(steps) :]:
        before = alphas_after(steps).get(layer)  # None unless this is a sweep
        inputs = advance(model, at_lowest, range(lowest, layer))
        step = search_layer(model, windows, layer, inputs, grid, method, means.get(layer), on_trial)
        if before is not None and step.ppl >= steps[-1].ppl:  # a sweep only ever improves
            step = replace(step, alpha=before, ppl=steps[-1].ppl)
        steps.append(step)
        set_alphas(model, alphas_after(steps), means)
        on_step(step)
    return steps


def alphas_after(steps: Sequence[Step]) -> dict[int, float]:
    """Layer -> alpha; of a layer that was searched more than once, the last."""
    return {step.layer: step.alpha for step in steps}


def search_layer(
    model: Transformer,
    windows: Sequence[Window],
    layer: int,
    inputs: list[Tensor],
    grid: Sequence[float],
    method: str,
    means: tuple[Tensor, Tensor] | None,
    on_trial: Callable[[int, int], None],
) -> Step:
    """Find the alpha of one layer. `inputs`: (1, T, D) for every window."""
    started = time.perf_counter()
    block = model.blocks[layer]
    updates = [block.vo_update(h) for h in inputs]  # alpha only scales this
    tried: dict[float, float] = {}

    def trial(alpha: float) -> float:
        """Perplexity at this alpha: h + alpha * u, one MLP, the layers above, the head."""
        if alpha not in tried:
            constant = constant_at(alpha, means)
            outputs = [block.add_mlp((h + alpha * u if alpha else h) + constant) for h, u in zip(inputs, updates)]
            ppl = score(model, advance(model, outputs, range(layer + 1, len(model.blocks))), windows).ppl
            tried[alpha] = ppl if math.isfinite(ppl) else math.inf
            on_trial(layer, len(tried))
        return tried[alpha]

    METHODS[method](sorted(grid), trial)
    best, best_alpha = min((ppl, alpha) for alpha, ppl in tried.items())  # of equals, the smaller alpha
    if best == math.inf:
        raise UserError(f"layer {layer} has no finite perplexity at any alpha; try --dtype float32")
    recorded = tuple((alpha, ppl if ppl < math.inf else None) for alpha, ppl in tried.items())
    return Step(layer, best_alpha, best, recorded, time.perf_counter() - started)


def try_all(grid: Sequence[float], trial: Callable[[float], float]) -> None:
    """The paper's search: every alpha."""
    for alpha in grid:
        trial(alpha)


def try_fibonacci(grid: Sequence[float], trial: Callable[[float], float]) -> None:
    """Find the alpha with the lowest perplexity in few trials: at most 5 of 11, 10 of 101. The grid is sorted.

    If perplexity falls and then rises again as alpha grows, then the better of two trials tells on which side of the
    other the lowest point lies. Kept at Fibonacci distances, one of the two serves again in the next round (Kiefer
    1953). 11 alphas: trials 5 and 8 places from the left end, then 3 and 5, 2 and 3, 1 and 2 from the end that is left
    by then. Where perplexity has more than one valley, this finds one of them.
    """
    lengths = [1, 2]
    while lengths[-1] <= len(grid):
        lengths.append(lengths[-1] + lengths[-2])

    def value(index: int) -> float:
        return trial(grid[index]) if index < len(grid) else math.inf  # padding up to a Fibonacci length

    left_end = -1
    for near, far in reversed(list(zip(lengths, lengths[1:-1]))):
        if value(left_end + far) < value(left_end + near):
            left_end += near
    value(left_end + 1)  # the only place left; tried already, unless the grid is a single alpha


METHODS = {"grid": try_all, "fibonacci": try_fibonacci}  # they return nothing: `trial` keeps what it was asked


def set_alphas(model: Transformer, alphas: Mapping[int, float], means: Means = NO_CONSTANTS) -> None:
    """Switch exactly these layers, layer -> alpha, to their V·O path, and all others back to full attention.

    A pruned layer that has `means` (`attention_means`) also gets the constant that makes its mean update what it was:
    alpha * U + mean(A) - alpha * mean(U). FLAP's bias compensation (An et al. 2023, arXiv 2312.11983), applied to HARP.
    """
    for layer, block in enumerate(model.blocks):
        block.attention_mode = "vo" if layer in alphas else "full"
        block.alpha = alphas.get(layer, 1.0)
        block.constant = None
        if layer in alphas and layer in means:
            block.constant = nn.Parameter(constant_at(block.alpha, means[layer]), requires_grad=False)


def constant_at(alpha: float, means: tuple[Tensor, Tensor] | None) -> Tensor | float:
    """mean(A) - alpha * mean(U), (D,); 0 without means."""
    if means is None:
        return 0.0
    attention, value_path = means
    return attention - alpha * value_path


@torch.inference_mode()
def attention_means(model: Transformer, windows: Sequence[Window], layers: Sequence[int]) -> Means:
    """The means of A, what attention adds to a token, and of U, what V·O would add, over all tokens. They are the dense
    model's, and the model is dense afterwards."""
    set_alphas(model, {})
    return {
        layer: (torch.cat(attention, dim=1).mean((0, 1)), torch.cat(value_path, dim=1).mean((0, 1)))
        for layer, _, attention, value_path in attention_updates(model, windows, layers)
    }


def perplexities(
    model: Transformer,
    windows: Sequence[Window],
    variants: Mapping[str, Mapping[int, float]],
    means: Means = NO_CONSTANTS,
) -> dict[str, float | None]:
    """Perplexity of the model pruned in several ways, each a dict layer -> alpha. None: not finite. What lies below all
    pruned layers is computed once. The model carries the last variant's alphas afterwards."""
    lowest = min(layer for alphas in variants.values() for layer in alphas)
    at_lowest = advance(model, embed(model, windows), range(lowest))
    found = {}
    for name, alphas in variants.items():
        set_alphas(model, alphas, means)
        ppl = score(model, advance(model, at_lowest, range(lowest, len(model.blocks))), windows).ppl
        found[name] = ppl if math.isfinite(ppl) else None
    return found


# ----------------------------------------------------------------------------------------------- what a user asks for


def parse_grid(text: str) -> list[float]:
    """Alphas in rising order from "0,0.1,1" or "0:1:0.1" (first, last, step). Raises UserError."""
    try:
        if ":" in text:
            first, last, step = (float(part) for part in text.split(":"))
            count = math.floor((last - first) / step + 1e-9) + 1  # the step may not fit exactly in binary
            grid = [round(first + i * step, 10) for i in range(min(count, MOST_ALPHAS + 1))]
        else:
            grid = [float(part) for part in text.split(",")]
    except (ValueError, OverflowError, ZeroDivisionError):
        grid = []
    if not grid or not all(0 <= alpha < math.inf for alpha in grid):
        raise UserError(f"--grid {text!r} is no grid: it takes alphas like 0,0.1,1 or 0:1:0.1, finite and not below 0")
    if len(grid) > MOST_ALPHAS:
        raise UserError(f"--grid {text!r} has more than {MOST_ALPHAS:,} alphas; take a larger step")
    return sorted(set(grid))


def choose_layers(top: int | None, listed: str | None, n_layers: int) -> list[int]:
    """The layers to prune, topmost first. Raises UserError."""
    if listed is None:
        top = TOP if top is None else top
        if not 1 <= top <= n_layers:
            raise UserError(f"--top {top} is out of range: with this model it takes 1 to {n_layers}")
        return list(reversed(range(n_layers - top, n_layers)))
    try:
        layers = sorted({int(part) for part in listed.split(",")}, reverse=True)
    except ValueError:
        raise UserError(f"--layers {listed!r} is no list of layers, such as 29,28,26") from None
    if not 0 <= layers[-1] <= layers[0] < n_layers:
        raise UserError(f"--layers {listed} is out of range: this model has layers 0 to {n_layers - 1}")
    return layers


def prompt_ids(prompt: str, setup: Setup) -> Tensor:
    """A prompt's ids, (1, T), with BOS where the model wants one. Raises UserError."""
    tokenizer, longest = setup.tokenizer, setup.config.max_position_embeddings - PROMPT_TOKENS
    ids = ([] if tokenizer.bos_rule == "none" else [tokenizer.bos_id]) + tokenizer.encode(prompt)
    if not 1 <= len(ids) <= longest:
        raise UserError(f"--prompt has {len(ids)} tokens; it takes 1 to {longest:,}")
    return torch.tensor([ids])


# -------------------------------------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prune the attention of a model's top layers with HARP.")
    add_run_arguments(parser, "calibration.txt", windows="16; demo model: 4")
    method = parser.add_argument_group("method")
    which = method.add_mutually_exclusive_group()
    which.add_argument("--top", type=int, metavar="N", help=f"prune the N highest layers (default: {TOP})")
    which.add_argument("--layers", metavar="LIST", help="prune these layers instead, such as 29,28,26 (0 is lowest)")
    method.add_argument("--select", default="top", choices=["top", "cost"], help="which N layers: the highest "
                        "(default), or those that cost least when pruned alone")  # fmt: skip
    method.add_argument("--bias", action="store_true", help="also keep the mean of what a pruned attention adds")
    method.add_argument("--grid", default=GRID, help="alphas to try: 0,0.1,1 or first:last:step (default: %(default)s)")
    method.add_argument("--search", default="grid", choices=list(METHODS), help="try all alphas of the grid (default), "
                        "or few of them, trusting that perplexity has one valley")  # fmt: skip
    method.add_argument("--sweeps", type=int, default=0, metavar="N",
                        help="afterwards search every layer again, N times (default: 0)")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, metavar="DIR", help="result folder (default: out/<model>-harp<N>, -cost and -bias if so)"
    )
    output.add_argument("--heldout", default=own_text("heldout.txt"), metavar="FILE",
                        help="UTF-8 text for the final check (default: %(default)s)")  # fmt: skip
    output.add_argument("--prompt", metavar="TEXT", help="also print its continuation before and after pruning")
    args = parser.parse_args(argv)
    return exit_code("harp.py", lambda: run(args), "; the same command goes on from what is finished")


def run(args: argparse.Namespace) -> None:
    """Search, judge, save, reload: the whole command. Whatever can be refused is refused before a weight is read."""
    grid = parse_grid(args.grid)
    setup = prepare(args.ckpt, args.device, args.dtype, args.ctx)
    path = setup.checkpoint.path
    if setup.checkpoint.config["harp"]:
        raise UserError(f"{path} is pruned already; its perplexity: python eval_ppl.py --ckpt {path}")
    layers = choose_layers(args.top, args.layers, setup.config.n_layers)
    if args.select == "cost" and args.layers:
        raise UserError("--select cost picks the layers, and --layers lists them; leave one out")
    if args.sweeps < 0:
        raise UserError(f"--sweeps {args.sweeps} is out of range: it takes a whole number, 0 or more")
    count = (4 if args.ckpt is None else 16) if args.windows is None else args.windows
    windows = read_windows(setup, args.text, count)
    heldout = read_windows(setup, args.heldout, count)
    prompt = None if args.prompt is None else prompt_ids(args.prompt, setup)
    for flag, needed in (("--prompt", prompt is not None), ("--select cost", args.select == "cost")):
        if needed and setup.streams:
            raise UserError(f"{flag} needs the whole model on the device, which has too little memory; leave it out")
    name = path.resolve().name
    departures = "-cost" * (args.select == "cost") + "-bias" * args.bias
    out = args.out or Path("out") / f"{name}-harp{len(layers)}{departures}"
    if not out.name:
        raise UserError(f"--out {out} has no name of its own; name a new folder")
    partial = out.with_name(out.name + ".partial")
    identity = run_identity(
        setup, args.text, args.heldout, layers=len(layers) if args.select == "cost" else layers, select=args.select,
        bias=args.bias, grid=grid, search=args.search, sweeps=args.sweeps, windows=count,
    )  # fmt: skip
    finished = earlier_report(out, identity)
    if finished and "saved" not in finished.get("heldout_ppl", {}):
        raise UserError(f"{out} holds an unfinished run; give --out the name it was to have in the end")
    report = (
        finished
        or earlier_report(partial, identity)
        or {
            "identity": identity,
            "model": name,
            "text": window_facts(args.text, windows),
            "heldout_text": window_facts(args.heldout, heldout),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "steps": [],
        }
    )

    print(setup.description)
    print(describe_windows(args.text, windows, setup.ctx, setup.tokenizer.bos_rule), flush=True)
    with nullcontext() if finished else hold(partial):
        model = None if finished and prompt is None else setup.load(min(layers))
        if args.select == "cost":
            layers = pick_layers(model, windows, len(layers), report, partial / "harp.json")
        means = attention_means(model, windows, layers) if args.bias and model is not None else NO_CONSTANTS
        if finished:
            print_steps(report)
        else:
            run_search(model, windows, layers, grid, args.search, args.sweeps, means, report, partial / "harp.json")
            judge(model, heldout, layers, means, report)
        print_summary(report, args.heldout, setup.config)
        if prompt is not None:
            print_continuations(model, setup, prompt, alphas_after(steps_of(report)), means)
        if not finished:
            save(model, partial, path, stored_dtype(setup.checkpoint))
            del model  # the saved one takes its place in memory
            model = replace(setup, checkpoint=open_checkpoint(partial)).load()
            saved = perplexity(model, heldout, show_share("perplexity of the saved model"))
            show_status("")
            report["heldout_ppl"]["saved"] = saved.ppl
            replace_json(partial / "harp.json", report)
            card = model_card(name, alphas_after(steps_of(report)), report)
            (partial / "README.md").write_text(card, encoding="utf-8")
            partial.rename(out)
    print(f"result   {out} · reloaded from there: ppl {ppl_text(report['heldout_ppl']['saved'])}")
    command = ["python", "eval_ppl.py", "--ckpt", str(out), "--ctx", str(setup.ctx), "--windows", str(count)]
    for flag, value, default in (
        ("--text", args.heldout, own_text("heldout.txt")),
        ("--dtype", args.dtype, "auto"),
        ("--device", args.device, "auto"),
    ):
        command += [] if value == default else [flag, value]
    print(shlex.join(command))  # gives the same number


def pick_layers(model: Transformer, windows: Sequence[Window], k: int, report: dict, state: Path) -> list[int]:
    """The k layers that cost least when they alone are pruned, topmost first; what all layers cost is in the report,
    now or since an earlier run, and printed."""
    if "layer_costs" not in report:
        n_layers = model.config.n_layers
        report["layer_costs"] = [
            {"layer": layer, "alpha": alpha, "ppl": None if ppl == math.inf else ppl}
            for layer, (alpha, ppl) in layer_costs(
                model, windows, on_layer=lambda layer: show_status(f"{layer + 1} of {n_layers} layers pruned alone")
            ).items()
        ]
        show_status("")
        replace_json(state, report)
    costs = {row["layer"]: (row["alpha"], row["ppl"] or math.inf) for row in report["layer_costs"]}
    picked = cheapest(costs, k)
    print("layers   perplexity with one layer alone pruned, at its least-squares alpha:")
    print("         " + "  ".join(f"{layer}: {costs[layer][1]:.2f}" for layer in picked), flush=True)
    return sorted(picked, reverse=True)


def judge(model: Transformer, heldout: Sequence[Window], layers: list[int], means: Means, report: dict) -> None:
    """Put the held-out perplexities into the report, beside what the same layers give without a search."""
    steps = steps_of(report)
    show_status("perplexity on the held-out text")
    report["heldout_ppl"] = perplexities(
        model,
        heldout,
        {
            "dense": {},
            "alpha_1": dict.fromkeys(layers, 1.0),
            "alpha_0": dict.fromkeys(layers, 0.0),
            "greedy": alphas_after(steps[: len(layers)]),
            "pruned": alphas_after(steps),  # last, so that the model is saved with these
        },
        means,
    )
    show_status("")


def run_search(
    model: Transformer,
    windows: Sequence[Window],
    layers: list[int],
    grid: list[float],
    method: str,
    sweeps: int,
    means: Means,
    report: dict,
    state: Path,
) -> None:
    """Search, or go on with the search that `report` is of. After every layer the report is in the file `state`."""
    replace_json(state, report)
    if "dense_ppl" not in report:
        report["dense_ppl"] = perplexity(model, windows, show_share("perplexity before pruning")).ppl
        show_status("")
        replace_json(state, report)
    done = steps_of(report)
    if done:
        print(f"going on: {len(done)} of {len(layers) * (1 + sweeps)} layers were done before", file=sys.stderr)
    print_steps(report)
    order = (layers * (1 + sweeps))[len(done) :]
    progress = Progress(model.config, windows, layers, order, count_trials(method, grid))

    def on_step(step: Step) -> None:
        report["steps"].append(asdict(step))
        replace_json(state, report)
        show_status("")
        print_step(step, report["dense_ppl"])
        progress.end_layer(step.layer)

    search(
        model, windows, layers, grid,
        method=method, sweeps=sweeps, means=means, done=done, on_trial=progress.show, on_step=on_step,
    )  # fmt: skip
    show_status("")


def count_trials(method: str, grid: Sequence[float]) -> int:
    """How many alphas a method tries at most, found by letting it search where perplexity is alpha itself."""
    tried = set()
    METHODS[method](grid, lambda alpha: tried.add(alpha) or alpha)
    return len(tried)


class Progress:
    """How far a search is and how long the rest of it will take, on stderr: in a terminal after every trial, elsewhere
    after every layer. The estimate goes by counted operations, since trials grow dearer as the search moves down."""

    def __init__(
        self, config: ModelConfig, windows: Sequence[Window], layers: Sequence[int], order: Sequence[int], trials: int
    ):
        """`order`: the layers still to search, of `layers`; `trials`: alphas tried for each, at most."""
        tokens, scored = len(windows[0].ids), len(windows[0].targets)
        pruned = dict.fromkeys(layers, 1.0)  # any alpha above 0 costs the same
        self.trials = trials
        self.trial_work = {layer: cost.trial_flops(config, layer, tokens, scored, pruned) for layer in order}
        self.done = sum(cost.layer_flops(config, layer, tokens, None) for layer in range(min(layers)))
        self.total = self.done + trials * sum(self.trial_work[layer] for layer in order)
        self.started = time.perf_counter()

    def left(self, done: float) -> str:
        seconds = (time.perf_counter() - self.started) * (self.total / done - 1)
        return f"about {clock(seconds)} of the search left"

    def show(self, layer: int, tried: int) -> None:
        left = self.left(self.done + tried * self.trial_work[layer])
        show_status(f"layer {layer} · {tried} of {self.trials} alphas tried · {left}")

    def end_layer(self, layer: int) -> None:
        self.done += self.trials * self.trial_work[layer]
        if not sys.stderr.isatty():
            print(f"layer {layer} done · {self.left(self.done)}", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------- printing


def window_facts(file: str, windows: Sequence[Window]) -> dict:
    """What the report says of a text."""
    return {
        "file": Path(file).name,
        "windows": len(windows),
        "tokens_scored": sum(len(window.targets) for window in windows),
    }


def steps_of(report: dict) -> list[Step]:
    """The report's steps, which JSON keeps as plain dicts and lists."""
    return [Step(**step | {"tried": tuple(map(tuple, step["tried"]))}) for step in report["steps"]]


def print_steps(report: dict) -> None:
    print(f"dense    ppl {report['dense_ppl']:.4f}", flush=True)
    for step in steps_of(report):
        print_step(step, report["dense_ppl"])


def print_step(step: Step, dense: float) -> None:
    print(
        f"layer {step.layer:>2} | alpha {step.alpha:<4g} | ppl {step.ppl:9.4f} ({step.ppl / dense - 1:+7.1%}) | "
        f"{len(step.tried)} tried | {clock(step.seconds)}",
        flush=True,
    )


def ppl_text(ppl: float | None) -> str:
    return "not finite" if ppl is None else f"{ppl:.4f}"


def print_summary(report: dict, heldout_file: str, config: ModelConfig) -> None:
    steps, ppl = steps_of(report), report["heldout_ppl"]
    alphas = alphas_after(steps)
    tokens = min(65536, config.max_position_embeddings)
    constants = len(alphas) * config.hidden_size if report["identity"]["bias"] else 0
    parameters = (cost.linear_parameters(config, alphas) + constants) / cost.linear_parameters(config) - 1
    cache = cost.kv_bytes(config, 1, alphas) / cost.kv_bytes(config, 1) - 1
    prefill = cost.prefill_flops(config, tokens, alphas) / cost.prefill_flops(config, tokens) - 1
    print(f"heldout  {heldout_file} · dense {ppl_text(ppl['dense'])} -> pruned {ppl_text(ppl['pruned'])}")
    likewise = ", each with its constant" if report["identity"]["bias"] else ""
    print(
        f"         same layers at alpha 1: {ppl_text(ppl['alpha_1'])}, at alpha 0: {ppl_text(ppl['alpha_0'])}{likewise}"
    )
    if len(steps) > len(alphas):
        print(f"         pruned, before the sweeps: {ppl_text(ppl['greedy'])}")
    print(f"cost     linear parameters {parameters:+.2%} · KV cache {cache:+.1%}")
    print(f"         FLOPs of a prefill of {tokens:,} tokens {prefill:+.1%}")


def print_continuations(
    model: Transformer, setup: Setup, prompt: Tensor, alphas: Mapping[int, float], means: Means
) -> None:
    hidden = {*setup.config.eos_ids, setup.tokenizer.bos_id}
    for name, variant in (("dense", {}), ("pruned", alphas)):
        set_alphas(model, variant, means)
        ids = model.generate(prompt, PROMPT_TOKENS, setup.config.eos_ids)[0].tolist()
        text = setup.tokenizer.decode([i for i in ids if i not in hidden])
        print(f"{name:8} " + text.replace("\n", "\n         "))


if __name__ == "__main__":
    sys.exit(main())
