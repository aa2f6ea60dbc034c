"""Perplexity of a checkpoint on a text: tokens -> windows -> summed negative log-likelihood -> one division.

    python eval_ppl.py --ckpt path/to/checkpoint --text file.txt

How the number is made is printed before the number, because perplexities made in different ways do not compare.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from checkpoint import Checkpoint, UserError, open_checkpoint
from cost import parameters
from load_weights import load, model_config, stored_dtype
from model import ModelConfig, Transformer
from tokenizer import Tokenizer, load_tokenizer, read_text

ROOT = Path(__file__).resolve().parent
HEAD_ROWS = 128  # positions whose logits exist at one time: 128 x 128,256 float32 are 66 MB
WINDOWS_AT_ONCE = 16  # windows whose hidden states exist at one time


# ------------------------------------------------------------------------------------------------------ the number


@dataclass(frozen=True)
class Window:
    """A stretch of tokens that the model reads at once, and from where on its tokens are scored."""

    ids: Tensor  # (T,) int64
    first_target: int  # at least 1: the first token has nothing before it to be predicted from

    @property
    def targets(self) -> Tensor:
        return self.ids[self.first_target :]


def make_windows(
    ids: Sequence[int],
    ctx: int,
    count: int | None = None,
    stride: int | None = None,
    bos_id: int | None = None,
    bos_rule: str = "none",
) -> list[Window]:
    """Cut a text's tokens into windows of `ctx` tokens, the last one shorter; return the first `count` of them.

    Without `stride` the windows do not overlap, and the first token of each is context only. With a smaller
    `stride`, windows start every `stride` tokens and score only what no earlier window has scored. BOS comes before
    the text ("start"), before every window ("window", one of its ctx tokens) or nowhere ("none"); it is never scored.
    A window in which nothing is left to score is dropped, so a text of one token gives no window.
    """
    start_bos = [bos_id] if bos_rule == "start" else []
    window_bos = [bos_id] if bos_rule == "window" else []
    ids = [*start_bos, *ids]
    room = ctx - len(window_bos)
    windows, scored = [], 0  # how many of the ids were targets, or came before the first
    for start in range(0, len(ids), stride or room):
        end = min(start + room, len(ids))
        window = Window(
            torch.tensor([*window_bos, *ids[start:end]], dtype=torch.int64),
            first_target=max(1, len(window_bos) + scored - start),
        )
        if len(window.targets):
            windows.append(window)
        scored = end
        if end == len(ids) or len(windows) == count:
            break
    return windows


@dataclass(frozen=True)
class Perplexity:
    nll: float  # nats, summed over all scored tokens in float64
    tokens: int  # scored
    windows: int

    @property
    def ppl(self) -> float:
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 700 else mean * math.inf  # too large for a float; nan stays nan


def perplexity(
    model: Transformer, windows: Sequence[Window], on_progress: Callable[[float], None] = lambda share_done: None
) -> Perplexity:
    """exp(summed NLL / tokens scored), over all windows; `on_progress` hears what share of the work is done. Raises
    UserError that names layer and window where numbers are not finite."""
    parts, n_layers = [], len(model.blocks)
    for first in range(0, len(windows), WINDOWS_AT_ONCE):
        some = windows[first : first + WINDOWS_AT_ONCE]
        hiddens = embed(model, some)
        for layer in range(n_layers):
            hiddens = advance(model, hiddens, [layer])
            check_finite(hiddens, layer, first)
            on_progress((first + len(some) * (layer + 1) / (n_layers + 1)) / len(windows))
        parts.append(score(model, hiddens, some))
    total = Perplexity(sum(p.nll for p in parts), sum(p.tokens for p in parts), len(windows))
    if not math.isfinite(total.ppl):
        raise UserError(f"the perplexity is {total.ppl}: the head is damaged or overflows; try --dtype float32")
    return total


def check_finite(hiddens: Sequence[Tensor], layer: int, before: int) -> None:
    """Raise UserError if what `layer` made of a window, (1, T, D), holds NaN or infinity; `before` windows precede."""
    for window, h in enumerate(hiddens, start=before + 1):
        if not h.isfinite().all():
            raise UserError(
                f"layer {layer} gives NaN or infinity in window {window}: its weights are damaged or overflow; "
                "try --dtype float32"
            )


@torch.inference_mode()
def embed(model: Transformer, windows: Sequence[Window]) -> list[Tensor]:
    """The residual stream at the bottom of the model: one (1, T, D) for every window."""
    return [model.embed(window.ids[None]) for window in windows]


@torch.inference_mode()
def advance(
    model: Transformer, hiddens: list[Tensor], layers: Iterable[int], device: torch.device | None = None
) -> list[Tensor]:
    """Carry every window's hidden states, (1, T, D) each, through `layers`, one block at a time for all windows.

    A block that is not on `device` (where the model's head is, if not said) is copied there for its turn only.
    """
    device = device or model.device
    hiddens = [h.to(device) for h in hiddens]
    ropes = [model.rope(h) for h in hiddens]
    for layer in layers:
        block = model.blocks[layer]
        weights = {name: weight.to(device) for name, weight in block.named_parameters()}
        hiddens = [functional_call(block, weights, (h, rope)) for h, rope in zip(hiddens, ropes)]
    return hiddens


@torch.inference_mode()
def score(model: Transformer, hiddens: Sequence[Tensor], windows: Sequence[Window]) -> Perplexity:
    """The last block's output, (1, T, D) for every window -> summed NLL of the targets. Logits exist for `HEAD_ROWS`
    positions at a time."""
    losses = []
    for h, window in zip(hiddens, windows):
        predicting = h[0, window.first_target - 1 : -1]  # position t predicts token t + 1
        targets = window.targets.to(h.device)
        for rows, some in zip(predicting.split(HEAD_ROWS), targets.split(HEAD_ROWS)):
            losses.append(F.cross_entropy(model.head(rows).float(), some, reduction="none"))
    nll = torch.cat(losses).cpu().double().sum().item()
    return Perplexity(nll, sum(len(loss) for loss in losses), len(windows))


# --------------------------------------------------------------------------------- what the two command lines share


@dataclass(frozen=True)
class Setup:
    """What a command works with: chosen and checked before any weight is read."""

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    ctx: int
    description: str

    @property
    def streams(self) -> bool:
        """Whether the model is larger than what is free on the GPU, so that it cannot be there all at once."""
        if self.device.type != "cuda":
            return False
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + unused  # what torch keeps and does not use is ours to take
        return parameters(self.config, self.checkpoint.config["harp"]) * self.dtype.itemsize > 0.8 * free

    def load(self, lowest: int | None = None) -> Transformer:
        """Read the weights, and say on stderr what was read and how long it took. Of a model that streams, only the
        embedding, the head and the layers from `lowest` up are put on the device."""
        started = time.perf_counter()
        if self.streams:
            model = load(self.checkpoint.path, self.dtype)
            put_on(self.device, model, range(self.config.n_layers)[lowest:] if lowest is not None else ())
        else:
            model = load(self.checkpoint.path, self.dtype, self.device)
        stored = dtype_name(stored_dtype(self.checkpoint))
        print(
            f"loaded {len(self.checkpoint.tensors)} tensors, {self.checkpoint.n_bytes / 1e6:,.0f} MB of {stored}, "
            f"as {dtype_name(self.dtype)} in {time.perf_counter() - started:.1f} s",
            file=sys.stderr,
        )
        return model


def put_on(device: torch.device, model: Transformer, layers: Iterable[int]) -> None:
    """Move what every window needs all the time to the device; `advance` streams the other blocks there."""
    for part in (model.embed_tokens, model.norm, model.lm_head, *(model.blocks[layer] for layer in layers)):
        if part is not None:
            part.to(device)


def add_run_arguments(
    parser: argparse.ArgumentParser, text: str, windows: str, ctx: str = "2,048; demo model: 512"
) -> argparse._ArgumentGroup:
    """The arguments of every command that evaluates a model on a text; `text` is the default one, `windows` and `ctx`
    name the defaults. Returns the group of those about the text."""
    parser.add_argument("--ckpt", metavar="DIR", help="checkpoint folder (default: the demo model, fetched once)")
    about_text = parser.add_argument_group("text")
    about_text.add_argument("--text", default=own_text(text), metavar="FILE", help="UTF-8 text (default: %(default)s)")
    about_text.add_argument("--ctx", type=int, metavar="N", help=f"tokens in a window (default: {ctx})")
    about_text.add_argument("--windows", type=int, metavar="N", help=f"windows from its start (default: {windows})")
    group = parser.add_argument_group("machine")
    group.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda, cuda:1, mps (default: %(default)s)")
    group.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_NAMES], help="default: %(default)s")
    return about_text


def own_text(name: str) -> str:
    return os.path.relpath(ROOT / "data" / name)


def named_checkpoint(ckpt: str | None) -> Checkpoint:
    """The folder that --ckpt names, or the demo model's. Raises UserError."""
    if ckpt is None:
        from extras.demo_checkpoint import demo_checkpoint  # needs gguf, which nothing else does

        ckpt = demo_checkpoint()
    return open_checkpoint(ckpt)


def prepare(ckpt: str | None, asked_device: str, asked_dtype: str, ctx: int | None) -> Setup:
    """Open the checkpoint and choose device, dtype and window size, from what the command line says. Raises
    UserError."""
    checkpoint = named_checkpoint(ckpt)
    config = model_config(checkpoint.config)
    device, device_why = choose_device(asked_device)
    dtype, dtype_why = choose_dtype(asked_dtype, checkpoint, config, device)
    if ctx is None:
        ctx = min(512 if ckpt is None else 2048, config.max_position_embeddings)
    if not 2 <= ctx <= config.max_position_embeddings:
        raise UserError(f"--ctx {ctx} is out of range: this model takes 2 to {config.max_position_embeddings:,} tokens")
    description = (
        f"model    {checkpoint.config['model_type']} · {config.n_layers} layers · d {config.hidden_size} · "
        f"{config.n_heads}/{config.n_kv_heads} heads · "
        f"{short_count(parameters(config, checkpoint.config['harp']))} parameters\n"
        f"device   {device} ({device_why}) · dtype {dtype_name(dtype)} ({dtype_why})"
    )
    return Setup(checkpoint, config, load_tokenizer(checkpoint.path), device, dtype, ctx, description)


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device that `--device` asks for, and why it was taken."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device()), "found"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "found"
        return torch.device("cpu"), "no GPU found"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError):  # torch says one or the other, by device and build
        raise UserError(f"--device {name} cannot be used on this machine; leave it out, or take cpu") from None
    return device, "asked for"


