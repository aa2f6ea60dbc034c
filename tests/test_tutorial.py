"""The tutorial notebook runs from top to bottom, and its checkers know right from wrong."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT

from tests import checks, solutions

NOTEBOOK = ROOT / "tutorial.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]
SOURCE = "\n".join("".join(cell["source"]) for cell in CELLS)
MISTAKES = [(checker, name) for checker, wrong in solutions.WRONG.items() for name in wrong]


def printed(cell: dict) -> str:
    """What a cell shows as text."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]]
    return "".join("".join(part) for part in parts)


# ---------------------------------------------------------------------------------------------------------- checkers


@pytest.mark.parametrize("checker", solutions.SOLUTIONS)
def test_the_solution_passes(checker):
    verdict = getattr(checks, checker)(*solutions.SOLUTIONS[checker])
    assert verdict.solved is True, verdict


@pytest.mark.parametrize("checker, name", MISTAKES)
def test_a_wrong_answer_fails_and_is_told_why(checker, name):
    answer, words = solutions.WRONG[checker][name]
    verdict = getattr(checks, checker)(*answer)
    assert verdict.solved is False
    assert words in verdict.text


@pytest.mark.parametrize("checker", solutions.SOLUTIONS)
def test_no_answer_is_no_mistake(checker):
    nothing = (lambda *_: ...) if callable(solutions.SOLUTIONS[checker][0]) else None
    verdict = getattr(checks, checker)(*[nothing] * len(solutions.SOLUTIONS[checker]))
    assert verdict.solved is None and repr(verdict) == "not solved yet"


def test_every_checker_is_used_and_has_three_wrong_answers():
    used = set(re.findall(r"checks\.(\w+)\(", SOURCE))
    assert used == set(solutions.SOLUTIONS) == set(solutions.WRONG)
    assert len(used) >= 10 and all(len(wrong) >= 3 for wrong in solutions.WRONG.values())


# ---------------------------------------------------------------------------------------------------- what is committed


def test_the_outputs_are_those_of_one_run_from_the_top():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))


def test_the_outputs_are_clean():
    for cell in CODE:
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "execute_result", "display_data"), cell["id"]
            assert output.get("name") != "stderr", cell["id"]
            assert output["output_type"] != "execute_result" or cell["id"].startswith("exercise"), cell["id"]
        assert not re.search(r"/home/|/root/|/tmp/|/Users/|/work/|Warning|Traceback", printed(cell)), cell["id"]


def test_the_file_is_small():
    assert NOTEBOOK.stat().st_size < 1_500_000


def test_the_exercises_are_unsolved():
    exercises = [cell for cell in CODE if "checks." in "".join(cell["source"])]
    assert len(exercises) == len(solutions.SOLUTIONS)
    assert all(printed(cell).strip() == "not solved yet" for cell in exercises)
    assert "solutions" not in SOURCE


def test_every_exercise_has_minutes_difficulty_and_a_hint():
    headings = [cell for cell in CELLS if re.fullmatch(r"exercise-\w+-text", cell["id"])]
    assert len(headings) == len(solutions.SOLUTIONS)
    for cell in headings:
        text = "".join(cell["source"])
        assert re.search(r"\d+ (minutes|hours) · ★", text) and "<details>" in text, cell["id"]


# ------------------------------------------------------------------------------------------------------------ running


def test_the_notebook_runs(demo, tmp_path):
    """In a copy: a run must not change the committed outputs. Its own assertions are the test of its numbers."""
    import nbformat
    from nbclient import NotebookClient

    for name in ("data", "extras", "tests", *(file.name for file in ROOT.glob("*.py"))):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / Path(demo).name).symlink_to(demo)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": tmp_path}}).execute()
    assert [cell.id for cell in notebook.cells] == [cell["id"] for cell in CELLS]
