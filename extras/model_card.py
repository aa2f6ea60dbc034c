"""README.md of a folder with a pruned model: what was done to which model, with what result, and how to load it."""

from collections.abc import Mapping

SAVED_USAGE = """\
The folder is smaller than the original: the queries and keys of the pruned layers are gone, and what is left of their
attention is folded into less. It loads with the code that wrote it, `python eval_ppl.py --ckpt FOLDER`, and
`python -m extras.export_hf` makes a copy of it for stock transformers."""


def model_card(name: str, alphas: Mapping[int, float], report: Mapping, usage: str = SAVED_USAGE) -> str:
    """The card of a pruned `name`. `alphas` maps layers to alphas, `report` is harp.json or empty, `usage` says how to
    load the folder."""
    ppl = {step["layer"]: f"{step['ppl']:.4f}" for step in report.get("steps", ())}
    lines = [
        "---",
        "tags: [harp, pruned]",
        "---",
        f"# {name}, pruned with HARP",
        "",
        f"In {len(alphas)} layers of {name}, attention is replaced by alpha * O(V(x)), with one alpha per layer: "
        "High-Layer Attention Pruning with Rescaling (Liu & Liu, TMLR 2026, arXiv 2507.01900).",
        "",
        "| layer | alpha | perplexity with this and the layers above pruned |",
        "|---|---|---|",
        *(f"| {layer} | {alphas[layer]:g} | {ppl.get(layer, '')} |" for layer in sorted(alphas, reverse=True)),
        "",
    ]
    if report.get("identity", {}).get("select") == "cost":
        lines += ["These layers were picked because each of them cost least when it alone was pruned.", ""]
    if report.get("identity", {}).get("bias"):
        lines += ["Each of these layers also adds one constant vector: the mean of what is lost (`--bias`).", ""]
    if "dense_ppl" in report:
        lines += [f"Searched on {text_facts(report['text'])}, where the original has {report['dense_ppl']:.4f}.", ""]
    if "heldout_ppl" in report:
        found = {key: "not finite" if value is None else f"{value:.4f}" for key, value in report["heldout_ppl"].items()}
        lines += [
            f"Perplexity on {text_facts(report['heldout_text'])}: {found['dense']} before, {found['pruned']} pruned; "
            f"the same layers at alpha 1: {found['alpha_1']}, at alpha 0: {found['alpha_0']}.",
            "",
        ]
    return "\n".join([*lines, "## How to load it", "", usage, ""])


def text_facts(facts: Mapping) -> str:
    return f"{facts['file']} ({facts['windows']} windows, {facts['tokens_scored']:,} tokens scored)"
