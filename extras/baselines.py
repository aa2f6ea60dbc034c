"""HARP beside its competitors and its own ablations: one model, one calibration text, the same measures.

    python -m extras.baselines --k 8 --tests data/heldout.txt another.txt

Rows are kept in <out>/k8.json, one at a time, so that an interrupted run goes on where it was; tables and pictures are
made of all the rows there are. Whatever is chosen (layers, alphas, heads, channels) is chosen on the calibration text;
the tests are only ever measured on.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import cost
from checkpoint import UserError, read_json
from eval_ppl import Window, add_run_arguments, clock, exit_code, own_text, prepare, read_windows
from extras import layer_scores, measures, pruners
from extras.baselines_report import write_report
from extras.run_state import file_hash, hold, replace_json, run_identity
from extras.timing import last_logits, pruned_twin, random_ids, take_turns
from harp import (
    NO_CONSTANTS, Means, alphas_after, attention_means, heldout_perplexities, parse_grid, search, set_alphas,
)  # fmt: skip
from model import Transformer

GRID = parse_grid("0:1:0.1")
SEARCH_WINDOWS = 1  # of all searches here, by Fibonacci: there are some twenty of them
SEEDS = 5  # random sets of layers
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 64
MLP_RATIO = 0.0186  # of the MLP's parameters: what the authors' command removes with FLAP beside HARP, for Llama
PREFILL_TOKENS = 2048
CORE_ONLY_UP_TO = 4  # layers; beyond, all rows

Alphas = dict[int, float]


@dataclass
class Study:
    """The dense model, the texts, and what several rows share. Its model is dense again after every method."""

    dense: Transformer
    calibration: list[Window]
    tests: dict[str, list[Window]]  # by file name
    ids: list[int]  # of the first test text: the material of the other measures
    k: int
    found: dict[str, object] = field(default_factory=dict)  # what has been computed already

    def once(self, name: str, compute: Callable[[], object]) -> object:
        if name not in self.found:
            self.found[name] = compute()
        return self.found[name]

    @property
    def top(self) -> list[int]:
        return list(range(self.dense.config.n_layers - self.k, self.dense.config.n_layers))

    @property
    def short(self) -> list[Window]:
        """The windows of searches."""
        return self.calibration[:SEARCH_WINDOWS]

    @property
    def facts(self) -> list[layer_scores.LayerFacts]:
        return self.once("facts", lambda: layer_scores.layer_facts(self.dense, self.calibration))

    @property
    def costs(self) -> dict[int, tuple[float, float]]:
        return self.once("costs", lambda: layer_scores.layer_costs(self.dense, self.calibration))

    @property
    def fisher(self) -> list[tuple[float, float]]:
        pieces = [Window(ids, 1) for ids in pruners.pieces(self.calibration, 10, 64)]
        return self.once("fisher", lambda: layer_scores.fisher_scores(self.dense, pieces))

    @property
    def written(self) -> measures.Written:
        prompts = measures.passages(self.ids, PROMPTS, PROMPT_TOKENS).to(self.dense.device)
        return self.once("written", lambda: measures.write(self.dense, prompts, NEW_TOKENS))

    def means(self, layers: Sequence[int]) -> Means:
        return self.once(f"means {sorted(layers)}", lambda: attention_means(self.dense, self.calibration, layers))

    def searched(self, layers: Sequence[int], bias: bool = False) -> Alphas:
        """The alphas that `harp.search` gives these layers. The same search for every set."""
        means = self.means(layers) if bias else NO_CONSTANTS

        def compute() -> Alphas:
            steps = search(self.dense, self.short, layers, GRID, method="fibonacci", means=means)
            set_alphas(self.dense, {})
            return alphas_after(steps)

        return self.once(f"searched {sorted(layers)} {bias}", compute)

    @property
    def budget(self) -> int:
        """Parameters that HARP with searched alphas removes from the top layers: what every pruner may remove."""
        config = self.dense.config
        return cost.linear_parameters(config) - cost.linear_parameters(config, self.searched(self.top))

    def scores(self) -> dict[str, list[float]]:
        """Every score by layer, low where the score calls a layer redundant."""
        facts, fisher = self.facts, self.fisher
        return {
            "pruned alone": [ppl for _, ppl in self.costs.values()],
            "1 - cos(h, h + A)": [f.attention_distance for f in facts],
            "|A| / |h|": [f.share for f in facts],
            "least-squares residual": [f.residual for f in facts],
            "Block Importance": [f.block_importance for f in facts],
            "Sim(H), high": [-f.similarity for f in facts],
            "entropy, high": [-f.entropy for f in facts],
            "Fisher of q and k": [without for without, _ in fisher],
            "Fisher of V·O": [with_vo for _, with_vo in fisher],
        }


# --------------------------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    """One way to prune. `make` gives the model and the alphas of its HARP layers, if it has any."""

    group: str
    name: str
    make: Callable[[], tuple[Transformer, Alphas]]
    core: bool = False  # also for a second, smaller k
    only_perplexity: bool = False


def all_rows(study: Study) -> list[Row]:
    return [
        Row("reference", "dense", lambda: (study.dense, {}), core=True),
        *alpha_rows(study),
        *layer_rows(study),
        *pruner_rows(study),
    ]


def harp(study: Study, alphas: Callable[[], Alphas], bias: bool = False) -> tuple[Transformer, Alphas]:
    chosen = alphas()
    return pruned_twin(study.dense, chosen, study.means(list(chosen)) if bias else NO_CONSTANTS), chosen


def alpha_rows(study: Study) -> Iterator[Row]:
    """The top k layers, with alphas found in different ways."""
    top = study.top

    def shared() -> Alphas:
        variants = {f"{alpha:g}": dict.fromkeys(top, alpha) for alpha in GRID}
        found = heldout_perplexities(study.dense, study.short, variants)
        set_alphas(study.dense, {})
        return variants[min(found, key=lambda name: found[name] or math.inf)]

    ways = {
        "searched (the paper)": lambda: study.searched(top),
        "searched + constant": lambda: study.searched(top, bias=True),
        "least squares": lambda: {layer: study.facts[layer].ls_alpha for layer in top},
        "least squares + constant": lambda: {layer: study.facts[layer].ls_alpha for layer in top},
        "norm match": lambda: {layer: study.facts[layer].norm_alpha for layer in top},
        "one shared alpha": shared,
        "alpha 1": lambda: dict.fromkeys(top, 1.0),
        "alpha 0": lambda: dict.fromkeys(top, 0.0),
    }
    for name, alphas in ways.items():
        make = partial(harp, study, alphas, bias="constant" in name)
        yield Row("alphas of the top layers", name, make, core=name in list(ways)[:4])


def layer_rows(study: Study) -> Iterator[Row]:
    """Other k layers, with alphas from the same search."""
    n_layers, k = study.dense.config.n_layers, study.k

    def searched(layers: Callable[[], Sequence[int]], bias: bool = False) -> Callable[[], tuple[Transformer, Alphas]]:
        return lambda: harp(study, partial(study.searched, layers(), bias), bias)

    def lowest(score: str) -> list[int]:
        values = study.scores()[score]
        return sorted(range(n_layers), key=values.__getitem__)[:k]

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

    group = "which layers"
    yield Row(group, "bottom, searched", searched(lambda: range(k)))
    yield Row(group, "bottom, alpha 1", lambda: harp(study, lambda: dict.fromkeys(range(k), 1.0)))
    for seed in range(SEEDS):
        layers = torch.randperm(n_layers, generator=torch.Generator().manual_seed(seed))[:k].tolist()
        yield Row(group, f"random, seed {seed}", searched(lambda layers=layers: layers), only_perplexity=True)
    yield Row(group, "pruned alone (--select cost)", searched(partial(lowest, "pruned alone")), core=True)
    yield Row(group, "the same + constant (--bias)", searched(partial(lowest, "pruned alone"), bias=True), core=True)
    if k <= 4:
        yield Row(group, "one after another, truly greedy", searched(greedy), core=True)
    for score in study.scores():
        if score != "pruned alone":
            yield Row(group, score, searched(partial(lowest, score)), only_perplexity=True)


def pruner_rows(study: Study) -> Iterator[Row]:
    """Structured pruners that remove as many parameters as HARP does from the top k layers."""
    attention = (pruners.ATTENTION,)

    def shrunk(
        method: Callable[..., None], budget: Callable[[], int], alphas: Alphas, **options
    ) -> tuple[Transformer, Alphas]:
        model = copy.deepcopy(study.dense)
        set_alphas(model, alphas)
        method(model, study.calibration, budget(), **options)
        return model, alphas

    def row(name: str, method: Callable[..., None], core: bool = False, **options) -> Row:
        return Row("pruners", name, lambda: shrunk(method, lambda: study.budget, {}, **options), core)

    yield row("Mag-sp, heads", pruners.mag_sp, kinds=attention, heads="query")
    yield row("Mag-sp, own mix", pruners.mag_sp)
    yield row("Wanda-sp, heads", pruners.wanda_sp, kinds=attention, heads="query")
    yield row("Wanda-sp, own mix", pruners.wanda_sp)
    yield row("FLAP, heads", pruners.flap, kinds=attention, core=True)
    yield row("FLAP, own mix", pruners.flap, core=True)
    yield row("LLM-Pruner, ends protected", pruners.llm_pruner)
    yield row("LLM-Pruner, unprotected", pruners.llm_pruner, protect=False)
    yield row("Attention-Drop, same parameters", pruners.attention_drop, core=True)

    def drop_k() -> tuple[Transformer, Alphas]:
        values = study.scores()["1 - cos(h, h + A)"]
        layers = sorted(range(len(values)), key=values.__getitem__)[: study.k]
        return harp(study, lambda: dict.fromkeys(layers, 0.0))

    yield Row("pruners", "Attention-Drop, k layers", drop_k, core=True)

    def with_mlp() -> tuple[Transformer, Alphas]:
        mlp = cost.linear_parameters(study.dense.config, dict.fromkeys(range(study.dense.config.n_layers), 0.0))
        return shrunk(pruners.harp_flap, lambda: round(MLP_RATIO * mlp), study.searched(study.top))

    yield Row("pruners", f"HARP + FLAP on {MLP_RATIO:.2%} of the MLP", with_mlp)


# --------------------------------------------------------------------------------------------------------- measuring


def measure(study: Study, model: Transformer, row: Row) -> dict:
    """All measures of one pruned model, as JSON can keep them."""
    parts = {name: measures.window_losses(model, windows) for name, windows in study.tests.items()}
    result = {
        "nll": {name: [part.nll for part in some] for name, some in parts.items()},
        "tokens": {name: [part.tokens for part in some] for name, some in parts.items()},
        "parameters": pruners.model_parameters(model),
        "linear": pruners.linear_parameters(model),
        "kv": pruners.model_kv_values(model),
        "flops": pruners.model_prefill_flops(model, 8192),
    }
    return result if row.only_perplexity else result | behaviour(study, model)


def behaviour(study: Study, model: Transformer) -> dict:
    """What perplexity hides. By position means: in each quarter of the continuations."""
    agree, divergence = measures.divergence(model, study.written)
    own_nll, loops = measures.own_text(model, study.dense, study.written)
    return {
        "agreement": quarters(agree),
        "divergence": quarters(divergence),
        "own_nll": quarters(own_nll),
        "loops": quarters(loops),
        "induction": measures.induction_accuracy(model),
        "repeated": measures.repeated_text_loss(model, study.ids),
        "choice": measures.multiple_choice_accuracy(model, study.ids),
    }


def quarters(values: Tensor) -> list[float]:
    """(B, T) -> the mean of each quarter of T."""
    return [part.mean().item() for part in values.float().tensor_split(4, dim=1)]


def noise_floor(study: Study) -> dict:
    """The dense model in bfloat16 beside itself: a smaller divergence than this means nothing."""
    agree, divergence = measures.divergence(copy.deepcopy(study.dense).to(torch.bfloat16), study.written)
    return {"agreement": quarters(agree), "divergence": quarters(divergence)}


def prefill_ratio(study: Study, model: Transformer) -> float:
    """Measured seconds of a dense prefill over this model's, by turns."""
    ids = random_ids(study.dense.config, PREFILL_TOKENS).to(study.dense.device)
    runs = {"dense": partial(last_logits, study.dense, ids), "pruned": partial(last_logits, model, ids)}
    seconds = take_turns(runs, 2, study.dense.device, warm_up=0)  # what was measured before has warmed them up
    return seconds["dense"] / seconds["pruned"]


