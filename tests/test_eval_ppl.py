"""Perplexity: anchors that need no reference, windows, and the command line."""

import math
import subprocess
import sys

import pytest
import torch
from conftest import GOLDEN, ROOT, rewrite_weights

import eval_ppl
from eval_ppl import advance, embed, make_windows, perplexity, score
from load_weights import load


def spans(ids, *args, **kwargs):
    return [(w.ids.tolist(), w.targets.tolist()) for w in make_windows(ids, *args, **kwargs)]


def test_windows_without_overlap():
    assert spans(range(7), 3) == [([0, 1, 2], [1, 2]), ([3, 4, 5], [4, 5])]  # the last one has nothing to predict
    assert spans(range(8), 3)[-1] == ([6, 7], [7])
    assert spans(range(8), 3, count=1) == [([0, 1, 2], [1, 2])]
    assert spans(range(5), 100) == [([0, 1, 2, 3, 4], [1, 2, 3, 4])]
    assert spans([], 3) == spans([1], 3) == []


def test_windows_with_bos():
    assert spans([5, 6, 7, 8], 3, bos_id=1, bos_rule="window") == [([1, 5, 6], [5, 6]), ([1, 7, 8], [7, 8])]
    assert spans([5, 6, 7, 8], 3, bos_id=1, bos_rule="start") == [([1, 5, 6], [5, 6]), ([7, 8], [8])]
    assert spans([5], 3, bos_id=1, bos_rule="start") == [([1, 5], [5])]
    assert spans([5], 3, bos_id=1, bos_rule="none") == []


@pytest.mark.parametrize("n, ctx, stride", [(20, 10, 5), (20, 10, 9), (23, 7, 3), (10, 10, 4), (11, 10, 1)])
def test_overlapping_windows_score_every_token_once(n, ctx, stride):
    assert [t for _, targets in spans(range(n), ctx, stride=stride) for t in targets] == list(range(1, n))
    with_bos = spans(range(n), ctx, stride=stride, bos_id=99, bos_rule="window")
    assert [t for _, targets in with_bos for t in targets] == list(range(n))
    assert all(ids[0] == 99 and len(ids) <= ctx for ids, _ in with_bos)


def test_twenty_tokens_in_windows_of_ten_with_stride_five():
    windows = make_windows(range(20), 10, stride=5)
    assert len(windows) == 3 and sum(len(w.targets) for w in windows) == 19


@pytest.fixture
def text_ids():
    return torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(3)).tolist()


def test_a_silent_head_gives_the_vocabulary_size(text_ids):
    model = load(GOLDEN / "llama")
    model.lm_head.weight.data.zero_()
    assert perplexity(model, make_windows(text_ids, 32)).ppl == pytest.approx(320, rel=1e-6)


def test_it_is_the_mean_over_tokens_not_over_windows(text_ids):
    model = load(GOLDEN / "gemma2")
    windows = make_windows(text_ids, 48)  # 48 + 48 + 4
    nll = []
    with torch.inference_mode():
        for w in windows:
            log_p = model(w.ids[None])[0].double().log_softmax(-1)
            nll += [-log_p[t - 1, w.ids[t]].item() for t in range(w.first_target, len(w.ids))]
    result = perplexity(model, windows)
    assert (result.tokens, result.windows) == (97, 3)
    assert result.nll == pytest.approx(sum(nll), rel=1e-6)
    assert result.ppl == pytest.approx(math.exp(sum(nll) / 97), rel=1e-6)


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_chunks_change_nothing(text_ids, rows, monkeypatch):
    model, windows = load(GOLDEN / "qwen2"), make_windows(text_ids, 32)
    expected = perplexity(model, windows).nll
    monkeypatch.setattr(eval_ppl, "HEAD_ROWS", rows)
    monkeypatch.setattr(eval_ppl, "WINDOWS_AT_ONCE", rows)
    assert perplexity(model, windows).nll == pytest.approx(expected, rel=1e-6)


def test_stages_make_up_the_model(text_ids):
    model, windows = load(GOLDEN / "mistral"), make_windows(text_ids, 32)
    hiddens = advance(model, advance(model, embed(model, windows), range(2)), range(2, 5))
    assert score(model, hiddens, windows).nll == perplexity(model, windows).nll
    with torch.inference_mode():
        assert torch.equal(model.head(hiddens[0]), model(windows[0].ids[None]))


