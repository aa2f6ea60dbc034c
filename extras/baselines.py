"""HARP beside its competitors and its own ablations: one model, one calibration text, the same measures.

    python -m extras.baselines --k 8 --tests data/heldout.txt another.txt

Rows are kept in <out>/k8.json, one at a time, so that an interrupted run goes on where it was; tables and pictures are
made of all the rows there are. Whatever is chosen (layers, alphas, heads, channels) is chosen on the calibration text;
the tests are only ever measured on.
"""

import argparse
import copy
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

import cost
from checkpoint import UserError, read_json
from eval_ppl import (
    Window, add_run_arguments, clock, describe_windows, exit_code, own_text, prepare, read_windows,
)  # fmt: skip
from extras import layer_scores, measures, pruners
from extras.baselines_report import write_report
from extras.run_state import differences, file_hash, hold, replace_json, run_identity
from extras.timing import last_logits, pruned_twin, random_ids, say, take_turns
from harp import (
    NO_CONSTANTS, Means, alphas_after, attention_means, parse_grid, perplexities, search, set_alphas,
)  # fmt: skip
from model import Transformer
from tokenizer import read_text

GRID = parse_grid("0:1:0.1")
SEARCH_WINDOWS = 1  # of all searches here, by Fibonacci: there are some twenty of them
SEEDS = 5  # random sets of layers
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 64
MLP_RATIO = 0.0186  # of the MLP's parameters: what the authors' command removes with FLAP beside HARP, for Llama
PREFILL_TOKENS = 2048
CORE_ONLY_UP_TO = 4  # layers; beyond, all rows
TRULY_GREEDY_UP_TO = 4  # layers; it tries every layer again for each

Alphas = dict[int, float]


@dataclass
class Study:
    """The dense model, the texts, and what several rows share. Its model is dense again after every method."""

    dense: Transformer
    calibration: list[Window]
    tests: dict[str, list[Window]]  # by file name
    ids: list[int]  # of the first test text: the material of the other measures
    bos: list[int]  # what comes before a sequence
    k: int
    means: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # `harp.Means` of the layers seen so far
    alphas: dict[tuple, Alphas] = field(default_factory=dict)  # what searches have found

    @property
    def top(self) -> list[int]:
        return list(range(self.dense.config.n_layers - self.k, self.dense.config.n_layers))

    @property
    def short(self) -> list[Window]:
        """The windows of searches."""
        return self.calibration[:SEARCH_WINDOWS]

    @cached_property
    def facts(self) -> list[layer_scores.LayerFacts]:
        return layer_scores.layer_facts(self.dense, self.calibration)

    @cached_property
    def costs(self) -> dict[int, tuple[float, float]]:
        return layer_scores.layer_costs(self.dense, self.calibration)

    @cached_property
    def fisher(self) -> list[tuple[float, float]]:
        pieces = [Window(ids, 1) for ids in pruners.pieces(self.calibration, 10, 64)]
        return layer_scores.fisher_scores(self.dense, pieces)

    @cached_property
    def written(self) -> measures.Written:
        prompts = measures.passages(self.ids, PROMPTS, PROMPT_TOKENS)
        return measures.write(self.dense, prompts, NEW_TOKENS, self.bos)

    def means_of(self, layers: Sequence[int]) -> Means:
        missing = [layer for layer in layers if layer not in self.means]
        self.means |= attention_means(self.dense, self.calibration, missing)
        return {layer: self.means[layer] for layer in layers}

    def searched(self, layers: Sequence[int], bias: bool = False) -> Alphas:
        """The alphas that `harp.search` gives these layers. The same search for every set."""
        key = (*sorted(layers), bias)
        if key not in self.alphas:
            means = self.means_of(layers) if bias else NO_CONSTANTS
            steps = search(self.dense, self.short, layers, GRID, method="fibonacci", means=means)
            set_alphas(self.dense, {})
            self.alphas[key] = alphas_after(steps)
        return self.alphas[key]

    @property
    def budget(self) -> int:
        """Parameters that HARP with searched alphas removes from the top layers, folded: what every pruner may
        remove."""
        config = self.dense.config
        return cost.linear_parameters(config) - cost.linear_parameters(config, self.searched(self.top))

    @property
    def unfolded_budget(self) -> int:
        """The same as the paper counts it, without our folding."""
        config = self.dense.config
        pruned = cost.linear_parameters(config, self.searched(self.top), folded=False)
        return cost.linear_parameters(config) - pruned

    @cached_property
    def scores(self) -> dict[str, list[float]]:
        """Every score by layer, low where the score calls a layer redundant."""
        facts = self.facts
        return {
            "pruned alone": [ppl for _, ppl in self.costs.values()],
            "1 - cos(h, h + A)": [f.attention_distance for f in facts],
            "|A| / |h|": [f.share for f in facts],
            "least-squares residual": [f.residual for f in facts],
            "Block Importance": [f.block_importance for f in facts],
            "Sim(H), high": [-f.similarity for f in facts],
            "entropy, high": [-f.entropy for f in facts],
            "Fisher of q and k": [without for without, _ in self.fisher],
            "Fisher of V·O": [with_vo for _, with_vo in self.fisher],
        }

    def lowest(self, score: str) -> list[int]:
        """The k layers that a score would prune."""
        values = self.scores[score]
        return sorted(range(len(values)), key=values.__getitem__)[: self.k]


