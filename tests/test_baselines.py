"""The measures on models whose answers are known, and the whole comparison on a toy."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from checkpoint import UserError
from eval_ppl import make_windows, perplexity, prepare, read_windows
from extras import baselines, baselines_report, layer_scores, measures
from harp import set_alphas
from load_weights import load


class Copier:
    """Stands in for a model: predicts what followed the last time that the newest token was seen, else token 0."""

    device = torch.device("cpu")

    def __init__(self, vocab_size: int):
        self.config = type("Config", (), {"vocab_size": vocab_size})

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V), one-hot
        guesses = torch.zeros_like(ids)
        for row, guess in zip(ids.tolist(), guesses):
            followed: dict[int, int] = {}
            for t, token in enumerate(row):
                guess[t] = followed.get(token, 0)
                if t + 1 < len(row):
                    followed[token] = row[t + 1]
        return F.one_hot(guesses, self.config.vocab_size).float()

    def head(self, h: torch.Tensor) -> torch.Tensor:
        return 10 * h


class Blind(Copier):
    """Always expects token 0."""

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        return F.one_hot(torch.zeros_like(ids), self.config.vocab_size).float()


@pytest.fixture
def model(stock):
    return load(stock("llama")[0], torch.float32)


@pytest.fixture
def text() -> list[int]:
    return torch.randint(0, 320, (400,), generator=torch.Generator().manual_seed(9)).tolist()


def test_induction_tells_a_copier_from_a_blind_model():
    assert measures.induction_accuracy(Copier(5000), count=4, tokens=16) == 1.0
    assert measures.induction_accuracy(Blind(5000), count=4, tokens=16) < 0.1


def test_repeated_text_is_easy_for_a_copier_only(text):
    unique = list(range(1, 300))
    assert measures.repeated_text_loss(Copier(320), unique, count=4, tokens=16) < 1.0
    assert measures.repeated_text_loss(Blind(320), unique, count=4, tokens=16) > 5.0


def test_multiple_choice_finds_the_continuation_that_was_seen():
    """Passages whose last half repeats the first: the true ending is the only one that a copier expects."""
    passages = [[*range(100 * i + 1, 100 * i + 9)] * 2 for i in range(12)]
    ids = [token for passage in passages for token in passage]
    ids += ids[:16]  # so that passages() takes steps of 16
    assert measures.multiple_choice_accuracy(Copier(1300), ids, count=12, context=9, tokens=7) == 1.0
    assert measures.multiple_choice_accuracy(Blind(1300), ids, count=12, context=9, tokens=7) == 0.0


def test_repeats_counts_stretches_seen_before():
    assert measures.repeats([1, 2, 3, 4, 5, 6]) == [0, 0, 0]
    assert measures.repeats([1, 2, 1, 2, 1, 2, 1]) == [0, 0, 1, 1]


def test_passages_are_spread_over_the_text():
    assert measures.passages(list(range(100)), 3, 10).tolist() == [[*range(i, i + 10)] for i in (0, 30, 60)]
    with pytest.raises(UserError, match="too few for 3 passages of 10"):
        measures.passages(list(range(12)), 3, 10)


def test_bos_comes_before_every_sequence_and_is_not_asked_for(model, text):
    """What is scored is the same; BOS only adds context."""
    seen = []
    model.embed_tokens.register_forward_hook(lambda _, args, output: seen.append(args[0]))
    measures.repeated_text_loss(model, text, count=2, tokens=16, bos=[7])
    measures.multiple_choice_accuracy(model, text, count=4, context=8, tokens=4, bos=[7])
    measures.induction_accuracy(model, count=2, tokens=8, bos=[7])
    measures.write(model, torch.tensor(text[:20]).view(2, 10), 2, bos=[7])
    assert all((ids[:, 0] == 7).all() for ids in seen if ids.shape[1] > 1)
    assert measures.induction_accuracy(Copier(5000), count=4, tokens=16, bos=[7]) == 1.0


def test_token_losses_are_those_of_the_logits(model, text):
    ids = torch.tensor(text).view(10, 40)
    logits = model(ids)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(10, 39)
    torch.testing.assert_close(measures.token_losses(model, ids), expected.detach(), atol=1e-4, rtol=1e-4)


def test_window_losses_add_up_to_the_perplexity(model, text):
    windows = make_windows(text, 50)
    parts, whole = measures.window_losses(model, windows), perplexity(model, windows)
    assert sum(part.nll for part in parts) == pytest.approx(whole.nll)
    assert sum(part.tokens for part in parts) == whole.tokens


def test_a_model_does_not_diverge_from_itself(model, stock, text):
    written = measures.write(model, torch.tensor(text[:40]).view(2, 20), 12)
    agree, kl = measures.divergence(model, written)
    assert agree.shape == kl.shape == (2, 12)
    assert agree.min() == 1 and kl.abs().max() < 1e-4
    other = load(stock("llama-biases")[0], torch.float32)
    agree, kl = measures.divergence(other, written)
    assert agree.mean() < 0.5
    with torch.inference_mode():  # the first of them by hand
        p = model(written.ids)[:, 19].log_softmax(-1)
        q = other(written.ids)[:, 19].log_softmax(-1)
    torch.testing.assert_close(kl[:, 0], (p.exp() * (p - q)).sum(-1), atol=1e-4, rtol=1e-3)


def test_own_text_is_judged_by_the_dense_model(model, text):
    written = measures.write(model, torch.tensor(text[:40]).view(2, 20), 12)
    losses, loops = measures.own_text(model, model, written)
    assert losses.shape == (2, 12) and loops.shape == (2, 9)
    expected = -written.log_probabilities.gather(2, written.ids[:, 20:, None])[..., 0]
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------------------------------ the whole comparison


@pytest.fixture(scope="module")
def compared(toy, tmp_path_factory):
    """Every row of the toy with k = 2, measured once for all tests."""
    out = tmp_path_factory.mktemp("baselines")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CORE_ONLY_UP_TO", 1), ("PREFILL_TOKENS", 32), ("SEEDS", 2), ("PROMPTS", 2),
                            ("PROMPT_TOKENS", 8), ("NEW_TOKENS", 8)):  # fmt: skip
            patch.setattr(baselines, name, value)
        command = ["--ckpt", str(toy), "--ctx", "200", "--windows", "4", "--test-windows", "4", "--k", "2", "--tests",
                   str(ROOT / "data" / "heldout.txt"), "--out", str(out)]  # fmt: skip
        assert baselines.main([*command, "--prefill"]) == 0
        yield command, out, json.loads((out / "k2.json").read_text())


def test_every_row_is_measured(compared):
    rows = compared[2]["rows"]
    assert len(rows) >= 35
    dense = rows["reference: dense"]
    for row in rows.values():
        assert all(math.isfinite(nll) for nll in row["nll"]["heldout.txt"])
        if row is not dense:
            assert row["linear"] < dense["linear"]
            assert row["kv"] <= dense["kv"] and row["flops"] < dense["flops"]
    assert dense["agreement"] == [1.0] * 4 and max(map(abs, dense["divergence"])) < 1e-4
    assert max(dense["noise_floor"]["divergence"]) > 1e-6
    assert {row["flops"] for row in rows.values() if "prefill" in row} >= {rows["top layers: alpha 1"]["flops"]}


HEAD = 64 * 24 * 6  # a key/value head with its two query heads


@pytest.mark.parametrize(
    "name, unit",
    [
        ("Mag-sp, own mix", 3 * 64),
        ("Wanda-sp, own mix", 3 * 64),
        ("FLAP, own mix", HEAD + 64),  # the last unit to go may be a head, and brings a bias
        ("FLAP, key/value heads", HEAD + 64),
        ("LLM-Pruner, ends protected", 3 * 64),
        ("LLM-Pruner, unprotected", 3 * 64),
        ("LLM-Pruner, key/value heads", HEAD),
        ("Mag-sp, query heads", 2 * 2 * 24 * 64),  # one of every group
        ("Attention-Drop, same parameters", HEAD),  # the nearest: half a sublayer of two heads
    ],
)
def test_pruners_remove_what_harp_removes(compared, name, unit):
    rows = compared[2]["rows"]
    assert abs(rows[f"pruners: {name}"]["linear"] - rows["top layers: searched"]["linear"]) <= unit


def test_a_row_is_what_harp_gives(compared, toy):
    """The row's alphas, set on a fresh model, give the row's perplexity on the test text."""
    row, layers = compared[2]["rows"]["other layers: cheapest alone"], compared[2]["layers"]
    setup = prepare(str(toy), "cpu", "float32", 200)
    windows = read_windows(setup, str(ROOT / "data" / "heldout.txt"), 4)
    model = setup.load()
    set_alphas(model, {int(layer): alpha for layer, alpha in row["alphas"].items()})
    assert sum(row["nll"]["heldout.txt"]) == pytest.approx(perplexity(model, windows).nll, rel=1e-5)
    costs = [ppl for _, ppl in layers["alone"]]
    assert {int(layer) for layer in row["alphas"]} == set(sorted(range(5), key=costs.__getitem__)[:2])


def test_an_interrupted_comparison_goes_on(compared, capsys, monkeypatch):
    command, out, state = compared
    half = dict(state, rows=dict(list(state["rows"].items())[:-2]))
    (out / "k2.json").write_text(json.dumps(half))
    monkeypatch.setattr(layer_scores, "layer_facts", None)  # they are on disk
    assert baselines.main(command) == 0
    assert "2 of 2" in capsys.readouterr().err
    again = json.loads((out / "k2.json").read_text())
    for key, row in state["rows"].items():
        assert again["rows"][key]["nll"] == row["nll"]


def test_the_report_has_a_line_for_every_row(compared):
    _, out, state = compared
    text = (out / "tables.md").read_text()
    for key in state["rows"]:
        assert (
            f"| {key.removeprefix('reference: ')} |".replace("|A| / |h|", "\\|A\\| / \\|h\\|") in text
            or "random" in key
        )
    assert "| other layers: random, 2 seeds: median (range) |" in text
    assert "heldout.txt · 4 windows of 200" in text  # how it was made comes before the numbers
    pipes = 0
    for line in text.replace("\\|", "").splitlines():  # all lines of a table have as many cells
        if line.startswith("| ---"):
            assert line.count("|") == pipes
        pipes = line.count("|")
    assert (out / "k2.png").read_bytes()[:4] == b"\x89PNG"


def test_a_comparison_that_was_just_begun_is_left_out_of_the_report(compared, tmp_path):
    state = compared[2]
    (tmp_path / "k2.json").write_text(json.dumps(state))
    (tmp_path / "k3.json").write_text(json.dumps(dict(state, rows={})))
    baselines_report.write_report(tmp_path)
    assert "## 2 layers" in (tmp_path / "tables.md").read_text()


def test_intervals_are_paired():
    """A constant difference is known exactly, however much the windows differ among themselves."""
    dense = {"nll": {"t": [100.0, 300.0, 900.0]}, "tokens": {"t": [100, 100, 100]}}
    row = {"nll": {"t": [110.0, 310.0, 910.0]}}
    assert baselines_report.relative_perplexity(row, dense, "t") == pytest.approx((math.exp(0.1),) * 3)
    row = {"nll": {"t": [110.0, 300.0, 900.0]}}
    ratio, low, high = baselines_report.relative_perplexity(row, dense, "t")
    half = 4.303 * (0.1 / 3**0.5) / 3**0.5  # Student's t with 2 degrees of freedom; standard deviation 0.1 / sqrt(3)
    assert ratio == pytest.approx(math.exp(0.1 / 3))
    assert (low, high) == pytest.approx((ratio * math.exp(-half), ratio * math.exp(half)), rel=0.01)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (["--k", "5"], "--k 5 is out of range"),
        (["--tests", str(ROOT / "data" / "calibration.txt")], "is the calibration text"),
        (["--test-windows", "3"], "differ in test_windows (4 there, 3 here)"),
        (["--test-windows", "1"], "--test-windows takes a whole number above 1"),
        (["--ctx", "512", "--tests", "short.txt"], "must have two windows at least"),
        (["--tests", *[str(ROOT / "data" / "heldout.txt")] * 2], "names two files alike"),
        (["--windows", "1", "--ctx", "80"], "pieces of 64 tokens"),
        (["--windows", "0"], "--windows 0 is out of range"),
        (["--tests", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_makes_no_sense_is_refused(compared, change, complaint, capsys, tmp_path):
    if "short.txt" in change:
        (tmp_path / "short.txt").write_text("Two or three sentences are too little. They make one window.")
        change = [word.replace("short.txt", str(tmp_path / "short.txt")) for word in change]
    assert baselines.main([*compared[0], *change]) == 2
    assert complaint in capsys.readouterr().err