# -------------------------------------------------------------------------------------------------- the command line


def run(study: Study, file: Path, state: dict) -> None:
    """Measure every row that `state` lacks, and put each into `file` when it is done."""
    rows = [row for row in all_rows(study) if row.core or study.k > CORE_ONLY_UP_TO]
    missing = [row for row in rows if f"{row.group}: {row.name}" not in state["rows"]]
    for number, row in enumerate(missing, start=1):
        started = time.perf_counter()
        model, alphas = row.make()
        result = measure(study, model, row)
        if row.name == "dense":
            result["noise_floor"] = noise_floor(study)
        shapes = [(other["parameters"], other["kv"]) for other in state["rows"].values() if "prefill" in other]
        if model is not study.dense and (result["parameters"], result["kv"]) not in shapes and not row.only_perplexity:
            result["prefill"] = prefill_ratio(study, model)
        alphas = {str(layer): alphas[layer] for layer in sorted(alphas, reverse=True)}
        seconds = time.perf_counter() - started
        about = {"group": row.group, "name": row.name, "alphas": alphas, "seconds": seconds}
        state["rows"][f"{row.group}: {row.name}"] = about | result
        replace_json(file, state)
        print(f"{number} of {len(missing)} · {row.group}: {row.name} · {clock(seconds)}", file=sys.stderr, flush=True)


