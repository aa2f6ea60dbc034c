"""The rows of extras/baselines.py as Markdown tables and a picture. Everything here is read from the folder's JSON."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from checkpoint import read_json
from extras.layer_scores import rank_correlation

SEARCHED = "top layers: searched"  # the row that others are compared with
# From Okabe and Ito's palette for colour-blind readers; the markers say the same once more.
LOOKS = {
    "reference": ("#000000", "*"),
    "top layers": ("#0072B2", "o"),
    "other layers": ("#009E73", "^"),
    "pruners": ("#D55E00", "s"),
}
PIPE = "\\|"  # in a cell of a Markdown table
AXES = {"linear": "linear parameters", "kv": "KV cache", "flops": "prefill FLOPs, 8,192 tokens"}


def write_report(folder: Path) -> None:
    """Write tables.md and a picture for every number of layers that the folder has the rows of, the larger first."""
    parts = []
    for file in sorted(folder.glob("k*.json"), key=lambda file: int(file.stem[1:]), reverse=True):
        state, k = read_json(file), int(file.stem[1:])
        rows = state["rows"]
        if not rows.keys() >= {"reference: dense", SEARCHED}:
            continue  # it was interrupted early
        if not parts:
            parts += ["```", state["model"], *state["about"], "```", ""]
            parts += ["## Scores of the layers", "", *score_table(state["layers"], k), ""]  # they hardly depend on k
        parts += [f"## {k} layers: perplexity and size", "", *quality_table(rows), ""]
        parts += [f"## {k} layers: what perplexity hides", "", *behaviour_table(rows), ""]
        draw(rows, folder / f"k{k}.png", f"{state['model']}, {k} layers")
    (folder / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote    {folder}/tables.md and a picture for every k")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', PIPE) for cell in cells)} |" for cells in lines]


def score_table(layers: Mapping, k: int) -> list[str]:
    """How well each score ranks the layers by what pruning them alone costs, and the k that it would pick."""
    truth = layers["scores"]["pruned alone"]
    scores = layers["scores"] | {"height": [-layer for layer in range(len(truth))]}
    rows = []
    for name, values in scores.items():
        lowest = sorted(range(len(values)), key=values.__getitem__)[:k]
        rows.append([name, f"{rank_correlation(values, truth):.2f}", ",".join(map(str, lowest))])
    return table(["score", "rank correlation with the true cost", f"its {k} layers, lowest first"], rows)


# ---------------------------------------------------------------------------------------------------------- perplexity


def relative_perplexity(row: Mapping, other: Mapping, text: str) -> tuple[float, float, float]:
    """This row's perplexity over another's: (ratio, and its 95 % interval). Both models are scored on the same windows,
    so their difference is taken window by window (a hard window is hard for both) and its mean has Student's t
    distribution, whose width is drawn here, since torch has no quantile of it."""
    tokens = torch.tensor(other["tokens"][text], dtype=torch.float64)
    nll = torch.tensor([row["nll"][text], other["nll"][text]], dtype=torch.float64)  # (2, windows)
    difference = (nll[0] - nll[1]) / tokens
    n = len(difference)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        t = torch.distributions.StudentT(n - 1.0).sample((200_000,)).abs().quantile(0.95)
    mean, half = difference.mean(), t * difference.std() / n**0.5
    return mean.exp().item(), (mean - half).exp().item(), (mean + half).exp().item()


def perplexity_of(row: Mapping, text: str) -> float:
    return math.exp(sum(row["nll"][text]) / sum(row["tokens"][text]))


def quality_table(rows: Mapping[str, Mapping]) -> list[str]:
    """Perplexities, over the dense model's and over those of HARP on the top layers; sizes beside the dense model's."""
    dense, searched = rows["reference: dense"], rows[SEARCHED]
    prefill = {row["flops"]: row["prefill"] for row in rows.values() if "prefill" in row}
    texts = list(dense["nll"])
    header = ["layers or method", *(f"{text}: ppl; over dense; over searched" for text in texts),
              *AXES.values(), "unfolded", "prefill, times faster"]  # fmt: skip
    cells = []
    for key, row in rows.items():
        if row["name"].startswith("random"):
            continue
        unfolded = f"{row['unfolded'] / dense['linear'] - 1:+.1%}" if "unfolded" in row else ""
        cells.append([
            key.removeprefix("reference: "),
            *(ppl_cell(row, dense, searched, text) for text in texts),
            *(f"{row[axis] / dense[axis] - 1:+.1%}" for axis in AXES),
            unfolded,
            f"{prefill[row['flops']]:.2f}" if row["flops"] in prefill and row is not dense else "",
        ])  # fmt: skip
    return table(header, cells + random_row(rows, texts))


def ppl_cell(row: Mapping, dense: Mapping, searched: Mapping, text: str) -> str:
    parts = [f"**{perplexity_of(row, text):.1f}**"]
    for other in (dense, searched):
        if row is not other and row is not dense:
            ratio, low, high = relative_perplexity(row, other, text)
            parts.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
    return "; ".join(parts)


def random_row(rows: Mapping[str, Mapping], texts: Sequence[str]) -> list[list[str]]:
    """The random sets of layers on one line: their median, lowest and highest perplexity."""
    sets = [row for row in rows.values() if row["name"].startswith("random")]
    if not sets:
        return []
    ppl = [[perplexity_of(row, text) for row in sets] for text in texts]
    cells = [f"**{statistics.median(some):.1f}** ({min(some):.1f} to {max(some):.1f})" for some in ppl]
    return [[f"other layers: random, {len(sets)} seeds: median (range)", *cells, *[""] * 5]]


# ----------------------------------------------------------------------------------------------------------- behaviour


def behaviour_table(rows: Mapping[str, Mapping]) -> list[str]:
    """By position: first and last quarter of the continuations."""
    header = ["layers or method", "agreement", "KL, nats", "dense NLL of own text", "repeated 4-grams", "induction",
              "NLL of repeated text", "multiple choice"]  # fmt: skip
    cells = []
    for key, row in rows.items():
        if "induction" in row:
            cells.append(behaviour_cells(key.removeprefix("reference: "), row))
        if "noise_floor" in row:
            cells.append(behaviour_cells("dense in another dtype (noise floor)", row["noise_floor"]))
    return table(header, cells)


def behaviour_cells(name: str, row: Mapping) -> list[str]:
    by_position = [
        f"{row[key][0]:.2f} → {row[key][-1]:.2f}" if key in row else ""
        for key in ("agreement", "divergence", "own_nll", "loops")
    ]
    return [
        name,
        *by_position,
        *(f"{row[key]:.2f}" if key in row else "" for key in ("induction", "repeated", "choice")),
    ]


# --------------------------------------------------------------------------------------------------------- the picture


def draw(rows: Mapping[str, Mapping], file: Path, title: str) -> None:
    """Perplexity on the first test text against the three sizes; numbers lead to the list on the right. What is above
    ten times the dense perplexity lies on the upper edge."""
    from matplotlib.figure import Figure  # nothing else needs it

    figure = Figure(figsize=(14, 10), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    dense = rows["reference: dense"]
    text = next(iter(dense["nll"]))
    most = 10 * perplexity_of(dense, text)
    for panel, (axis, label) in zip(panels, AXES.items()):
        points = [(min(perplexity_of(row, text), most), 100 * row[axis] / dense[axis]) for row in rows.values()]
        right = {number: place % 2 for place, number in enumerate(sorted(range(len(points)), key=points.__getitem__))}
        for number, (row, (y, x)) in enumerate(zip(rows.values(), points)):
            colour, marker = LOOKS[row["group"]]
            name = f"{number}  {row['name']}" if panel is panels[0] else None
            panel.plot(x, y, marker, color=colour, markersize=7, alpha=0.7, label=name, clip_on=False)
            offset, side = ((6, -3), "left") if right[number] else ((-6, -3), "right")  # neighbours on opposite sides
            panel.annotate(str(number), (x, y), offset, textcoords="offset points", ha=side, fontsize=9)
        panel.set_xlabel(f"{label}\n(% of dense)", fontsize=13)
        panel.set_yscale("log")
        least = 0.9 * most / 10
        panel.set_ylim(least, most)
        ticks = [tick for tick in (10, 15, 20, 30, 40, 50, 60, 80, 100, 150, 200, 300, 500) if least < tick < most]
        panel.set_yticks(ticks, map(str, ticks), minor=False)
        panel.minorticks_off()
        panel.margins(x=0.12)
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=12)
    panels[0].set_ylabel(f"perplexity, {text}", fontsize=13)
    figure.suptitle(f"{title}: lower left is better", fontsize=15)
    figure.legend(loc="outside right center", fontsize=11, frameon=False)
    figure.savefig(file, dpi=90)
