"""The rows of extras/baselines.py as Markdown tables and a picture. Everything here is read from the folder's JSON."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from checkpoint import read_json
from extras.layer_scores import rank_correlation

RESAMPLES = 4000  # of the test windows, for an interval
# From Okabe and Ito's palette for colour-blind readers; the markers say the same once more.
LOOKS = {
    "reference": ("#000000", "*"),
    "alphas of the top layers": ("#0072B2", "o"),
    "which layers": ("#009E73", "^"),
    "pruners": ("#D55E00", "s"),
}
AXES = {"linear": "linear parameters", "kv": "KV cache", "flops": "prefill FLOPs, 8,192 tokens"}


def write_report(folder: Path) -> None:
    """Write tables.md and a picture for every number of layers that the folder has rows of, the larger first."""
    parts = []
    for file in sorted(folder.glob("k*.json"), key=lambda file: int(file.stem[1:]), reverse=True):
        state, k = read_json(file), int(file.stem[1:])
        rows, dense = list(state["rows"].values()), state["rows"]["reference: dense"]
        if not parts:  # they hardly depend on k
            parts += ["## Scores of the layers", "", *score_table(state["layers"], k), ""]
        parts += [f"## {k} layers: perplexity and size", "", *quality_table(rows, dense), ""]
        parts += [f"## {k} layers: what perplexity hides", "", *behaviour_table(rows), ""]
        draw(rows, dense, folder / f"k{k}.png", f"{state['model']}, {k} layers")
    (folder / "tables.md").write_text("\n".join(parts), encoding="utf-8")
    print(f"wrote    {folder}/tables.md and a picture for every k")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def score_table(layers: Mapping, k: int) -> list[str]:
    """How well each score ranks the layers by what pruning them alone costs, and the k that it would pick."""
    truth = layers["scores"]["pruned alone"]
    rows = []
    for name, values in layers["scores"].items():
        lowest = sorted(range(len(values)), key=values.__getitem__)[:k]
        rows.append([name, f"{rank_correlation(values, truth):.2f}", " ".join(map(str, lowest))])
    height = [-layer for layer in range(len(truth))]
    rows.append(
        ["height, high", f"{rank_correlation(height, truth):.2f}", " ".join(map(str, range(len(truth))[: -k - 1 : -1]))]
    )
    return table(["score", "rank correlation with the true cost", f"its {k} layers, lowest first"], rows)


# ---------------------------------------------------------------------------------------------------------- perplexity


def relative_perplexity(row: Mapping, dense: Mapping, text: str) -> tuple[float, float, float]:
    """This row's perplexity over the dense model's: (ratio, and its 95 % interval). Both models are scored on the same
    windows, so windows are resampled in pairs: a hard window is hard for both (Efron's bootstrap)."""
    nll = torch.tensor([row["nll"][text], dense["nll"][text]], dtype=torch.float64)  # (2, windows)
    tokens = torch.tensor(dense["tokens"][text], dtype=torch.float64)
    picks = torch.randint(len(tokens), (RESAMPLES, len(tokens)), generator=torch.Generator().manual_seed(0))
    samples = ((nll[0] - nll[1])[picks].sum(1) / tokens[picks].sum(1)).exp()
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return ((nll[0] - nll[1]).sum() / tokens.sum()).exp().item(), low, high


def perplexity_of(row: Mapping, text: str) -> float:
    return torch.tensor(sum(row["nll"][text]) / sum(row["tokens"][text]), dtype=torch.float64).exp().item()


def quality_table(rows: Sequence[Mapping], dense: Mapping) -> list[str]:
    texts = list(dense["nll"])
    header = ["method", *texts, *AXES.values(), "prefill measured"]
    cells = []
    for row in rows:
        if row["name"].startswith("random"):
            continue
        ppl = []
        for text in texts:
            ratio, low, high = relative_perplexity(row, dense, text)
            interval = "" if row is dense else f" ({ratio:.2f}x, {low:.2f} to {high:.2f})"
            ppl.append(f"{perplexity_of(row, text):.1f}{interval}")
        sizes = [f"{row[axis] / dense[axis] - 1:+.1%}" for axis in AXES]
        cells.append([row["name"], *ppl, *sizes, f"{row['prefill']:.2f}x" if "prefill" in row else ""])
    return table(header, cells + random_rows(rows, texts))


def random_rows(rows: Sequence[Mapping], texts: Sequence[str]) -> list[list[str]]:
    """The random sets of layers on one line: their median, lowest and highest perplexity."""
    sets = [row for row in rows if row["name"].startswith("random")]
    if not sets:
        return []
    ppl = [[perplexity_of(row, text) for row in sets] for text in texts]
    cells = [f"{statistics.median(some):.1f} ({min(some):.1f} to {max(some):.1f})" for some in ppl]
    return [[f"random layers, {len(sets)} seeds: median (range)", *cells, "", "", "", ""]]


# ----------------------------------------------------------------------------------------------------------- behaviour


def behaviour_table(rows: Sequence[Mapping]) -> list[str]:
    """By position: first and last quarter of the continuations."""
    header = ["method", "agreement", "KL, nats", "dense NLL of own text", "repeated 4-grams", "induction",
              "NLL of repeated text", "multiple choice"]  # fmt: skip
    cells = []
    for row in rows:
        if "induction" in row:
            cells.append(behaviour_cells(row["name"], row))
        if "noise_floor" in row:
            cells.append(behaviour_cells("dense in bfloat16 (noise floor)", row["noise_floor"]))
    return table(header, cells)


def behaviour_cells(name: str, row: Mapping) -> list[str]:
    by_position = [
        f"{row[key][0]:.2f} → {row[key][-1]:.2f}" if key in row else ""
        for key in ("agreement", "divergence", "own_nll", "loops")
    ]
    return [name, *by_position, *(f"{row[key]:.2f}" if key in row else "" for key in ("induction", "repeated", "choice"))]


# --------------------------------------------------------------------------------------------------------- the picture


def draw(rows: Sequence[Mapping], dense: Mapping, file: Path, title: str) -> None:
    """Perplexity on the first test text against the three sizes; numbers lead to the list on the right."""
    from matplotlib.figure import Figure  # nothing else needs it

    figure = Figure(figsize=(12, 0.9 + 0.21 * max(18, len(rows))), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    text = next(iter(dense["nll"]))
    for panel, (axis, label) in zip(panels, AXES.items()):
        for number, row in enumerate(rows):
            colour, marker = LOOKS[row["group"]]
            x, y = 100 * row[axis] / dense[axis], perplexity_of(row, text)
            name = f"{number}  {row['name']}" if panel is panels[0] else None
            panel.plot(x, y, marker, color=colour, markersize=7, alpha=0.7, label=name)
            panel.annotate(str(number), (x, y), xytext=(4, 3), textcoords="offset points", fontsize=9)
        panel.set_xlabel(f"{label} (% of dense)", fontsize=12)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=11)
    panels[0].set_ylabel(f"perplexity, {text}", fontsize=12)
    figure.suptitle(f"{title}: lower left is better", fontsize=13)
    figure.legend(loc="outside right center", fontsize=9, frameon=False)
    figure.savefig(file, dpi=110)