def layer_table(study: Study) -> dict:
    """Every score of every layer, and what a look at the layer shows, for JSON."""
    facts = [vars(fact) for fact in study.facts]
    return {"scores": study.scores(), "facts": facts, "alone": list(study.costs.values())}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="baselines.py", description="HARP beside its competitors and its ablations.")
    text = add_run_arguments(parser, "calibration.txt", windows="4", ctx="512")
    text.add_argument("--tests", nargs="+", default=[own_text("heldout.txt")], metavar="FILE",
                      help="texts to measure on, never to choose by (default: data/heldout.txt)")  # fmt: skip
    text.add_argument("--test-windows", type=int, default=6, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--k", type=int, default=8, metavar="N", help=f"layers to prune (default: %(default)s; up to "
                        f"{CORE_ONLY_UP_TO} the core rows only)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/baselines"), metavar="DIR", help="default: %(default)s")
    args = parser.parse_args(argv)
    return exit_code("baselines.py", lambda: compare(args), "; the same command goes on from the last finished row")


def compare(args: argparse.Namespace) -> None:
    setup = prepare(args.ckpt, args.device, args.dtype, args.ctx or 512)
    n_layers = setup.config.n_layers
    if not 1 <= args.k < n_layers:
        raise UserError(f"--k {args.k} is out of range: with this model it takes 1 to {n_layers - 1}")
    if setup.checkpoint.config["harp"]:
        raise UserError(f"{setup.checkpoint.path} is pruned already: take the checkpoint that it was made from")
    calibration = read_windows(setup, args.text, args.windows or 4)
    tests = {Path(file).name: read_windows(setup, file, args.test_windows) for file in args.tests}
    if file_hash(args.text) in map(file_hash, args.tests):
        raise UserError(f"{args.text} is the calibration text; a test on it would flatter whatever was chosen by it")
    identity = run_identity(
        setup, args.text, args.tests[0], k=args.k, tests=[file_hash(file) for file in args.tests],
        windows=len(calibration), test_windows=args.test_windows,
    )  # fmt: skip
    file = args.out / f"k{args.k}.json"
    with hold(args.out):
        state = (
            read_json(file)
            if file.exists()
            else {"identity": identity, "model": setup.checkpoint.path.name, "rows": {}}
        )
        if state.get("identity") != identity:
            raise UserError(f"{file} holds rows of other settings; name another folder with --out")
        print(setup.description, flush=True)
        ids = torch.cat([window.ids for window in tests[Path(args.tests[0]).name]]).tolist()
        study = Study(setup.load(), calibration, tests, ids, args.k)
        if "layers" not in state:
            state["layers"] = layer_table(study)
            replace_json(file, state)
        run(study, file, state)
    write_report(args.out)


if __name__ == "__main__":
    sys.exit(main())
