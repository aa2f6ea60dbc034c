"""Checkers for the exercises of tutorial.ipynb.

Every checker takes a student's answer, tries it on random inputs and returns a `Verdict`, which a notebook shows as its
text: exact, approximate, the largest difference, and a sentence on what is wrong. What is right is found in another way
than the exercise asks for (slower, or by an identity), so that reading this file gives no exercise away.
"""

import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import cost
from extras.bench_paper import PUBLISHED
from model import Attention, Block, ModelConfig, RMSNorm, Transformer, repeat_kv, rotate

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Verdict:
    solved: bool | None  # None: there is no answer yet
    text: str

    def __repr__(self) -> str:
        return self.text


NOT_YET = Verdict(None, "not solved yet")
Mistakes = Mapping[str, Tensor | float]  # a sentence on a usual mistake -> what it would give


def absent(answer: object) -> bool:
    return answer is None or answer is ...


def judge(cases: Iterable[tuple[object, Tensor | float, Mistakes]], close: float = 1e-4) -> Verdict:
    """Compare answers with what is expected, (answer, expected, mistakes) for every input. `close`: the share of the
    largest expected number that a right answer may be off by."""
    worst, exact = 0.0, True
    for answer, expected, mistakes in cases:
        if absent(answer):
            return NOT_YET
        expected = torch.as_tensor(expected).double()
        try:
            got = torch.as_tensor(answer).double()
        except (TypeError, ValueError, RuntimeError):
            return Verdict(False, f"the answer is a {type(answer).__name__}, where numbers are wanted")
        if got.shape != expected.shape:
            return Verdict(False, f"the answer has the shape {tuple(got.shape)}, wanted is {tuple(expected.shape)}")
        if not got.isfinite().all():
            return Verdict(False, "the answer holds NaN or infinity: is something divided by zero?")
        scale = expected.abs().max().item()
        off = (got - expected).abs()
        worst, exact = max(worst, off.max().item()), exact and torch.equal(got, expected)
        if off.max() > close * scale:
            line = f"exact: False | approximate: False | largest difference: {worst:.1e}\n"
            for sentence, value in mistakes.items():
                value = torch.as_tensor(value).double()
                if value.shape == got.shape and (got - value).abs().max() <= close * max(scale, value.abs().max()):
                    return Verdict(False, line + sentence)
            return Verdict(False, line + where_it_is_off(off > close * scale, got, expected))
    return Verdict(True, f"exact: {exact} | approximate: True | largest difference: {worst:.1e}\nright")


def where_it_is_off(wrong: Tensor, got: Tensor, expected: Tensor) -> str:
    """For a mistake that nobody foresaw: the first place where it shows."""
    if not wrong.ndim:
        return f"the answer is {got.item():.5g}, right is {expected.item():.5g}"
    place = tuple(wrong.nonzero()[0].tolist())
    share = wrong.double().mean().item()
    return (
        f"{share:.0%} of the numbers are off; the first is at {place}: {got[place]:.5g}, right is {expected[place]:.5g}"
    )


def random_numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TINY = ModelConfig(
    vocab_size=32, hidden_size=48, intermediate_size=64, n_layers=1, n_heads=6, n_kv_heads=3, head_dim=8,
    max_position_embeddings=64, sliding_windows=(None,), query_scale=8**-0.5, qkv_bias=True, post_norms=True,
    norm_offset=1.0,
)  # fmt: skip


def tiny_model(seed: int) -> Transformer:
    """One block that has everything: grouped heads, biases, norms after the sublayers; every parameter random."""
    model = Transformer(TINY).eval()
    for parameter in model.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=random_numbers(seed + parameter.numel()))
    return model


# --------------------------------------------------------------------------------------------------- five minutes each


