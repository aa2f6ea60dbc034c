"""The search against the textbook loop, and the command line from the first line to a kill -9 and back."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import GOLDEN, ROOT

import harp
from eval_ppl import make_windows, perplexity
from extras.bench import naive_search
from harp import Step, parse_grid, search, set_alphas, try_fibonacci
from load_weights import load

GRID = [0.0, 0.25, 0.5, 0.75, 1.0]


@pytest.fixture
def windows():
    return make_windows(torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(5)).tolist(), 24)


@pytest.mark.parametrize(
    "family, layers", [("llama", [4, 3, 2]), ("gemma2", [5, 3]), ("qwen2", [4, 1]), ("mistral", [0])]
)
def test_the_search_finds_what_the_textbook_loop_finds(windows, family, layers):
    expected = naive_search(load(GOLDEN / family), windows, layers, GRID)
    model, seen = load(GOLDEN / family), []
    steps = search(model, windows, list(reversed(layers)), GRID, on_step=seen.append)
    assert seen == steps
    for step, textbook in zip(steps, expected, strict=True):
        assert (step.layer, step.alpha) == (textbook.layer, textbook.alpha)
        assert step.ppl == pytest.approx(textbook.ppl, rel=1e-6)
        assert step.tried == pytest.approx([pytest.approx(pair, rel=1e-6) for pair in textbook.tried])
        block = model.blocks[step.layer]
        assert (block.attention_mode, block.alpha) == ("vo", step.alpha)
    assert perplexity(model, windows).ppl == pytest.approx(steps[-1].ppl, rel=1e-6)


def test_each_step_is_the_best_of_all_alphas(windows):
    model = load(GOLDEN / "llama")
    steps = search(model, windows, [4, 3], parse_grid("0:1:0.05"))
    for k, step in enumerate(steps):
        above = {s.layer: s.alpha for s in steps[:k]}
        brute = {}
        for alpha, _ in step.tried:
            set_alphas(model, above | {step.layer: alpha})
            brute[alpha] = perplexity(model, windows).ppl
        assert brute[step.alpha] <= min(brute.values()) * (1 + 1e-6)


def test_a_search_goes_on_where_it_was(windows):
    whole = search(load(GOLDEN / "llama"), windows, [4, 3, 2], GRID)
    model = load(GOLDEN / "llama")
    rest = search(model, windows, [4, 3, 2], GRID, done=whole[:1])
    assert [(s.layer, s.alpha, s.ppl) for s in rest] == [(s.layer, s.alpha, s.ppl) for s in whole]


def test_sweeps_only_ever_improve(windows):
    """From alphas that are far too large, two sweeps come down step by step and end where the model says they do."""
    model, loud = load(GOLDEN / "mistral"), {4: 1.0, 3: 1.0, 2: 1.0}
    set_alphas(model, loud)
    start = perplexity(model, windows).ppl
    done = [Step(layer, alpha, start, ((alpha, start),), 0.0) for layer, alpha in loud.items()]
    steps = search(model, windows, [4, 3, 2], GRID, sweeps=2, done=done)
    assert [step.layer for step in steps] == [4, 3, 2] * 3
    assert all(later.ppl <= earlier.ppl for earlier, later in zip(steps[2:], steps[3:]))
    assert steps[5].ppl < start
    assert perplexity(model, windows).ppl == pytest.approx(steps[-1].ppl, rel=1e-6)


def test_what_is_not_finite_never_wins(windows, monkeypatch):
    true_score = harp.score

    def broken_above_half(model, hiddens, some):
        result = true_score(model, hiddens, some)
        return type(result)(float("nan"), result.tokens, result.windows) if next(trials) in bad else result

    for bad, expected in (({0, 3}, [None, 1, 1, None, 1]), (set(range(5)), "no finite perplexity at any alpha")):
        trials = iter(range(5))
        monkeypatch.setattr(harp, "score", broken_above_half)
        if isinstance(expected, str):
            with pytest.raises(harp.UserError, match=expected):
                search(load(GOLDEN / "llama"), windows, [4], GRID)
        else:
            (step,) = search(load(GOLDEN / "llama"), windows, [4], GRID)
            assert [p is None for _, p in step.tried] == [p is None for p in expected]
            assert step.alpha not in {GRID[i] for i in bad}


def test_of_equals_the_smaller_alpha_wins(windows):
    model = load(GOLDEN / "llama")
    model.blocks[4].attn.o_proj.weight.data.zero_()  # alpha makes no difference any more
    (step,) = search(model, windows, [4], [0.7, 0.3, 1.0])
    assert step.alpha == 0.3


@pytest.mark.parametrize("grid, most", [("0:1:0.1", 5), ("0:1:0.01", 10), ("0,1", 2), ("0.5", 1)])
def test_fibonacci_finds_every_valley_with_few_trials(grid, most):
    alphas = parse_grid(grid)
    for lowest in range(len(alphas)):
        tried = {}
        try_fibonacci(alphas, lambda alpha: tried.setdefault(alpha, abs(alphas.index(alpha) - lowest)))
        assert min(tried, key=tried.get) == alphas[lowest] and len(tried) <= most


def test_fibonacci_agrees_with_the_grid(windows):
    steps = [search(load(GOLDEN / "qwen2"), windows, [4, 3], GRID, method=method) for method in ("grid", "fibonacci")]
    for full, few in zip(*steps):
        values = [ppl for _, ppl in full.tried]
        lowest = values.index(min(values))
        falls_then_rises = values == sorted(values[:lowest], reverse=True) + sorted(values[lowest:])
        assert few.alpha == full.alpha or not falls_then_rises
        assert set(few.tried) <= set(full.tried)
        if few.alpha != full.alpha:
            break  # from here on the two searches prune different models


@pytest.mark.parametrize(
    "text, grid",
    [
        ("0:1:0.1", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        ("0:1:0.3", [0, 0.3, 0.6, 0.9]),
        ("1,0,0.5,0.5", [0, 0.5, 1]),
        ("0.2", [0.2]),
        ("1:1:5", [1]),
    ],
)
def test_grids(text, grid):
    assert parse_grid(text) == grid


# -------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def command(toy, tmp_path):
    """The shared arguments of a small run, output folder last."""
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "data" / "calibration.txt").read_text()[:3000])
    return ["--ckpt", str(toy), "--text", str(text), "--ctx", "48", "--windows", "3", "--out", str(tmp_path / "out")]


def without_times(report):
    return {**report, "steps": [{**step, "seconds": 0} for step in report["steps"]]}


def read_report(folder):
    return without_times(json.loads((folder / "harp.json").read_text()))


def test_command_line(command, tmp_path, capsys):
    arguments = [*command, "--top", "2", "--prompt", "It was"]
    assert harp.main(arguments) == 0
    first = capsys.readouterr()
    words = [line.split()[0] for line in first.out.splitlines() if line[:1] not in (" ", "")]
    assert words[:6] == ["model", "device", "text", "dense", "layer", "layer"]
    assert {"heldout", "cost", "result", "pruned"} <= set(words)
    assert "left" in first.err and not (tmp_path / "out.partial").exists()
    report = read_report(tmp_path / "out")
    assert [step["layer"] for step in report["steps"]] == [4, 3]
    assert report["heldout_ppl"]["saved"] == pytest.approx(report["heldout_ppl"]["pruned"], rel=1e-5)

    assert harp.main(arguments) == 0  # a finished run is printed again, not searched again
    second = capsys.readouterr()
    assert second.out == first.out and "left" not in second.err

    assert harp.main([*command, "--top", "3"]) == 2  # another run may not take its place
    assert "differs in layers" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text() + "!")
    assert harp.main(arguments) == 2
    assert "differs in text" in capsys.readouterr().err
    assert read_report(tmp_path / "out") == report

    assert harp.main(["--ckpt", str(tmp_path / "out"), "--top", "1"]) == 2
    assert "pruned already" in capsys.readouterr().err


def test_the_saved_perplexity_is_what_eval_ppl_says(command, tmp_path, capsys):
    import eval_ppl

    assert harp.main([*command, "--layers", "4,1", "--heldout", str(tmp_path / "text.txt")]) == 0
    printed_command = capsys.readouterr().out.splitlines()[-1]
    assert eval_ppl.main(shlex.split(printed_command)[2:]) == 0
    printed = float(re.search(r"ppl +([\d.]+)", capsys.readouterr().out)[1])
    assert printed == pytest.approx(read_report(tmp_path / "out")["heldout_ppl"]["saved"], abs=1e-4)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--top", "6"], "--top 6 is out of range: with this model it takes 1 to 5"),
        (["--top", "0"], "--top 0 is out of range"),
        (["--layers", "5"], "--layers 5 is out of range"),
        (["--layers", "a"], "is no list of layers"),
        (["--grid", "0:1"], "is no grid"),
        (["--grid", "0,nan"], "is no grid"),
        (["--grid", "0:1:0"], "is no grid"),
        (["--grid=-1,0"], "is no grid"),
        (["--grid", "0:1:1e-9"], "more than 10,000 alphas"),
        (["--top", "1", "--heldout", "nowhere"], "cannot read the text nowhere"),
        (["--top", "1", "--windows", "0"], "--windows 0 is out of range"),
        (["--top", "1", "--prompt", "x" * 600], "--prompt has"),
    ],
)
def test_bad_arguments_leave_nothing_behind(command, tmp_path, arguments, complaint, capsys):
    assert harp.main([*command, *arguments]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert not list(tmp_path.glob("out*"))


def test_a_foreign_folder_is_left_alone(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("do not lose")
    assert harp.main([*command, "--top", "1"]) == 2
    assert "is no run of harp.py" in capsys.readouterr().err
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_full_disk_ends_in_a_sentence_and_the_run_can_go_on(command, tmp_path, monkeypatch, capsys):
    write_text, left = Path.write_text, 2  # the state before and after the dense perplexity; then nothing fits any more

    def full_after_a_while(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(*args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full_after_a_while)
    assert harp.main([*command, "--top", "2"]) == 2
    assert "cannot read or write: No space left on device; what was saved is intact" in capsys.readouterr().err
    monkeypatch.undo()
    assert harp.main([*command, "--top", "2"]) == 0
    assert read_report(tmp_path / "out")["heldout_ppl"]["saved"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"identity": {}, "steps": [{"layer": "4"}]}'])
def test_a_damaged_state_is_not_trusted_and_not_lost(command, tmp_path, content, capsys):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "harp.json").write_text(content)
    assert harp.main([*command, "--top", "1"]) == 2
    assert "harp.json is damaged" in capsys.readouterr().err
    assert (tmp_path / "out.partial" / "harp.json").read_text() == content


def test_an_unfinished_run_does_not_pass_for_a_finished_one(command, tmp_path, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harp, "judge", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert harp.main([*command, "--top", "1"]) == 130
    assert harp.main([*command[:-1], str(tmp_path / "out.partial"), "--top", "1"]) == 2
    assert "holds an unfinished run" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(command, tmp_path, capsys):
    with harp.hold(tmp_path / "out.partial"):
        assert harp.main([*command, "--top", "1"]) == 2
        assert "another run is writing to" in capsys.readouterr().err
    assert harp.main([*command, "--top", "1"]) == 0


def test_out_must_be_a_folder_that_can_be_made(command, tmp_path, capsys):
    file = tmp_path / "text.txt"
    for out, complaint in ((file, "is a file"), (file / "out", "cannot read or write"), (".", "has no name")):
        assert harp.main([*command[:-1], str(out), "--top", "1"]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_search_ends_with_the_same_result(command, tmp_path, how):
    run = [sys.executable, str(ROOT / "harp.py"), *command, "--top", "4", "--grid", "0:1:0.02"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*run[:-4], "--out", str(tmp_path / "whole"), *run[-4:]], check=True, env=environment)
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  # a background job may ignore Ctrl-C
    process = subprocess.Popen(run, env=environment, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    state = tmp_path / "out.partial" / "harp.json"
    deadline = time.monotonic() + 120
    while not (state.exists() and json.loads(state.read_text())["steps"]):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and not (tmp_path / "out").exists()
    if how == signal.SIGINT:
        assert process.returncode == 130 and "the same command goes on" in errors and "Traceback" not in errors
    interrupted = json.loads(state.read_text())["steps"]
    assert 1 <= len(interrupted) < 4
    again = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert again.returncode == 0
    assert read_report(tmp_path / "out") == read_report(tmp_path / "whole")
    assert json.loads((tmp_path / "out" / "harp.json").read_text())["steps"][: len(interrupted)] == interrupted


# -------------------------------------------------------------------------------------------------- a real model


def test_the_main_command_on_the_demo_model(demo, tmp_path):
    """What a newcomer runs, on fewer tokens: the alphas are between the extremes and pruning costs something."""
    run = [sys.executable, "harp.py", "--top", "2", "--windows", "2", "--ctx", "256", "--grid", "0:1:0.25"]
    done = subprocess.run(
        [*run, "--out", str(tmp_path / "out"), "--prompt", "The capital of France is"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    report = read_report(tmp_path / "out")
    assert 20 < report["dense_ppl"] < 120
    assert [step["layer"] for step in report["steps"]] == [29, 28]
    assert all(0 < step["alpha"] < 1 for step in report["steps"])
    held = report["heldout_ppl"]
    assert held["dense"] < held["pruned"] < min(held["alpha_0"], held["alpha_1"])
    assert held["saved"] == pytest.approx(held["pruned"], rel=2e-3)  # bfloat16 rounds the folded weights
    assert "dense    The capital of France is Paris" in done.stdout
    smaller = (tmp_path / "out" / "model.safetensors").stat().st_size / (demo / "model.safetensors").stat().st_size
    assert smaller < 0.995