def choose_dtype(
    name: str, checkpoint: Checkpoint, config: ModelConfig, device: torch.device
) -> tuple[torch.dtype, str]:
    """The dtype that `--dtype` asks for, and why. float16 is never chosen on a CPU, where it crawls, and refused for
    models with norms after each sublayer (Gemma2): their residual stream grows beyond its 65,504. Raises UserError."""
    overflows = config.post_norms
    if name == "float16" and overflows:
        raise UserError("--dtype float16 overflows in this family; take bfloat16 or float32")
    if name != "auto":
        return DTYPE_NAMES[name], "asked for"
    stored = stored_dtype(checkpoint)
    if stored == torch.float16 and overflows and device.type != "cpu":
        return torch.bfloat16, "stored as float16, which overflows in this family"
    if device.type != "cpu" or stored == torch.float32:
        return stored, "as stored"
    needed, free = 4 * parameters(config), free_memory()
    if needed <= free / 2:
        return torch.float32, "fits into half the free memory"
    return torch.bfloat16, f"float32 would take {needed / 1e9:.0f} of {free / 1e9:.0f} GB free"


DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def free_memory() -> int:
    """Bytes of main memory that can be had now; where the system does not say, all there are."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        (available,) = [line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")]
        return int(available.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_windows(
    setup: Setup, file: str, count: int | None, stride: int | None = None, bos_rule: str | None = None
) -> list[Window]:
    """A text file's windows, under the tokenizer's own BOS rule or another. Raises UserError."""
    tokenizer = setup.tokenizer
    bos_rule = bos_rule or tokenizer.bos_rule
    room = setup.ctx - (bos_rule == "window")
    if count is not None and count < 1:
        raise UserError(f"--windows {count} is out of range: it takes a whole number above 0")
    if stride is not None and not 1 <= stride < room:
        raise UserError(f"--stride {stride} is out of range: it takes 1 to {room - 1} with this --ctx")
    if bos_rule != "none" and tokenizer.bos_id is None:
        raise UserError(f"--bos {bos_rule} needs a BOS token, and this tokenizer has none; use --bos none")
    ids = tokenizer.encode(read_text(file))
    if ids and max(ids) >= setup.config.vocab_size:
        raise UserError(
            f"token {max(ids)} of {file} is beyond the model's embedding of {setup.config.vocab_size:,} rows: "
            f"{tokenizer.source} does not belong to this checkpoint"
        )
    windows = make_windows(ids, setup.ctx, count, stride, tokenizer.bos_id, bos_rule)
    if not windows:
        raise UserError(f"{file} is too short: its {len(ids)} tokens leave nothing to predict")
    return windows


BOS_WORDS = {"none": "no BOS", "start": "BOS at the start", "window": "BOS in every window"}


def describe_windows(file: str, windows: Sequence[Window], ctx: int, bos_rule: str) -> str:
    count = "1 window" if len(windows) == 1 else f"{len(windows)} windows"
    return (
        f"text     {file} · {count} of {ctx:,} · {BOS_WORDS[bos_rule]}\n"
        f"         {sum(len(window.targets) for window in windows):,} tokens scored"
    )


def short_count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"


def show_status(line: str) -> None:
    """Progress on stderr, if that is a terminal: each line overwrites the one before; an empty one clears it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def show_share(what: str) -> Callable[[float], None]:
    """A listener for `perplexity` that shows how much is done and how long the rest will take."""
    started = time.perf_counter()

    def show(done: float) -> None:
        left = (time.perf_counter() - started) * (1 / done - 1)
        show_status(f"{what} · {done:.0%} · about {clock(left)} left")

    return show


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def exit_code(program: str, work: Callable[[], None], when_interrupted: str = "") -> int:
    """Do a command's work. 0: done; 2: a mistake of the user's, a full disk or full memory, told in one
    sentence; 130: Ctrl-C."""
    try:
        work()
    except UserError as error:
        complaint, code = str(error), 2
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        complaint, code = f"cannot read or write{where}: {error.strerror}; what was saved is intact", 2
    except (MemoryError, RuntimeError) as error:  # torch tells of full memory with a RuntimeError
        if isinstance(error, RuntimeError) and not any(w in str(error) for w in ("out of memory", "allocate memory")):
            raise
        complaint, code = "out of memory; take a smaller --ctx, fewer --windows or --dtype bfloat16", 2
    except KeyboardInterrupt:
        complaint, code = f"interrupted{when_interrupted}", 130
    else:
        return 0
    show_status("")
    print(f"{program}: {complaint}", file=sys.stderr)
    return code