def kv_cache(answer: int | None) -> Verdict:
    """Bytes of Llama-3.1-8B's KV cache for 65,536 tokens in 16 bits, its top 8 layers pruned."""
    config, tokens = PUBLISHED["Llama-3.1-8B"][0], 65536
    pruned = dict.fromkeys(range(24, 32), 0.5)
    right = cost.kv_bytes(config, tokens, pruned)
    dense = cost.kv_bytes(config, tokens)
    mistakes = {
        "that is the cache of all 32 layers: pruned ones keep nothing": dense,
        "that is what pruning saves; asked for is what remains": dense - right,
        "that is half: keys and values are both kept, and each number takes two bytes": right / 2,
        "that counts query heads; what is kept are key/value heads": right * config.n_heads / config.n_kv_heads,
        "that is in float32; asked for is 16 bits, two bytes": right * 2,
        "asked for is the number of bytes, not of gigabytes": right / 1e9,
        "asked for is the number of bytes, not of gibibytes": right / 2**30,
    }
    return judge([(answer, right, mistakes)], close=1e-3)


def similarity(answer: Callable[[Tensor], Tensor | float]) -> Verdict:
    """H (T, D) -> the mean cosine of all pairs of different rows."""
    cases = []
    for seed, T in ((0, 2), (1, 7), (2, 40)):
        H = (torch.rand(T, 1, generator=random_numbers(seed)) + 0.5) * (
            torch.randn(T, 16, generator=random_numbers(seed + 10)) + 0.8
        )
        cosines = F.cosine_similarity(H[:, None], H[None], dim=-1)  # all T x T of them: the slow way
        right = (cosines.sum() - T) / (T * (T - 1))
        products = H @ H.T
        unit = F.normalize(H - H.mean(0), dim=-1)
        too_long = "these are dot products: bring the rows to length 1 first"
        mistakes = {
            "every token's cosine with itself, which is 1, is counted too": cosines.mean(),
            "the sum leaves the diagonal out, but the division counts it": (cosines.sum() - T) / T**2,
            too_long: (products.sum() - products.trace()) / (T * (T - 1)),
            too_long + ", and leave the diagonal out": products.mean(),
            "the mean is subtracted, but what tokens share is what is asked for": ((unit @ unit.T).sum() - T)
            / (T * (T - 1)),
            "that is the length of the mean; its square is the mean cosine": cosines.mean().clamp(min=0).sqrt(),
        }
        cases.append((answer(H), right, mistakes))
    return judge(cases)