# --------------------------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    """One way to prune. `make` gives the model and the alphas of its HARP layers, if it has any."""

    group: str
    name: str
    make: Callable[[], tuple[Transformer, Alphas]]
    core: bool = False  # also for a small k
    only_perplexity: bool = False


def all_rows(study: Study) -> list[Row]:
    rows = [
        Row("reference", "dense", lambda: (study.dense, {}), core=True),
        *alpha_rows(study),
        *layer_rows(study),
        *pruner_rows(study),
    ]
    return [row for row in rows if row.core or study.k > CORE_ONLY_UP_TO]


def harp(study: Study, alphas: Callable[[], Alphas], bias: bool = False) -> tuple[Transformer, Alphas]:
    chosen = alphas()
    return pruned_twin(study.dense, chosen, study.means_of(list(chosen)) if bias else NO_CONSTANTS), chosen


def alpha_rows(study: Study) -> Iterator[Row]:
    """The top k layers, with alphas found in different ways."""
    top = study.top

    def shared() -> Alphas:
        variants = {f"{alpha:g}": dict.fromkeys(top, alpha) for alpha in GRID}
        found = perplexities(study.dense, study.short, variants)
        set_alphas(study.dense, {})
        return variants[min(found, key=lambda name: found[name] or math.inf)]

    def row(name: str, alphas: Callable[[], Alphas], bias: bool = False, core: bool = False) -> Row:
        return Row("top layers", name, partial(harp, study, alphas, bias), core)

    least_squares = partial(fixed_alphas, study, top, "ls_alpha")
    yield row("searched", lambda: study.searched(top), core=True)
    yield row("searched with constants", lambda: study.searched(top, bias=True), bias=True, core=True)
    yield row("least squares", least_squares, core=True)
    yield row("least squares, then constants", least_squares, bias=True, core=True)
    yield row("norm match", partial(fixed_alphas, study, top, "norm_alpha"))
    yield row("one shared alpha", shared)
    yield row("alpha 1", lambda: dict.fromkeys(top, 1.0))
    yield row("alpha 0", lambda: dict.fromkeys(top, 0.0))


def fixed_alphas(study: Study, layers: Sequence[int], fact: str) -> Alphas:
    return {layer: getattr(study.facts[layer], fact) for layer in layers}


