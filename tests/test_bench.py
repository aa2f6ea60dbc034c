"""The bench at toy sizes: what it counts, builds, compares and refuses. No test looks at a time."""

import json
import re
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext

import pytest
import torch
from conftest import GOLDEN

import cost
from checkpoint import read_config
from eval_ppl import make_windows
from extras import bench, bench_paper, timing
from harp import search, set_alphas
from load_weights import load, model_config

CPU = torch.device("cpu")
PRUNED = {4: 0.5, 3: 0.0}


@pytest.fixture
def windows():
    return make_windows(torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(5)).tolist(), 24)


@pytest.fixture
def toy_config(tmp_path):
    """config.json of a small Llama, and its folder's only file."""
    config = dict(
        model_type="llama", vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path / "config.json")


@pytest.fixture
def toy_published(monkeypatch):
    """The four published models, each in its family's shape but tiny."""
    toys = {}
    for name, (config, listed) in bench.PUBLISHED.items():
        family = {"qkv_bias": config.qkv_bias}
        if config.post_norms:
            family = bench_paper.GEMMA2 | {"sliding_windows": (16, None) * 3}
        toys[name] = bench_paper.shape(320, 64, 96, 6, 4, 2, 24, 64, **family), listed[:4]
    monkeypatch.setattr(bench, "PUBLISHED", toys)