def value_path(answer: Callable[[Block, Tensor], Tensor]) -> Verdict:
    """(block, h (B, T, D)) -> Post(O(V(Norm(h)))), which is what attention with a window of 1 adds."""
    cases = []
    for seed in (0, 1):
        model = tiny_model(seed)
        block, attn = model.blocks[0], model.blocks[0].attn
        h = torch.randn(2, 5, TINY.hidden_size, generator=random_numbers(seed))
        attn.window = 1
        right = block.attention_update(h, model.rope(h))
        attn.window = None
        x = block.attn_norm(h)
        v = attn.heads(attn.v_proj(x))  # (B, n_kv_heads, T, head_dim)

        def path(repeated: Tensor) -> Tensor:
            return attn.o_proj(repeated.transpose(1, 2).flatten(2))

        grouped = repeat_kv(v, TINY.n_heads)
        tiled = v.repeat(1, TINY.n_heads // TINY.n_kv_heads, 1, 1)
        biasless = repeat_kv(attn.heads(F.linear(x, attn.v_proj.weight)), TINY.n_heads)
        mistakes = {
            "the norm before V is missing": block.attn_post_norm(attn.value_path(h)),
            "the norm after O is missing; in Gemma2 it is part of the sublayer": path(grouped),
            "the value heads are tiled, v0 v1 v2 v0 v1 v2; query heads 0 and 1 both read value 0, "
            "so it must be v0 v0 v1 v1 v2 v2": block.attn_post_norm(path(tiled)),
            "that is the new residual stream; asked for is only what is added to h": h + right,
            "the bias of V is missing": block.attn_post_norm(path(biasless)),
        }
        cases.append((answer(block, h), right, mistakes))
    return judge(cases)


def least_squares(answer: Callable[[Tensor, Tensor], Tensor | float]) -> Verdict:
    """(A, U), both (T, D) -> the alpha that brings alpha * U closest to A."""
    cases = []
    for seed in (0, 1, 2):
        A, U = two_updates(seed)
        right = torch.linalg.lstsq(U.flatten()[:, None], A.flatten()[:, None]).solution[0, 0]
        token = (A * U).sum(1) / (U * U).sum(1)
        mistakes = {
            "that is the norm match |A| / |U|: the right size in the wrong direction, so too loud": A.norm() / U.norm(),
            "that brings U from A: the division is by <A, A>, and should be by <U, U>": (A * U).sum() / (A * A).sum(),
            "that is the mean of the tokens' own alphas; loud tokens must count more": token.mean(),
            "that is the cosine: the lengths are missing": (A * U).sum() / (A.norm() * U.norm()),
        }
        cases.append((answer(A, U), right, mistakes))
    return judge(cases)


def two_updates(seed: int) -> tuple[Tensor, Tensor]:
    """A and U, (12, 6) each: related, of different size, tokens of different loudness, means far from 0."""
    generator = random_numbers(seed)
    loudness = torch.rand(12, 1, generator=generator) * 3 + 0.2
    U = loudness * (torch.randn(12, 6, generator=generator) + torch.randn(6, generator=generator))
    A = 0.4 * U + 0.5 * torch.randn(12, 6, generator=generator) + torch.randn(6, generator=generator)
    return A, U


def folded_norm(answer: Callable[[Tensor, float], Tensor]) -> Verdict:
    """(weight (D,), alpha) -> the weight that makes Gemma2's norm, x / rms(x) * (1 + weight), alpha times as large."""
    cases = []
    for seed, alpha in ((0, 0.3), (1, 0.0), (2, 1.5)):
        norm = RMSNorm(16, 1e-6, 1.0)
        norm.weight.data = torch.randn(16, generator=random_numbers(seed))
        x = torch.randn(5, 16, generator=random_numbers(seed + 10))
        weight = norm.weight.detach().clone()
        unit = F.rms_norm(x, (16,), eps=1e-6)
        right = (alpha * norm(x) / unit).mean(0) - 1
        mistakes = {
            "that is alpha * weight; but this norm multiplies by 1 + weight": alpha * weight,
            "the norm adds its 1 to that once more": alpha * (1 + weight),
            "that leaves the norm as it was: a scale before it does nothing, one in its weight must change it": weight,
            "that adds alpha to the weight; the output must be multiplied": weight + alpha,
        }
        cases.append((answer(weight.clone(), alpha), right.detach(), mistakes))
    return judge(cases)


# ------------------------------------------------------------------------------------------------------- half an hour


def bound(answer: Callable[[Tensor, Tensor, float], Tensor]) -> Verdict:
    """(p (T, T), v (T, head_dim), alpha) -> for every row an upper bound of |a - alpha v| that equals the one of (A) at
    alpha = 1 and the true distance if all values are equal."""
    for seed, alpha in ((0, 1.0), (1, 0.4), (2, 0.0), (3, 1.7)):
        generator = random_numbers(seed)
        p = (
            (3 * torch.randn(9, 9, generator=generator))
            .masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
            .softmax(-1)
        )
        for v, equal in (
            (torch.randn(9, 4, generator=generator), False),
            (torch.randn(1, 4, generator=generator).expand(9, 4), True),
        ):
            got = answer(p, v, alpha)
            if absent(got):
                return NOT_YET
            true = (p @ v - alpha * v).norm(dim=-1)
            if not isinstance(got, Tensor) or got.shape != true.shape:
                return Verdict(False, f"wanted is one number for every row, a tensor of the shape {tuple(true.shape)}")
            if (got < true - 1e-5).any():
                row = int((true - got).argmax())
                what = "all values are equal" if equal else "the values differ"
                return Verdict(False, f"no bound: alpha {alpha}, row {row}, {what}: it says {got[row]:.4f}, "
                                      f"the distance is {true[row]:.4f}")  # fmt: skip
            if equal and (got > true + 1e-4).any():
                return Verdict(False, f"a bound, but too loose: with equal values the distance is "
                                      f"{true[-1]:.4f}, it says {got[-1]:.4f} (alpha {alpha})")  # fmt: skip
            of_a = torch.stack([(p[t] * (v - v[t]).norm(dim=-1)).sum() for t in range(9)])
            if alpha == 1 and (got > of_a + 1e-4).any():
                return Verdict(False, "a bound, but looser than (A) at alpha = 1: are the distances weighted by p?")
    return Verdict(True, "a bound on 4 alphas with random and with equal values, and as tight as (A)\nright")


def law(answer: Callable[[float, int, float], float]) -> Verdict:
    """(s, n, w) -> best alpha if a token puts the weight w on itself and spreads the rest over n - 1 others evenly."""
    cases = []
    for seed, (s, n, w) in enumerate([(0.2, 5, 0.5), (0.6, 3, 0.1), (0.9, 12, 0.0), (0.0, 4, 0.7)]):
        directions = torch.linalg.qr(torch.randn(n + 1, n + 1, generator=random_numbers(seed)).double()).Q
        v = s**0.5 * directions[0] + (1 - s) ** 0.5 * directions[1:]  # length 1, any two with the cosine s
        a = w * v[0] + (1 - w) * v[1:].mean(0)
        uniform = s + (1 - s) / n
        mistakes = {
            "that is the law for uniform attention: w is not in it": uniform,
            "the rest is spread over the n - 1 others; here it is over all n, the token itself included": w
            + (1 - w) * uniform,
            "that is |a|, the norm match; the best alpha is <a, v>": a.norm(),
            "that is |a| squared; only for uniform attention is it also the best alpha": a @ a,
            "the similarity counts for what comes from others, not for the token's own value": s,
        }
        cases.append((answer(s, n, w), a @ v[0], mistakes))
    return judge(cases, close=1e-6)


def folding(answer: Callable[[Tensor, int, int], Tensor]) -> Verdict:
    """(o_proj's weight (D, n_heads * head_dim), n_kv_heads, head_dim) -> (D, n_kv_heads * head_dim)."""
    cases = []
    for seed, (n_heads, n_kv_heads, head_dim) in enumerate([(6, 3, 4), (8, 2, 3), (4, 4, 2)]):
        weight = torch.randn(10, n_heads * head_dim, generator=random_numbers(seed))
        unit_values = torch.eye(n_kv_heads * head_dim).unflatten(1, (n_kv_heads, head_dim))[:, :, None]
        right = (repeat_kv(unit_values, n_heads).flatten(1) @ weight.T).T  # what each single value feature adds
        by_group = weight.unflatten(1, (n_kv_heads, -1, head_dim))
        tiled = weight.unflatten(1, (-1, n_kv_heads, head_dim)).sum(1).flatten(1)
        mistakes = {
            "that is the mean of a group's slices; their outputs are added, so sum them": by_group.mean(2).flatten(1),
            "that keeps one query head of each group and drops the others": by_group[:, :, 0].flatten(1),
            "that groups the heads like v0 v1 v2 v0 v1 v2; neighbours share a value: v0 v0 v1 v1 v2 v2": tiled,
        }
        cases.append((answer(weight.clone(), n_kv_heads, head_dim), right, mistakes))
    return judge(cases)


def greedy(answer: Callable) -> Verdict:
    """(ppl_of, layers, alphas, limit) -> dict layer -> alpha: from the top down, as long as ppl stays within limit."""
    layers, alphas = [4, 6, 5, 7], [0.0, 0.25, 0.5, 0.75, 1.0]  # not in order
    for seed, pruned in ((0, 4), (1, 2), (2, 0)):
        wish = torch.rand(8, generator=random_numbers(seed)).tolist()
        calls: list[dict[int, float]] = []

        def best_for(layer: int, above: Mapping[int, float]) -> float:
            """Toy world: what a layer wants depends on the alphas above it."""
            return wish[layer] - 0.4 * sum(alpha - 0.5 for upper, alpha in above.items() if upper > layer)

        def ppl_of(setting: Mapping[int, float]) -> float:
            calls.append(dict(setting))
            return 10 * math.exp(sum(0.1 + 0.5 * (a - best_for(layer, setting)) ** 2 for layer, a in setting.items()))

        right: dict[int, float] = {}
        limits = [10.5]
        for layer in (7, 6, 5, 4):
            right[layer] = min(alphas, key=lambda a: abs(a - best_for(layer, right)))
            limits.append(ppl_of(right))
        limit = limits[pruned] * 1.01
        right = {layer: right[layer] for layer in (7, 6, 5, 4)[:pruned]}
        calls.clear()
        got = answer(ppl_of, list(layers), list(alphas), limit)
        if absent(got):
            return NOT_YET
        if got != right:
            return Verdict(False, f"found {got}, right is {right}\n{what_went_wrong(calls, right, got, limit)}")
    return Verdict(True, "the same alphas in three toy worlds | exact: True\nright")


def what_went_wrong(calls: list[dict[int, float]], right: dict[int, float], got: object, limit: float) -> str:
    """A sentence on a wrong greedy search, from what it asked."""
    if not isinstance(got, dict):
        return "wanted is a dict, layer -> alpha"
    pruning = [call for call in calls if call]  # the dense model may be asked for, too
    if not pruning or max(pruning[0]) != 7:
        return "the first layer to try is the topmost one, 7, whatever the order of the list"
    if len(pruning[0]) > 1:
        return f"the first trial prunes {sorted(pruning[0])}; layers that are not reached yet stay dense"
    if any(len(call) == 1 and 7 not in call for call in pruning):
        return "a trial at a lower layer forgets the alphas that were found above it"
    if any(got[layer] != right[layer] for layer in got if layer in right):
        return "a layer's alpha is not the best one: keep the alpha of the lowest perplexity"
    return f"the search must stop before the first layer whose best perplexity is above the limit, {limit:.2f}"


def running_mean(answer: Callable[[Tensor], Tensor]) -> Verdict:
    """v (B, heads, T, head_dim) -> at every token the mean of the values up to and with its own."""
    cases = []
    for seed in (0, 1):
        v = torch.randn(2, 3, 6, 4, generator=random_numbers(seed))
        uniform = torch.ones(6, 6).tril()
        right = (uniform / uniform.sum(1, keepdim=True)) @ v
        before = torch.ones(6, 6).tril(-1)
        mistakes = {
            "that is the mean over all tokens: a token would see the future": v.mean(2, keepdim=True).expand_as(v),
            "that is the running sum: divide by how many tokens are in it": uniform @ v,
            "the token itself is left out; attention looks at it too": before
            @ v
            / before.sum(1, keepdim=True).clamp(min=1),
            "the running mean goes over features or heads; tokens are dimension 2": v.cumsum(3) / torch.arange(1, 5),
        }
        cases.append((answer(v.clone()), right, mistakes))
    return judge(cases)


def alpha_and_bias(answer: Callable[[Tensor, Tensor], tuple[float, Tensor]]) -> Verdict:
    """(A, U), both (T, D) -> (alpha, b (D,)) that bring alpha * U + b closest to A."""
    cases = []
    for seed in (0, 1):
        A, U = two_updates(seed)
        T, D = A.shape
        unknowns = torch.cat([U.reshape(-1, 1), torch.eye(D).repeat(T, 1)], dim=1)  # alpha, then b
        right = torch.linalg.lstsq(unknowns, A.reshape(-1, 1)).solution[:, 0]
        plain = (A * U).sum() / (U * U).sum()
        got = answer(A, U)
        if absent(got):
            return NOT_YET
        if not isinstance(got, tuple) or len(got) != 2:
            return Verdict(False, "wanted are two things: (alpha, b)")
        got = torch.cat([torch.as_tensor(got[0]).reshape(1), torch.as_tensor(got[1]).reshape(-1)])

        def with_bias(alpha: Tensor | float, b: Tensor) -> Tensor:
            return torch.cat([torch.as_tensor(alpha).reshape(1), b])

        mistakes = {
            "alpha is fitted as if there were no b; take the means off A and U first": with_bias(
                plain, A.mean(0) - plain * U.mean(0)
            ),
            "b is the mean of A, but alpha * U has a mean of its own": with_bias(right[0], A.mean(0)),
            "b is what alpha = 1 leaves over": with_bias(right[0], (A - U).mean(0)),
            "b is 0": with_bias(plain, torch.zeros(D)),
        }
        cases.append((got, right, mistakes))
    return judge(cases)


def induction(answer: Callable[[Tensor, int], Tensor]) -> Verdict:
    """(weights (heads, 2L, 2L), L) -> (heads,): attention from the second copy to the token after the same token."""
    cases = []
    for seed, L in ((0, 4), (1, 7)):
        scores = 2 * torch.randn(3, 2 * L, 2 * L, generator=random_numbers(seed))
        weights = scores.masked_fill(torch.ones(2 * L, 2 * L).triu(1).bool(), -math.inf).softmax(-1)
        second = torch.arange(L, 2 * L)
        same, before = weights[:, second, second - L].mean(1), weights[:, second, second - 1].mean(1)
        pattern = torch.zeros(2 * L, 2 * L)
        pattern[second, second - L + 1] = 1 / L
        right = torch.einsum("hts,ts->h", weights, pattern)
        mistakes = {
            "that looks at the same token in the first copy; induction looks at the one after it": same,
            "that looks at the token before: a previous-token head": before,
            "the mean goes over both copies; only the second has anything to copy": right / 2,
            "rows and columns are exchanged: weights[head, query, key]": torch.einsum("hst,ts->h", weights, pattern),
            "that is the sum over the second copy; wanted is the mean": right * L,
        }
        cases.append((answer(weights.clone(), L), right, mistakes))
    return judge(cases)


# --------------------------------------------------------------------------------------------------- an afternoon each


def planted_bug(file: str | None, old: str | None, new: str | None, test: str | None) -> Verdict:
    """Is `test` (as pytest names it) green now, and red once `old` is `new` in `file`? Tried in a copy: nothing here
    changes."""
    if any(absent(part) for part in (file, old, new, test)):
        return NOT_YET
    source = ROOT / file
    if not source.is_file():
        return Verdict(False, f"there is no file {file} in the repository")
    text = source.read_text(encoding="utf-8")
    if text.count(old) != 1:
        return Verdict(False, f"the old text stands {text.count(old)} times in {file}; it must stand there once")
    broken = text.replace(old, new)
    try:
        compile(broken, file, "exec")
    except SyntaxError as error:
        return Verdict(False, f"with the bug, {file} is no Python any more (line {error.lineno}): plant one that runs")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "repository"
        left_out = shutil.ignore_patterns(".*", "__pycache__", "checkpoints", "out", "*.ipynb")
        shutil.copytree(ROOT, copy, ignore=left_out)
        if (ROOT / "checkpoints").exists():
            (copy / "checkpoints").symlink_to(ROOT / "checkpoints")
        sound = run_test(copy, test)
        if sound > 1:
            return Verdict(False, f"pytest finds no test {test}; it wants tests/file.py::function")
        if sound:
            return Verdict(False, f"{test} is red without your bug, so it proves nothing")
        (copy / file).write_text(broken, encoding="utf-8")
        with_bug = run_test(copy, test)
    if with_bug == 0:
        return Verdict(False, f"{test} stays green: it does not see this bug. Is it harmless, or the test blind?")
    if with_bug > 1:
        return Verdict(False, "with the bug, the tests cannot even be loaded: plant one that runs and is wrong")
    return Verdict(True, f"{test}: green without the bug, red with it\nright")


def run_test(folder: Path, test: str) -> int:
    """pytest's exit code: 0 green, 1 red, more: it could not run."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", test]
    return subprocess.run(command, cwd=folder, capture_output=True).returncode


def int8(answer: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Verdict:
    """weight (out, in) -> (int8 (out, in), scale (out, 1)) with weight = int8 * scale up to half a step."""
    for seed in (0, 1):
        weight = torch.randn(8, 12, generator=random_numbers(seed)) * torch.logspace(-2, 1, 8)[:, None]
        weight[:, 3] *= 5  # a loud column
        weight[0, 0] = weight[0].abs().max() * 1.01  # the largest of its row is positive
        got = answer(weight.clone())
        if absent(got):
            return NOT_YET
        if not isinstance(got, tuple) or len(got) != 2 or not all(isinstance(part, Tensor) for part in got):
            return Verdict(False, "wanted are two tensors: (int8 weights, scales)")
        quantised, scale = got
        if quantised.dtype != torch.int8 or quantised.shape != weight.shape:
            return Verdict(False, f"the weights are {quantised.dtype} {tuple(quantised.shape)}, "
                                  f"wanted are torch.int8 {tuple(weight.shape)}")  # fmt: skip
        if tuple(scale.shape) != (8, 1):
            what = (
                "one scale for all rows lets the loudest row set the step of the quiet ones; "
                if scale.numel() == 1
                else ""
            )
            return Verdict(
                False, f"the scales have the shape {tuple(scale.shape)}: {what}wanted is one for every row, (8, 1)"
            )
        step = weight.abs().amax(1, keepdim=True) / 127
        off = (quantised.float() * scale - weight).abs() / step
        row = int(off.amax(1).argmax())
        line = f"largest difference: {off.max():.2f} steps (row {row})\n"
        if off.max() > 100:
            return Verdict(False, line + "a weight has changed its sign: int8 ends at 127, and 128 wraps round to -128")
        if off.max() > 1.01:
            return Verdict(False, line + "the steps are too coarse: the largest weight of each row should become 127")
        if off.max() > 0.51:
            return Verdict(False, line + "more than half a step: the conversion to int8 cuts decimals off; round first")
    return Verdict(True, f"{line}right: within half a step everywhere")


def normed_queries(answer: Callable[[Attention, Tensor, tuple[Tensor, Tensor], RMSNorm], Tensor]) -> Verdict:
    """(attn, x (B, T, D), rope, norm over head_dim) -> queries (B, n_heads, T, head_dim) as Qwen3 has them."""
    cases = []
    for seed in (0, 1):
        model = tiny_model(seed)
        attn, norm = model.blocks[0].attn, RMSNorm(TINY.head_dim, 1e-6, 0.0)
        norm.weight.data = torch.rand(TINY.head_dim, generator=random_numbers(seed)) + 0.5
        x = torch.randn(2, 5, TINY.hidden_size, generator=random_numbers(seed + 10))
        rope = model.rope(x)
        q = attn.heads(attn.q_proj(x))  # (B, n_heads, T, head_dim)
        right = torch.stack([rotate(norm(head)[:, None], rope)[:, 0] for head in q.unbind(1)], dim=1)
        together = F.rms_norm(attn.q_proj(x), (TINY.n_heads * TINY.head_dim,), eps=1e-6)
        mistakes = {
            "the norm comes after RoPE; its weight then scales the wrong features of every pair": norm(rotate(q, rope)),
            "the norm goes over all heads together; every head has its own": rotate(
                attn.heads(together) * norm.weight, rope
            ),
            "the norm is missing": rotate(q, rope),
            "RoPE is missing": norm(q),
            "the norm's weight is missing": rotate(F.rms_norm(q, (TINY.head_dim,), eps=1e-6), rope),
        }
        cases.append((answer(attn, x, rope, norm), right, mistakes))
    return judge(cases)