def layer_rows(study: Study) -> Iterator[Row]:
    """Other k layers, with alphas from the same search."""
    n_layers, k = study.dense.config.n_layers, study.k

    def row(name: str, layers: Callable[[], Sequence[int]], bias: bool = False, **options) -> Row:
        make = lambda: harp(study, partial(study.searched, layers(), bias), bias)  # noqa: E731
        return Row("other layers", name, make, **options)

    def greedy() -> list[int]:
        """One layer after another: always the one that costs least beside those that are pruned already."""
        alphas: Alphas = {}
        for _ in range(k):
            set_alphas(study.dense, alphas)
            rest = [layer for layer in range(n_layers) if layer not in alphas]
            costs = layer_scores.layer_costs(study.dense, study.short, rest)
            (layer,) = layer_scores.cheapest(costs, 1)
            alphas[layer] = costs[layer][0]
        set_alphas(study.dense, {})
        return list(alphas)

    yield row("bottom, searched", lambda: range(k))
    yield Row("other layers", "bottom, alpha 1", lambda: harp(study, lambda: dict.fromkeys(range(k), 1.0)))
    for seed in range(SEEDS):
        layers = torch.randperm(n_layers, generator=torch.Generator().manual_seed(seed))[:k].tolist()
        yield row(f"random, seed {seed}", lambda layers=layers: layers, only_perplexity=True)
    yield row("cheapest alone", lambda: study.lowest("pruned alone"), core=True)
    yield row("cheapest alone, with constants", lambda: study.lowest("pruned alone"), bias=True, core=True)
    if k <= TRULY_GREEDY_UP_TO:
        yield row("truly greedy", greedy, core=True)
    for score in ("1 - cos(h, h + A)", "|A| / |h|", "least-squares residual", "Block Importance", "Sim(H), high",
                  "entropy, high", "Fisher of q and k", "Fisher of V·O"):  # fmt: skip
        yield row(f"by {score}", partial(study.lowest, score), only_perplexity=True)