def table(output: str, first: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `first`, header left out; cells are two spaces apart."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    rows = []
    for line in lines[start + 1 :]:
        cells = re.split(" {2,}", line.strip())
        if len(cells) < 3:
            break
        rows.append(cells)
    return rows


def run(capsys, *arguments) -> str:
    assert bench.main([str(argument) for argument in arguments]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 80
    return output


# ---------------------------------------------------------------------------------------------------- what it builds


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_the_twin_is_the_model_pruned_and_shares_its_weights(family, ids):
    model = load(GOLDEN / family)
    twin = timing.pruned_twin(model, PRUNED)
    dense = model(ids % 64)
    set_alphas(model, PRUNED)
    assert torch.allclose(twin(ids % 64), model(ids % 64), atol=2e-5)
    set_alphas(model, {})
    assert torch.equal(model(ids % 64), dense)
    own = {p.data_ptr() for p in twin.parameters()} - {p.data_ptr() for p in model.parameters()}
    assert own == {twin.blocks[4].attn.o_proj.weight.data_ptr()}


@pytest.mark.parametrize("name", bench.PUBLISHED)
def test_random_models_have_the_shape_and_stay_finite(toy_published, name):
    config, _ = bench.PUBLISHED[name]
    model = timing.random_model(config, CPU, torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == cost.parameters(config)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert timing.last_logits(model, timing.random_ids(config, 100)).isfinite().all()  # past the trained length


def test_published_layers_count_from_the_top():
    config, listed = bench.PUBLISHED["Llama-3.1-8B"]
    alphas = bench_paper.from_the_top(config, listed)
    assert (alphas[31], alphas[30], alphas[24]) == (0.8, 0.2, 0.0) and len(alphas) == 8
    assert 1 - 1 / timing.predicted_speed_up(config, alphas, 65536) == pytest.approx(0.1568, abs=5e-5)


# --------------------------------------------------------------------------------------------------- what it counts


def test_counted_searches_are_those_that_run(windows, monkeypatch):
    """torch's own counter sees what a search multiplies; only of attention it counts all T squared, not the half."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model = load(GOLDEN / "qwen2")
    monkeypatch.setattr(cost, "seen_pairs", lambda tokens, window: tokens**2)
    for cached, method in ((False, bench.naive_search), (True, search)):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            steps = method(model, windows, [4, 2], [0.0, 0.5, 1.0])
        counted = bench.search_flops(model.config, windows, steps, cached)
        assert counter.get_total_flops() == pytest.approx(counted, rel=1e-6)


def test_the_three_searches_agree_and_cost_less_in_turn(windows):
    model, grid = load(GOLDEN / "llama"), [0.0, 0.25, 0.5, 0.75, 1.0]
    naive = bench.naive_search(model, windows, [3, 4], grid)
    cached = search(model, windows, [3, 4], grid)
    fibonacci = search(model, windows, [3, 4], grid, method="fibonacci")
    assert [step.layer for step in naive] == [4, 3]
    difference = float(bench.compare_steps(naive, cached).rpartition(" ")[2])
    assert "identical" in bench.compare_steps(naive, cached) and difference < 1e-6
    other = [cached[0], cached[1].__class__(3, 9.0, 1.0, (), 0.0)]
    assert "DIFFER" in bench.compare_steps(naive, other)
    all_three = (naive, cached, fibonacci)
    counts = [bench.search_flops(model.config, windows, steps, cached=steps is not naive) for steps in all_three]
    assert counts == sorted(counts, reverse=True) and len(set(counts)) == 3


def test_the_log_counts_matrix_products_by_shape(windows):
    model = load(GOLDEN / "gemma2")
    with bench.MatmulLog() as log, torch.inference_mode():
        timing.last_logits(model, timing.random_ids(model.config, 24))
    config = model.config
    assert sum(log.count.values()) == config.n_layers * (7 + 2) + 1  # projections, two products of attention, the head
    gate = "linear", (1, 24, config.hidden_size), (config.intermediate_size, config.hidden_size)
    assert log.count[gate] == 3 * config.n_layers  # the up-projection and, in this shape, q_proj too
    assert log.seconds_alone(CPU) > 0


def test_turns_are_taken():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("dense", "pruned")}
    assert timing.take_turns(runs, 2, CPU).keys() == runs.keys()
    assert order == ["dense", "pruned"] * 3


def test_what_would_end_too_late_is_left_out(toy_published):
    config, _ = bench.PUBLISHED["Llama-3.1-8B"]
    model = timing.random_model(config, CPU, torch.float32)
    assert [point.tokens for point in timing.measure_prefill(model, PRUNED, [8, 16], 1)] == [8, 16]
    assert timing.measure_prefill(model, PRUNED, [8, 16], 1, deadline=0.0) == []


# ----------------------------------------------------------------------------------------------- the command line


def test_search(toy_config, capsys):
    small = ["--ctx", 16, "--windows", 2, "--dtype", "float32"]
    output = run(capsys, "search", "--config", toy_config, "--top", 2, *small)
    naive, cached, fibonacci = table(output, "             trials")
    assert (naive[1], cached[1]) == ("22", "22") and int(fibonacci[1]) <= 10
    assert "cached grid  alphas identical" in output and "search / matmuls" in output


def test_search_of_a_checkpoint(toy, capsys):
    output = run(capsys, "search", "--ckpt", toy, "--layers", "4,2", "--ctx", 16, "--windows", 1, "--grid", "0,0.5,1")
    assert "pruned   2 layers: 4 2" in output and "3 alphas · 1 windows of 16 tokens" in output
    assert table(output, "             trials")[0][1] == "6"


def test_prefill_beside_stock_transformers(toy_config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    lengths = [32, 128]  # the second is beyond max_position_embeddings
    output = run(capsys, "prefill", "--config", toy_config, "--top", 2, "--lengths", *lengths, "--repeats", 1,
                 "--dtype", "float32", "--against", "transformers", "--plot", tmp_path / "p.png")  # fmt: skip
    config = model_config(read_config(tmp_path))
    for tokens, row in zip(lengths, table(output, "tokens"), strict=True):
        predicted = cost.prefill_flops(config, tokens) / cost.prefill_flops(config, tokens, {4: 0.5, 3: 0.5})
        assert (row[0], row[3], len(row)) == (str(tokens), f"{predicted:.3f}x", 8)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_decode_holds_the_counted_bytes(toy_config, capsys):
    output = run(capsys, "decode", "--config", toy_config, "--top", 2, "--lengths", 192, "--repeats", 1, "--dtype",
                 "float32", "--against", "transformers")  # fmt: skip
    rows = {row[0]: row for row in table(output, "          ")}
    assert rows.keys() == {"dense", "pruned", "stock", "dense generate", "stock generate"}
    for name, layers in (("dense", 5), ("pruned", 3)):
        kilobytes = layers * 2 * 2 * 16 * 4 * (192 + bench.NEW_TOKENS) / 1e6
        assert rows[name][2:4] == [f"{kilobytes:.1f} MB"] * 2


@pytest.mark.parametrize("tokens", [3, 40])  # window 7: passed while decoding, and by the prompt already
@torch.inference_mode()
def test_the_stock_loop_starts_anew_past_a_sliding_window(stock, ids, tokens):
    folder, model = stock("mistral-window")
    given = []

    def listening(some, **options):
        given.append(some)
        return model(some, **options)

    prompt = ids[:1, :tokens]
    run = bench.stock_decoder(listening, prompt)
    run()
    run()
    rounds = torch.cat(given[1:], dim=1).view(2, bench.NEW_TOKENS)
    expected = load(folder).generate(prompt, bench.NEW_TOKENS)[0, tokens:]
    assert rounds.tolist() == [expected.tolist()] * 2


def test_memory(toy_config, capsys):
    output = run(capsys, "memory", "--config", toy_config, "--top", 1, "--lengths", 64)
    rows = table(output, "               ")
    assert [row[0] for row in rows] == ["load", "window of 256", "prefill of 64"]
    assert all(float(row[3]) > 1 for row in rows)  # never less than the weights


def test_a_killed_process_is_said(toy_config, monkeypatch, capsys):
    class Killed(nullcontext):
        def submit(self, *arguments):
            raise BrokenProcessPool

    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda *arguments, **options: Killed(Killed()))
    assert bench.main(["memory", "--config", toy_config, "--top", "1"]) == 2
    assert "the process of load was killed" in capsys.readouterr().err


def test_paper_at_toy_sizes(toy_published, capsys):
    output = run(capsys, "paper", "--device", "cpu", "--lengths", 16, 32, "--repeats", 1)
    assert re.findall(r"^golden +(\w+) .*(OK)$", output, flags=re.MULTILINE) == [
        (family, "OK") for family in ("gemma2", "llama", "mistral", "qwen2")
    ]
    assert [name for name in bench.PUBLISHED if f"prefill  {name} · 4 of 6 layers" in output] == list(bench.PUBLISHED)
    assert output.count("time saved at") == 8 and "perplexities unchanged" in output


def test_the_paper_counted_only(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    output = run(capsys, "paper", "--predict-only", "--plot", tmp_path / "p.png")
    rows = table(output, "tokens")
    assert [row[0] for row in rows] == list(bench.PUBLISHED) and rows[0][7] == "1.186"  # at 65,536 tokens
    assert (tmp_path / "p.png").exists()


def test_the_picture_of_a_short_prompt(toy_config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(
        capsys,
        "prefill",
        "--config",
        toy_config,
        "--top",
        1,
        "--lengths",
        4,
        "--repeats",
        1,
        "--plot",
        tmp_path / "p.png",
    )
    assert (tmp_path / "p.png").exists()


def test_the_paper_needs_memory(monkeypatch, capsys):
    monkeypatch.setattr(bench_paper, "free_memory", lambda: 8e9)
    assert bench.main(["paper", "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert "the largest of these models takes 18 GB, and 8 GB are free on cpu" in captured.err and captured.out == ""


def test_the_papers_number_stands_beside_ours(capsys):
    bench_paper.print_savings("Llama-3.1-8B", [timing.Point(65536, 1.186, {"dense": 1.2, "pruned": 1.0})])
    assert "predicted 15.7%, measured 16.7%, paper 16.7%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["prefill", "--lengths", "0"], "--lengths takes whole numbers from 1 up"),
        (["decode", "--repeats", "0"], "--repeats takes whole numbers"),
        (["search", "--plot", "x.png"], "--plot goes with prefill or paper, not with search"),
        (["memory", "--against", "transformers"], "--against goes with prefill or decode"),
        (["paper", "--ckpt", "x"], "decode or memory, not with paper"),
        (["prefill", "--predict-only"], "--predict-only goes with paper"),
        (["prefill", "--plot", "nowhere/p.png"], "in a folder that exists"),
        (["paper", "--plot", "p.jpg"], "must be a .png file"),
        (["paper", "--device", "abacus"], "--device abacus cannot be used"),
        (["search", "--ckpt", str(GOLDEN / "llama"), "--layers", "9"], "--layers 9 is out of range"),
        (["decode", "--config", __file__], "config.json"),
        (["prefill", "--ckpt", "x", "--config", "y"], "name two models"),
        (["prefill", "--config", "nowhere/config.json"], "nowhere/config.json does not exist"),
        (["prefill", "--ckpt", str(GOLDEN / "llama"), "--top", "6"], "--top 6 is out of range"),
        (["search", "--ckpt", str(GOLDEN / "llama"), "--top", "1", "--grid", "x"], "is no grid"),
    ],
)
def test_bad_arguments(arguments, complaint, capsys):
    assert bench.main(arguments) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_what_is_not_installed_is_said(monkeypatch, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["prefill", "--against", "transformers"]) == 2
    assert "--against needs transformers" in capsys.readouterr().err
