"""The README's commands and numbers are those of the programs."""

import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if not language for line in block.splitlines()]
COMMANDS = [line for line in COMMANDS if line.startswith(("python ", "pip ", "pytest"))]


def test_there_are_commands():
    assert "python harp.py" in COMMANDS and "pytest" in COMMANDS and len(COMMANDS) >= 6


@pytest.mark.parametrize("command", sorted({c for c in COMMANDS if c.startswith("python ")}))
def test_every_command_has_only_flags_that_exist(command):
    """A flag that argparse does not know stops the program before it looks at the path; --help comes after all."""
    run = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    known = set(re.findall(r"--[\w-]+", run.stdout))
    assert set(re.findall(r"--[\w-]+", command)) <= known


def test_pip_commands_name_files_that_pin_everything():
    for command in COMMANDS:
        if command.startswith("pip install -r "):
            lines = (ROOT / command.split()[-1]).read_text().splitlines()
            assert all("==" in line or line.startswith("-r ") for line in lines)


def test_the_files_it_lists_are_there():
    (tree,) = [block for _, block in BLOCKS if "model.py " in block and "tests/" in block]
    for name in re.findall(r"^(\S+)  ", tree, flags=re.MULTILINE):
        assert (ROOT / name).exists(), name


def test_its_python_runs(demo, monkeypatch):
    (code,) = [block for language, block in BLOCKS if language == "python"]
    monkeypatch.chdir(ROOT)
    names = {}
    exec(code, names)
    assert names["logits"].shape == (1, 5, 49152) and names["model"].pruned == {29: 0.4}


def test_its_dense_perplexity_is_measured(demo):
    """The first number of the output shown, made again: the whole table takes minutes, this takes seconds."""
    shown = float(re.search(r"dense    ppl ([\d.]+)", README)[1])
    arguments = ["eval_ppl.py", "--text", "data/calibration.txt", "--windows", "4"]
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    measured = float(re.search(r"ppl +([\d.]+)", run.stdout)[1])
    assert measured == pytest.approx(shown, rel=1e-4)