def pruner_rows(study: Study) -> Iterator[Row]:
    """Structured pruners that remove as many parameters as HARP does from the top k layers."""
    config = study.dense.config
    attention = {"kinds": (pruners.ATTENTION,)}
    whole_mlp = cost.linear_parameters(config, dict.fromkeys(range(config.n_layers), 0.0))
    one_attention = cost.layer_parameters(config, None) - cost.layer_parameters(config, 0.0)

    def row(
        name: str,
        method: Callable[..., None],
        budget: Callable[[], int] = lambda: study.budget,
        alphas: Callable[[], Alphas] = dict,
        core: bool = False,
        **options,
    ) -> Row:
        def make() -> tuple[Transformer, Alphas]:
            model, chosen = copy.deepcopy(study.dense), alphas()
            set_alphas(model, chosen)
            method(model, study.calibration, budget(), **options)
            return model, chosen

        return Row("pruners", name, make, core)

    yield row("Mag-sp, query heads", pruners.mag_sp, **attention, heads="query")
    yield row("Mag-sp, own mix", pruners.mag_sp)
    yield row("Wanda-sp, query heads", pruners.wanda_sp, **attention, heads="query")
    yield row("Wanda-sp, own mix", pruners.wanda_sp)
    yield row("FLAP, key/value heads", pruners.flap, **attention, core=True)
    yield row("FLAP, own mix", pruners.flap, core=True)
    yield row("FLAP, own mix, attention scores squared", pruners.flap, square_attention=True)
    yield row("FLAP, own mix, unfolded budget", pruners.flap, lambda: study.unfolded_budget)
    yield row("LLM-Pruner, ends protected", pruners.llm_pruner)
    yield row("LLM-Pruner, unprotected", pruners.llm_pruner, protect=False)
    yield row("LLM-Pruner, key/value heads", pruners.llm_pruner, **attention, protect=False)
    yield row("Attention-Drop, same parameters", pruners.attention_drop, core=True)
    yield row("Attention-Drop, k layers", pruners.attention_drop, lambda: study.k * one_attention, core=True)
    yield row(
        f"top layers searched + FLAP on {MLP_RATIO:.2%} of the MLP", pruners.harp_flap,
        lambda: round(MLP_RATIO * whole_mlp), lambda: study.searched(study.top),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- measuring


def measure(study: Study, model: Transformer, alphas: Alphas, only_perplexity: bool) -> dict:
    """All measures of one pruned model, as JSON can keep them."""
    config = study.dense.config
    parts = {name: measures.window_losses(model, windows) for name, windows in study.tests.items()}
    result = {
        "nll": {name: [part.nll for part in some] for name, some in parts.items()},
        "tokens": {name: [part.tokens for part in some] for name, some in parts.items()},
        "linear": pruners.linear_parameters(model),
        "kv": pruners.model_kv_values(model),
        "flops": pruners.model_prefill_flops(model, 8192),
    }
    if alphas:
        folding = cost.linear_parameters(config, alphas, folded=False) - cost.linear_parameters(config, alphas)
        result["unfolded"] = result["linear"] + folding
    return result if only_perplexity else result | behaviour(study, model)


def behaviour(study: Study, model: Transformer) -> dict:
    """What perplexity hides. By position means: in each quarter of the continuations."""
    agree, divergence = measures.divergence(model, study.written)
    own_nll, loops = measures.own_text(model, study.dense, study.written)
    return {
        "agreement": quarters(agree),
        "divergence": quarters(divergence),
        "own_nll": quarters(own_nll),
        "loops": quarters(loops),
        "induction": measures.induction_accuracy(model, bos=study.bos),
        "repeated": measures.repeated_text_loss(model, study.ids, bos=study.bos),
        "choice": measures.multiple_choice_accuracy(model, study.ids, bos=study.bos),
    }


def quarters(values: Tensor) -> list[float]:
    """(B, T) -> the mean of each quarter of T."""
    return [part.mean().item() for part in values.float().tensor_split(4, dim=1)]


def noise_floor(study: Study) -> dict:
    """The dense model in another dtype beside itself: a smaller divergence than this means nothing."""
    stored = study.dense.norm.weight.dtype
    other = copy.deepcopy(study.dense).to(torch.bfloat16 if stored == torch.float32 else torch.float32)
    agree, divergence = measures.divergence(other, study.written)
    return {"agreement": quarters(agree), "divergence": quarters(divergence)}


# -------------------------------------------------------------------------------------------------- the command line


def measure_rows(study: Study, file: Path, state: dict) -> None:
    """Measure every row that `state` lacks, and put each into `file` when it is done."""
    missing = [row for row in all_rows(study) if row_key(row) not in state["rows"]]
    for number, row in enumerate(missing, start=1):
        started = time.perf_counter()
        model, alphas = row.make()
        result = measure(study, model, alphas, row.only_perplexity)
        if model is study.dense:
            result["noise_floor"] = noise_floor(study)
        seconds = time.perf_counter() - started
        listed = {str(layer): alphas[layer] for layer in sorted(alphas, reverse=True)}
        about = {"group": row.group, "name": row.name, "alphas": listed, "seconds": seconds}
        state["rows"][row_key(row)] = about | result
        replace_json(file, state)
        say(f"{number} of {len(missing)} · {row_key(row)} · {clock(seconds)}")


def row_key(row: Row) -> str:
    return f"{row.group}: {row.name}"


def time_prefills(study: Study, file: Path, state: dict) -> None:
    """Seconds of a dense prefill over each row's, by turns, once for every number of operations."""
    measured = {some["flops"] for some in state["rows"].values() if "prefill" in some}
    ids = random_ids(study.dense.config, PREFILL_TOKENS).to(study.dense.device)
    for row in all_rows(study):
        kept = state["rows"][row_key(row)]
        if kept["flops"] in measured or row.only_perplexity or row.name == "dense":
            continue
        say(f"prefill of {PREFILL_TOKENS:,} tokens · {row_key(row)}")
        alphas = {int(layer): alpha for layer, alpha in kept["alphas"].items()}
        model = harp(study, lambda alphas=alphas: alphas)[0] if row.group != "pruners" else row.make()[0]
        runs = {"dense": partial(last_logits, study.dense, ids), "pruned": partial(last_logits, model, ids)}
        seconds = take_turns(runs, 3, study.dense.device)
        kept["prefill"] = seconds["dense"] / seconds["pruned"]
        measured.add(kept["flops"])
        replace_json(file, state)


def layer_table(study: Study) -> dict:
    """Every score of every layer, and what a look at the layer shows, for JSON."""
    return {"scores": study.scores, "facts": [vars(fact) for fact in study.facts], "alone": list(study.costs.values())}


def remember(study: Study, layers: dict) -> None:
    """Take the layers' scores from an earlier run."""
    study.scores = layers["scores"]
    study.facts = [layer_scores.LayerFacts(**fact) for fact in layers["facts"]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="baselines.py", description="HARP beside its competitors and its ablations.")
    text = add_run_arguments(parser, "calibration.txt", windows="4", ctx="512")
    text.add_argument("--tests", nargs="+", default=[own_text("heldout.txt")], metavar="FILE",
                      help="texts to measure on, never to choose by (default: data/heldout.txt)")  # fmt: skip
    text.add_argument("--test-windows", type=int, default=6, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--k", type=int, default=8, metavar="N", help=f"layers to prune (default: %(default)s; up to "
                        f"{CORE_ONLY_UP_TO} the core rows only)")  # fmt: skip
    parser.add_argument("--prefill", action="store_true", help="afterwards time prefills; nothing else should run")
    parser.add_argument("--out", type=Path, default=Path("out/baselines"), metavar="DIR", help="default: %(default)s")
    parser.set_defaults(ctx=512, windows=4)
    args = parser.parse_args(argv)
    return exit_code("baselines.py", lambda: compare(args), "; the same command goes on from the last finished row")


def compare(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("the pictures need matplotlib: pip install matplotlib")
    setup = prepare(args.ckpt, args.device, args.dtype, args.ctx)
    n_layers, tokenizer = setup.config.n_layers, setup.tokenizer
    if not 1 <= args.k < n_layers:
        raise UserError(f"--k {args.k} is out of range: with this model it takes 1 to {n_layers - 1}")
    if setup.checkpoint.config["harp"]:
        raise UserError(f"{setup.checkpoint.path} is pruned already: take the checkpoint that it was made from")
    calibration = read_windows(setup, args.text, args.windows)
    pruners.pieces(calibration, 10, 64)  # LLM-Pruner's: refuse a short text now, not in an hour
    if args.test_windows < 2:
        raise UserError("--test-windows takes a whole number above 1: a single window tells nothing of the error")
    tests = {Path(file).name: read_windows(setup, file, args.test_windows) for file in args.tests}
    if len(tests) < len(args.tests):
        raise UserError("--tests names two files alike; rename one")
    if min(map(len, tests.values())) < 2:
        raise UserError("every test text must have two windows at least, or nothing is known of the error")
    if file_hash(args.text) in map(file_hash, args.tests):
        raise UserError(f"{args.text} is the calibration text; a test on it would flatter whatever was chosen by it")
    identity = run_identity(
        setup, args.text, args.tests[0], k=args.k, tests=[file_hash(file) for file in args.tests],
        windows=len(calibration), test_windows=args.test_windows, search_windows=SEARCH_WINDOWS, grid=GRID,
        continuations=[PROMPTS, PROMPT_TOKENS, NEW_TOKENS],
    )  # fmt: skip
    ids = tokenizer.encode(read_text(args.tests[0]))[: args.test_windows * setup.ctx]
    bos = [] if tokenizer.bos_rule == "none" else [tokenizer.bos_id]
    file = args.out / f"k{args.k}.json"
    with hold(args.out):
        about = [
            setup.description.partition("\n")[0],
            describe_windows(args.text, calibration, setup.ctx, tokenizer.bos_rule),
        ]
        about += [describe_windows(name, some, setup.ctx, tokenizer.bos_rule) for name, some in tests.items()]
        state = {"identity": identity, "model": setup.checkpoint.path.name, "about": about, "rows": {}}
        if file.exists():
            state = read_json(file)
            if differing := differences(state.get("identity", {}), identity):
                raise UserError(f"{file} holds rows that differ in {differing}; name another folder with --out")
        print(setup.description, flush=True)
        study = Study(setup.load(), calibration, tests, ids, bos, args.k)
        if "layers" in state:
            remember(study, state["layers"])
        else:
            state["layers"] = layer_table(study)
            replace_json(file, state)
        measure_rows(study, file, state)
        if args.prefill:
            time_prefills(study, file, state)
    write_report(args.out)


if __name__ == "__main__":
    sys.exit(main())