# -------------------------------------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Perplexity of a checkpoint on a text.")
    text = add_run_arguments(parser, "heldout.txt", windows="all")
    text.add_argument("--stride", type=int, metavar="N", help="start a window every N tokens (default: no overlap)")
    text.add_argument("--bos", choices=list(BOS_WORDS), help="where BOS goes (default: the model family's rule)")
    args = parser.parse_args(argv)
    return exit_code("eval_ppl.py", lambda: evaluate(args))


def evaluate(args: argparse.Namespace) -> None:
    setup = prepare(args.ckpt, args.device, args.dtype, args.ctx)
    bos_rule = args.bos or setup.tokenizer.bos_rule
    windows = read_windows(setup, args.text, args.windows, args.stride, bos_rule)
    print(setup.description)
    print(describe_windows(args.text, windows, setup.ctx, bos_rule), flush=True)
    model = setup.load()
    started = time.perf_counter()
    result = perplexity(model, windows, show_share("perplexity"))
    show_status("")
    scored_bytes = sum(setup.tokenizer.byte_count(window.targets.tolist()) for window in windows)
    bits = result.nll / math.log(2) / scored_bytes
    print(f"ppl      {result.ppl:.4f} · {bits:.4f} bits per byte · {clock(time.perf_counter() - started)}")


if __name__ == "__main__":
    sys.exit(main())