def test_memory_of_a_large_vocabulary():
    """128,256 tokens' logits of a window of 4,096 would take 2.1 GB; no more than 300 MB may be added by scoring."""
    code = """
import torch
from eval_ppl import Window, perplexity
from model import ModelConfig, Transformer
def peak(): return int([l for l in open("/proc/self/status") if "VmHWM" in l][0].split()[1]) / 1e3
model = Transformer(ModelConfig(128256, 128, 256, 2, 2, 1, 64, 4096, (None, None), 0.125, tied=True))
ids = torch.randint(0, 128256, (4096,))
before = peak()
perplexity(model, [Window(ids, 1)])
print(peak() - before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(run.stdout) < 300


def test_what_is_not_finite_is_named_by_layer_and_window(text_ids):
    model, windows = load(GOLDEN / "llama"), make_windows(text_ids, 32)
    only_in_the_second = next(i for i in windows[1].ids.tolist() if i not in windows[0].ids.tolist())
    model.embed_tokens.weight.data[only_in_the_second] = float("nan")
    with pytest.raises(eval_ppl.UserError, match="layer 0 gives NaN or infinity in window 2"):
        perplexity(model, windows)
    model = load(GOLDEN / "llama")
    model.blocks[3].mlp.down_proj.weight.data.fill_(3e38)
    with pytest.raises(eval_ppl.UserError, match="layer 3 gives NaN or infinity in window 1"):
        perplexity(model, windows)


def test_blocks_elsewhere_are_streamed_and_stay_where_they_are(text_ids):
    """There is no second device here with memory of its own; torch's "meta" device stands in for one."""
    model, windows = load(GOLDEN / "llama"), make_windows(text_ids, 32)
    there = advance(model, embed(model, windows), range(5), torch.device("meta"))
    assert {h.device.type for h in there} == {"meta"} and there[0].shape == (1, 32, 64)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    eval_ppl.put_on(torch.device("meta"), model, range(3, 5))
    assert model.device.type == "meta"
    on_it = [{p.device.type for p in block.parameters()} for block in model.blocks]
    assert on_it == [{"cpu"}, {"cpu"}, {"cpu"}, {"meta"}, {"meta"}]


def test_overflow_is_infinite_and_not_an_exception():
    assert eval_ppl.Perplexity(nll=1e6, tokens=10, windows=1).ppl == math.inf
    assert math.isnan(eval_ppl.Perplexity(nll=math.nan, tokens=10, windows=1).ppl)


# -------------------------------------------------------------------------------------------------- the command line


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 20)
    return str(file)


def test_command_line(toy, text_file, capsys):
    assert eval_ppl.main(["--ckpt", str(toy), "--text", text_file, "--ctx", "64"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["model", "device", "text", "ppl"]
    assert "BOS at the start" in out and "windows of 64" in out and "bits per byte" in out
    assert max(map(len, lines)) <= 80 or text_file in out
    assert eval_ppl.main(["--ckpt", str(toy), "--text", text_file, "--ctx", "64", "--bos", "none"]) == 0
    assert "no BOS" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--ckpt", "nowhere"], "nowhere does not exist"),
        (["--text", "nowhere.txt"], "cannot read the text nowhere.txt"),
        (["--ctx", "1"], "--ctx 1 is out of range"),
        (["--ctx", "100000"], "--ctx 100000 is out of range"),
        (["--windows", "0"], "--windows 0 is out of range"),
        (["--stride", "64", "--ctx", "64"], "--stride 64 is out of range"),
        (["--device", "toaster"], "--device toaster cannot be used"),
    ],
)
def test_bad_arguments(toy, text_file, arguments, complaint, capsys):
    assert eval_ppl.main(["--ckpt", str(toy), "--text", text_file, *arguments]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err and captured.err.startswith("eval_ppl.py: ") and captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("content", ["", "a"])
def test_a_text_too_short_to_predict(toy, tmp_path, content, capsys):
    (tmp_path / "short.txt").write_text(content)
    arguments = ["--ckpt", str(toy), "--text", str(tmp_path / "short.txt")]
    assert eval_ppl.main([*arguments, "--bos", "none"]) == 2
    assert "too short" in capsys.readouterr().err


def test_float16_is_refused_where_it_overflows(golden_copy, toy, text_file, capsys):
    folder = golden_copy("gemma2")
    (folder / "tokenizer.json").write_bytes((toy / "tokenizer.json").read_bytes())
    assert eval_ppl.main(["--ckpt", str(folder), "--text", text_file, "--dtype", "float16"]) == 2
    assert "--dtype float16 overflows" in capsys.readouterr().err


def test_the_cpu_never_chooses_float16(golden_copy, monkeypatch):
    folder = golden_copy("llama")
    rewrite_weights(folder, lambda w: w.update({name: tensor.half() for name, tensor in w.items()}))
    checkpoint = eval_ppl.open_checkpoint(folder)
    arguments = checkpoint, eval_ppl.model_config(checkpoint.config), torch.device("cpu")
    assert eval_ppl.choose_dtype("auto", *arguments)[0] == torch.float32
    monkeypatch.setattr(eval_ppl, "free_memory", lambda: 10)
    assert eval_ppl.choose_dtype("auto", *arguments)[0] == torch.bfloat16


def test_a_tokenizer_of_another_model(golden_copy, toy, text_file, capsys):
    folder = golden_copy("qwen2", vocab_size=100)
    rewrite_weights(folder, lambda w: w.update({k: w[k][:100].clone() for k in w if w[k].shape[0] == 320}))
    (folder / "tokenizer.json").write_bytes((toy / "tokenizer.json").read_bytes())
    assert eval_ppl.main(["--ckpt", str(folder), "--text", text_file]) == 2
    assert "beyond the model's embedding of 100 rows" in capsys.readouterr().err


def test_full_memory_is_told_in_a_sentence(capsys):
    assert eval_ppl.exit_code("x.py", lambda: torch.empty(10**16)) == 2
    assert eval_ppl.exit_code("x.py", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))) == 2
    assert capsys.readouterr().err.count("x.py: out of memory; take a smaller --ctx") == 2
    with pytest.raises(RuntimeError, match="memory location"):  # a bug of ours keeps its traceback
        eval_ppl.exit_code("x.py", lambda: torch.ones(1).expand(3).add_(1))
