"""What a long run keeps on disk, so that it can be interrupted and nothing is lost or mixed up."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpoint import TOKENIZER_FILES, Checkpoint, UserError, fits
from eval_ppl import Setup, dtype_name


def run_identity(setup: Setup, text: str, heldout: str, **choices: object) -> dict:
    """Everything that decides a run's result. A state with another identity is never continued."""
    path = setup.checkpoint.path
    return {
        "config": file_hash(path / "config.json"),
        "weights": sampled_hash(setup.checkpoint),
        "tokenizer": [file_hash(path / name) for name in TOKENIZER_FILES if (path / name).exists()],
        "text": file_hash(text),
        "heldout text": file_hash(heldout),
        "ctx": setup.ctx,
        "BOS rule": setup.tokenizer.bos_rule,
        "dtype": dtype_name(setup.dtype),
        "device": setup.device.type,
        **choices,
    }


def file_hash(file: str | Path) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def sampled_hash(checkpoint: Checkpoint) -> str:
    """Which weights these are: every file's name, size and 64 samples of 4 KB, since 16 GB take minutes to hash."""
    digest = hashlib.sha256()
    for file in sorted({tensor.file for tensor in checkpoint.tensors.values()}):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as handle:
            for sample in range(64):
                handle.seek(sample * max(0, size - 4096) // 63)
                digest.update(handle.read(4096))
    return digest.hexdigest()


def differences(found: dict, identity: dict) -> str:
    """In what an earlier run was another one; empty if in nothing."""
    return ", ".join(
        f"{key} ({found.get(key)} there, {now} here)" if isinstance(now, int) or key == "dtype" else key
        for key, now in identity.items()
        if found.get(key) != now
    )


STATE_SHAPE = {
    "identity": dict,
    "steps": [{"layer": int, "alpha": float, "ppl": float, "tried": [list], "seconds": float}],
}


def earlier_report(folder: Path, identity: dict) -> dict | None:
    """The report that an earlier run of the same identity left in `folder`, or None if there is no such folder or
    nothing in it. Raises UserError if the folder is anything else; it is left as it is."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder with --out")
    if not folder.exists() or not any(folder.iterdir()):
        return None
    state = folder / "harp.json"
    if not state.exists():
        raise UserError(f"{folder} exists and is no run of harp.py; name another folder with --out")
    try:
        report = json.loads(state.read_bytes())
    except ValueError:  # a crash of the whole machine may leave half a file
        report = None
    if not fits(report, STATE_SHAPE):
        raise UserError(f"{state} is damaged; delete the folder, or name another one with --out")
    found = report["identity"]
    if other := differences(found, identity):
        # --dtype auto depends on the memory that is free
        same = f"take --dtype {found['dtype']}, or " if found.get("dtype") not in (None, identity["dtype"]) else ""
        raise UserError(f"{folder} holds a run that differs in {other}; {same}name another folder with --out")
    return report


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Make a folder and keep other runs out of it. The lock ends with the process, in whatever way that ends. Raises
    UserError if another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing to {folder}; wait for it, or take another --out") from None
        yield
    finally:
        os.close(descriptor)


def replace_json(file: Path, content: dict) -> None:
    """All of it or nothing: a crash while writing leaves the old file in place."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)
