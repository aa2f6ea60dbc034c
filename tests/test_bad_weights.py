"""Weight files in the states in which disks, downloads and other people's tools leave them: one sentence each."""

import json
import os

import pytest
import torch
from conftest import GOLDEN, rewrite_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoint import UserError, check_values, open_checkpoint
from load_weights import load

WHOLE = (GOLDEN / "llama" / "model.safetensors").read_bytes()
HEADER_END = 8 + int.from_bytes(WHOLE[:8], "little")
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def weights(change):
    """A fault made by editing the dict of tensors."""
    return lambda folder: rewrite_weights(folder, change)


def content(data: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def header(change):
    """A fault made by editing the header as JSON; the data stays."""

    def spoil(folder):
        entries = json.loads(WHOLE[8:HEADER_END])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + WHOLE[HEADER_END:])

    return spoil


def instead(*names, keep_weights: bool = False):
    """Other files in place of model.safetensors."""

    def spoil(folder):
        if not keep_weights:
            (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_bytes(b"{}")

    return spoil


def shards(folder, n: int = 2, index: bool = True):
    """Split the weights into n files, with an index or without."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(n):
        file = f"model-{i + 1:05d}-of-{n:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[i::n]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def indexed(change):
    """A fault in the index of two shards; `change` edits its weight_map or returns another index."""

    def spoil(folder):
        shards(folder)
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        file.write_text(json.dumps(change(index["weight_map"]) or index))

    return spoil


def without_second_shard(folder, index: bool = True):
    shards(folder, index=index)
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_unfinished_shard(folder):
    without_second_shard(folder)
    (folder / "model-00002-of-00002.safetensors.incomplete").write_bytes(WHOLE[:99])


def twice_in_two_files(folder):
    shards(folder, index=False)
    second = folder / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {DOWN_PROJ: torch.ones(2), "lm_head.weight": torch.ones(2)}, second)


def link_to_nowhere(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/0123abcd")


def directory(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")  # reading it would wait forever


def as_dtype(dtype):
    return weights(lambda w: w.update({DOWN_PROJ: w[DOWN_PROJ].to(dtype)}))


def renamed(old: str, new: str):
    return weights(lambda w: [w.update({name.replace(old, new): w.pop(name)}) for name in list(w)])


def offset(name: str, start: int, end: int):
    return header(lambda h: h[name].update(data_offsets=[start, end]))


SIZE = f"{len(WHOLE):,} expected"
STRAY = torch.ones(4)
FAULTS = {
    # what lies in the file's place
    "pointer": (content(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "git lfs pull"),
    "web page": (content(b"<!DOCTYPE html>" + b"x" * 500), "web page"),
    "error message": (content(b'{"error":"Invalid username or password."}'), "web page or an error message"),
    "empty": (content(b""), "0 bytes.*it is empty"),
    "4 bytes": (content(b"1234"), r"\(4 bytes\)"),
    "all zeros": (content(bytes(len(WHOLE))), "begins with zeros only"),
    "a byte short": (content(WHOLE[:-1]), rf"\({len(WHOLE) - 1:,} bytes, {SIZE}\)"),
    "half": (content(WHOLE[: len(WHOLE) // 2]), rf"\({len(WHOLE) // 2:,} bytes, {SIZE}\)"),
    "half a header": (content(WHOLE[: HEADER_END // 2]), rf"\({HEADER_END // 2:,} bytes, "),
    "padded": (content(WHOLE + bytes(16)), rf"\({len(WHOLE) + 16:,} bytes, {SIZE}\)"),
    "random bytes": (content(bytes(range(256)) * 50), "not a complete safetensors file"),
    "link to nowhere": (link_to_nowhere, r"is a link to ../../blobs/0123abcd"),
    "directory": (directory, "model.safetensors is not a file"),
    "pipe": (pipe, "model.safetensors is not a file"),
    # other files in its place, and beside it
    "nothing": (instead(), "has no model.safetensors"),
    "only pickles": (instead("pytorch_model-00001-of-00002.bin"), "pytorch_model-00001-of-00002.bin: pickled"),
    "only pth": (instead("consolidated.00.pth", "params.json"), "another layout"),
    "only consolidated": (instead("consolidated.safetensors"), "another layout"),
    "only GGUF": (instead("llama-q4.gguf"), "GGUF files are not read"),
    "only flax": (instead("flax_model.msgpack"), "only safetensors"),
    "unfinished": (instead("model.safetensors.incomplete"), "download is not finished"),
    "unfinished shard": (with_unfinished_shard, "lacks 1 of 2 weight files .model-00002-of-00002.safetensors"),
    "odd shard numbers": (instead("model-1-of-x.safetensors"), "has no model.safetensors"),
    "adapter": (instead("adapter_config.json", "adapter_model.safetensors"), "merge it into its base model"),
    "adapter beside": (instead("adapter_config.json", keep_weights=True), "merge it into its base model"),
    "two sets": (lambda f: shards(f) or content(WHOLE)(f), "both model.safetensors and an index"),
    # shards and their index
    "shard missing": (without_second_shard, "lacks 1 of 2 weight files"),
    "shard missing, no index": (lambda f: without_second_shard(f, index=False), "lacks 1 of 2 weight files"),
    "tensor twice": (twice_in_two_files, "is in both model-00001-of-00002.safetensors and model-00002"),
    "index names a tensor too many": (indexed(lambda m: m.update(x="model-00001-of-00002.safetensors")), "x is not in"),
    "index lacks a tensor": (indexed(lambda m: m.pop(DOWN_PROJ) and None), "down_proj.weight is not in the index"),
    "index names 30 files": (indexed(lambda m: m.update({str(i): f"{i}.safetensors" for i in range(28)})), "28 of 30"),
    "index without a map": (indexed(lambda m: {"metadata": {}}), "no weight_map"),
    "index with an empty map": (indexed(lambda m: {"weight_map": {}}), "no weight_map"),
    "index of numbers": (indexed(lambda m: {"weight_map": {"a": 1}}), "no weight_map"),
    "index of lists": (indexed(lambda m: {"weight_map": {"a": ["x"]}}), "no weight_map"),
    "index of paths": (indexed(lambda m: {"weight_map": {"a": "../x.safetensors"}}), "no weight_map"),
    "index of pickles": (indexed(lambda m: {"weight_map": {"a": "pytorch_model.bin"}}), "no weight_map"),
    "index is a list": (indexed(lambda m: ["weight_map"]), "does not hold a JSON object"),
    # tensors
    "missing": (weights(lambda w: w.pop(DOWN_PROJ)), f"lacks 1 tensors .*{DOWN_PROJ}"),
    "stray scale": (weights(lambda w: w.update({f"{DOWN_PROJ}_scale": STRAY})), f"does not ask for: {DOWN_PROJ}_scale"),
    "stray freqs": (weights(lambda w: w.update({"rope.other": STRAY})), "does not ask for: rope.other"),
    "key norm": (weights(lambda w: w.update({"model.layers.0.self_attn.k_norm.weight": STRAY})), "k_norm"),
    "multimodal names": (renamed("model.", "language_model.model."), "lacks .* tensors"),
    "Meta's names": (renamed("self_attn.q_proj", "attention.wq"), "lacks 5 tensors .*q_proj"),
    "other shape": (weights(lambda w: w.update({DOWN_PROJ: w[DOWN_PROJ].T.contiguous()})),
                    r"down_proj.weight in .*model.safetensors has shape \[128, 64\], .* makes it \[64, 128\]"),
    "scalar": (weights(lambda w: w.update({DOWN_PROJ: torch.tensor(1.0)})), r"has shape \[\]"),
    "no entries": (weights(lambda w: w.update({DOWN_PROJ: torch.zeros(0, 128)})), r"is empty \(shape \[0, 128\]\)"),
    "no tensors": (lambda f: save_file({}, f / "model.safetensors"), "num_hidden_layers = 5, but there are 0 tensors"),
    # quantised, or in no dtype of ours
    **{f"stored as {t}": (as_dtype(t), "down_proj.weight in .* is stored as .*quantised or integer")
       for t in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64,
                 torch.float8_e4m3fn, torch.float8_e5m2)},
    "unknown dtype": (header(lambda h: h[DOWN_PROJ].update(dtype="Q4")), "unknown variant `Q4`"),
    # headers that are JSON and wrong
    "offsets of another": (offset(DOWN_PROJ, 0, 32768), "not a complete safetensors file.*offset"),
    "offsets swapped": (offset(DOWN_PROJ, 32768, 0), "not a complete safetensors file"),
    "offsets beyond": (offset("model.norm.weight", 0, 1 << 60), "not a complete safetensors file"),
    "negative shape": (header(lambda h: h[DOWN_PROJ].update(shape=[-1, 2])), "not a complete safetensors file"),
    "huge shape": (header(lambda h: h[DOWN_PROJ].update(shape=[2**40, 2**40])), "not a complete safetensors file"),
    "huge and empty": (header(lambda h: h.update(x=dict(dtype="F32", shape=[0, 2**63], data_offsets=[0, 0]))), "x in"),
    "no shape": (header(lambda h: h[DOWN_PROJ].pop("shape")), "not a complete safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_refused(golden_copy, fault):
    spoil, complaint = FAULTS[fault]
    folder = golden_copy("llama")
    spoil(folder)
    with pytest.raises(UserError, match=complaint) as error:
        load(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_a_download_cache_is_not_the_checkpoint(golden_copy, tmp_path):
    """models--org--name/{blobs,refs,snapshots/<revision>}: the files are links into blobs."""
    cache = tmp_path / "models--org--name"
    snapshot = cache / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for file in golden_copy("llama").iterdir():
        file.rename(cache / "blobs" / file.name)
        (snapshot / file.name).symlink_to(cache / "blobs" / file.name)
    load(snapshot)
    for wrong, complaint in ((cache, "download cache"), (cache / "blobs" / "..", "download cache")):
        with pytest.raises(UserError, match=complaint):
            load(wrong)
    (cache / "blobs" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="is a link to .*blobs"):
        load(snapshot)
    (cache / "blobs" / "config.json").unlink()
    with pytest.raises(UserError, match="config.json is a link to .*blobs"):
        load(snapshot)


@pytest.mark.parametrize("name", ["nowhere", "a" * 300, "nul\0byte"])
def test_a_folder_that_cannot_be(tmp_path, name):
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / name)


def test_files_beside_the_weights_are_left_alone(golden_copy):
    """Meta's own files, pickles and other frameworks' may lie beside a complete set of shards, index or not."""
    for index in (True, False):
        folder = golden_copy("llama")
        shards(folder, 3, index)
        for name in ("consolidated.safetensors", "pytorch_model.bin", "flax_model.msgpack", "x.safetensors.incomplete"):
            (folder / name).write_bytes(b"not read")
        load(folder)
        folder.rename(folder.with_name(f"done-{index}"))


# ---------------------------------------------------------------------------------------------------- what is in them


def check_all(folder, dtype=torch.float32) -> None:
    checkpoint = open_checkpoint(folder)
    for name, stored in checkpoint.tensors.items():
        with safe_open(stored.file, framework="pt") as handle:
            check_values(checkpoint, name, handle.get_tensor(name).to(dtype))


def fill(name: str, value: float, entries: slice = slice(None)):
    def change(weights):
        weights[name].view(-1)[entries] = value

    return change


ONE = slice(7, 8)
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    "family, change, dtype, complaint",
    [
        ("llama", fill(DOWN_PROJ, float("nan"), ONE), torch.float32, f"{DOWN_PROJ} in .*model.safetensors holds NaN"),
        ("llama", fill(EMBEDDING, float("inf"), ONE), torch.float32, "holds NaN or infinity as float32"),
        ("llama", fill(f"{ATTENTION}.q_proj.weight", -float("inf")), torch.bfloat16, "holds NaN or infinity"),
        ("llama", fill(NORM, float("nan")), torch.float16, "holds NaN or infinity as float16"),
        ("qwen2", fill(f"{ATTENTION}.q_proj.bias", float("nan"), ONE), torch.float32, "q_proj.bias in .* NaN"),
        ("llama", fill(DOWN_PROJ, 1e6, ONE), torch.float16, "infinity as float16; .*float32"),  # overflows
        ("llama", fill(DOWN_PROJ, 1e6, ONE), torch.bfloat16, None),
        ("llama", fill(EMBEDDING, 0.0), torch.float32, f"{EMBEDDING} in .* nothing but zeros"),
        ("llama", fill(DOWN_PROJ, 0.0), torch.bfloat16, "nothing but zeros"),
        ("llama", fill(DOWN_PROJ, -0.0), torch.float32, "nothing but zeros"),
        ("llama", fill(NORM, 0.0), torch.float32, "nothing but zeros"),
        ("mistral", fill("model.layers.3.input_layernorm.weight", 0.0), torch.float32, "nothing but zeros"),
        ("gemma2", fill(EMBEDDING, 0.0), torch.float32, "nothing but zeros"),
        # zeros that someone may mean
        ("gemma2", fill(NORM, 0.0), torch.float32, None),  # multiplies by 1 + 0
        ("llama", lambda weights: weights[DOWN_PROJ].clamp_(max=0), torch.float32, None),  # zeros and others
        ("llama", fill(HEAD, 0.0), torch.float32, None),
        ("llama", fill(f"{ATTENTION}.q_proj.weight", 0.0), torch.float32, None),
        ("llama", fill(f"{ATTENTION}.k_proj.weight", 0.0), torch.float32, None),
        ("llama", fill(f"{ATTENTION}.o_proj.weight", 0.0), torch.float32, None),
        ("qwen2", fill(f"{ATTENTION}.v_proj.bias", 0.0), torch.float32, None),
        ("llama", fill(EMBEDDING, 0.0, slice(64)), torch.float32, None),  # one row: a padding token's
    ],
)
def test_values(golden_copy, family, change, dtype, complaint):
    folder = golden_copy(family)
    rewrite_weights(folder, change)
    if complaint is None:
        return check_all(folder, dtype)
    with pytest.raises(UserError, match=complaint) as error:
        check_all(folder, dtype)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_a_file_whose_tail_never_came(golden_copy, family):
    """Downloads that reserve their space leave zeros: the size is right, and the last tensors are empty."""
    folder = golden_copy(family)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) * 9 // 10] + bytes(len(whole) - len(whole) * 9 // 10))
    with pytest.raises(UserError, match="nothing but zeros, so that part of the file is missing"):
        check_all(folder)
