"""What perplexity on running text hides: how a pruned model continues, copies, and tells right from wrong.

    divergence       how far its predictions are from the dense model's, where the dense model writes
    loops            how often the text that it writes itself comes round again
    induction        random tokens twice: does it copy? The work of attention, with no help from language
    repeated text    the same with real text
    multiple choice  the true continuation among four

Every measure takes a model as it is: dense, with alphas set, or shrunk. The material is one text's ids without BOS;
`bos` comes before every sequence: [] or [bos_id].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import UserError
from eval_ppl import Perplexity, Window, advance, embed, score
from model import Transformer

ROWS_AT_ONCE = 8  # sequences in a batch
CHOICES = 4


def window_losses(model: Transformer, windows: Sequence[Window]) -> list[Perplexity]:
    """Every window's own summed NLL: two models' differ by window, and that tells how sure their difference is."""
    hiddens = advance(model, embed(model, windows), range(len(model.blocks)))
    return [score(model, [h], [window]) for h, window in zip(hiddens, windows)]


def token_losses(model: Transformer, ids: Tensor) -> Tensor:
    """NLL of every token but the first, (B, T) -> (B, T - 1) in nats."""
    parts = []
    with torch.inference_mode():
        for rows in ids.split(ROWS_AT_ONCE):
            hidden = model.hidden(rows)[:, :-1]
            for h, targets in zip(hidden, rows[:, 1:]):  # one sequence's logits at a time
                parts.append(F.cross_entropy(model.head(h).float(), targets, reduction="none"))
    return torch.stack(parts)


def passages(ids: Sequence[int], count: int, tokens: int) -> Tensor:
    """`count` passages of `tokens` tokens, (count, tokens), spread evenly over a text. Raises UserError."""
    step = (len(ids) - tokens) // count
    if step < 1:
        raise UserError(f"the first test text has {len(ids)} tokens, too few for {count} passages of {tokens}")
    return torch.tensor([ids[i * step : i * step + tokens] for i in range(count)])


def after(bos: Sequence[int], ids: Tensor) -> Tensor:  # (B, T) -> (B, len(bos) + T)
    return torch.cat((torch.tensor(bos, dtype=torch.int64).expand(len(ids), -1), ids), dim=1)


# ------------------------------------------------------------------------------------------- beside the dense model


@dataclass(frozen=True)
class Written:
    """Greedy continuations by the dense model, and what it predicted at each of their tokens."""

    ids: Tensor  # (B, prompt + new)
    prompt: int
    log_probabilities: Tensor  # (B, new, V)


@torch.inference_mode()
def next_token_logs(model: Transformer, ids: Tensor, prompt: int) -> Tensor:
    """Log-probabilities of the tokens after the prompt, (B, T) -> (B, T - prompt, V)."""
    hidden = torch.cat([model.hidden(rows)[:, prompt - 1 : -1] for rows in ids.split(ROWS_AT_ONCE)])
    return model.head(hidden).float().log_softmax(-1)


def write(dense: Transformer, prompts: Tensor, new: int, bos: Sequence[int] = ()) -> Written:
    """Let the dense model continue prompts, (B, T), by `new` tokens each."""
    prompts = after(bos, prompts)
    ids = dense.generate(prompts, new)
    return Written(ids, prompts.shape[1], next_token_logs(dense, ids, prompts.shape[1]))


def divergence(model: Transformer, written: Written) -> tuple[Tensor, Tensor]:
    """At every token that the dense model wrote: whether this model would have written the same, and KL(dense || model)
    in nats, both (B, new). Teacher-forced: every token is predicted after the dense model's own text, so that one early
    difference does not decide all that follows."""
    ours, dense = next_token_logs(model, written.ids, written.prompt), written.log_probabilities
    agree = ours.argmax(-1) == written.ids[:, written.prompt :]
    return agree.float(), F.kl_div(ours, dense, log_target=True, reduction="none").sum(-1)


def own_text(model: Transformer, dense: Transformer, written: Written) -> tuple[Tensor, Tensor]:
    """Let the model continue the same prompts: (the dense model's NLL of every new token (B, new), whether the four
    tokens that end there stood in the continuation before (B, new - 3)). Read the two together: a loop is easy to
    predict, so a low NLL may mean good text or none."""
    new = written.ids.shape[1] - written.prompt
    ids = model.generate(written.ids[:, : written.prompt], new)
    losses = token_losses(dense, ids)[:, -new:]
    return losses, torch.tensor([repeats(row) for row in ids[:, written.prompt :].tolist()])


def repeats(ids: Sequence[int], n: int = 4) -> list[float]:
    """For every stretch of n tokens, 1.0 if it stood there before, else 0.0."""
    seen, found = set(), []
    for end in range(n, len(ids) + 1):
        stretch = tuple(ids[end - n : end])
        found.append(float(stretch in seen))
        seen.add(stretch)
    return found


# ----------------------------------------------------------------------------------------------- what attention is for


def twice(ids: Tensor) -> Tensor:  # (B, T) -> (B, 2T)
    return torch.cat((ids, ids), dim=1)


@torch.inference_mode()
def induction_accuracy(
    model: Transformer, count: int = 8, tokens: int = 64, seed: int = 0, bos: Sequence[int] = ()
) -> float:
    """Share of right next-token guesses in the second copy of `tokens` random tokens, over `count` sequences. The first
    of the copy cannot be known and is not asked for (Olsson et al. 2022, arXiv 2209.11895)."""
    generator = torch.Generator().manual_seed(seed)
    ids = after(bos, twice(torch.randint(model.config.vocab_size, (count, tokens), generator=generator)))
    right = []
    for rows in ids.split(ROWS_AT_ONCE):
        hidden = model.hidden(rows)[:, -tokens:-1]
        right += [(model.head(h).argmax(-1).cpu() == row[1 - tokens :]).float() for h, row in zip(hidden, rows)]
    return torch.stack(right).mean().item()


def repeated_text_loss(
    model: Transformer, ids: Sequence[int], count: int = 4, tokens: int = 128, bos: Sequence[int] = ()
) -> float:
    """Mean NLL, in nats, of the second copy of a passage but its first token, over `count` passages of a text's ids."""
    copies = after(bos, twice(passages(ids, count, tokens))).to(model.device)
    return token_losses(model, copies)[:, 1 - tokens :].mean().item()


def multiple_choice_accuracy(
    model: Transformer,
    ids: Sequence[int],
    count: int = 20,
    context: int = 32,
    tokens: int = 16,
    bos: Sequence[int] = (),
) -> float:
    """Share of passages whose true continuation the model finds likelier than three others, which follow on the next
    passages (chance: 0.25). With 20 of them the standard error is about 0.1."""
    questions = passages(ids, count, context + tokens)  # (count, context + tokens)
    endings = questions[:, context:]
    likelihoods = []
    for choice in range(CHOICES):  # 0: the true one
        with_ending = torch.cat((questions[:, :context], endings.roll(-choice, dims=0)), dim=1)
        losses = token_losses(model, after(bos, with_ending).to(model.device))  # (count, ... context + tokens - 1)
        likelihoods.append(-losses[:, -tokens:].sum(1))
    true, *others = likelihoods
    return (true > torch.stack(others).amax(0)).float().mean().item()  # a tie is no knowledge
