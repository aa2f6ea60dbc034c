"""Random damage to config.json and to the header of model.safetensors: either a UserError, or what stock transformers
makes of the same folder. Never another exception, never a silently different function.

    HARP_FUZZ=2000 pytest tests/test_fuzz.py    # 2,000 examples of each kind in place of a few dozen
"""

import copy
import json
import os
import random

import pytest
import torch
from conftest import FAMILIES, GOLDEN, TOLERANCE, write_bpe_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint import CONFIG_KEYS, FOREIGN_KEYS, UserError
from load_weights import load
from tokenizer import load_tokenizer

EXAMPLES = int(os.environ.get("HARP_FUZZ", 40))
fuzz = settings(
    max_examples=EXAMPLES,
    derandomize="HARP_FUZZ_SEED" not in os.environ,
    deadline=60_000,  # ms: a hang fails too
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
IDS = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))  # inside every vocabulary


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Keys without a say in the logits. Stock refuses some of their values; the reference is then the file without them.
BYSTANDERS = ["pad_token_id", "use_cache", "dtype", "torch_dtype", "architectures", "pretraining_tp"]


def stock_logits(folder) -> torch.Tensor:
    import transformers

    config = json.loads((folder / "config.json").read_text())
    config = {
        key: float(value) if key == "rms_norm_eps" else value  # stock does not take 1 for 1.0
        for key, value in config.items()
        if key not in BYSTANDERS and not (key in (*FOREIGN_KEYS, "head_dim") and not value)  # null is absent
    }
    (folder / "config.json").write_text(json.dumps(config))

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], "stock guessed a tensor that we took from the file"
    with torch.inference_mode():
        return model.eval()(IDS, use_cache=False).logits


def refused_or_as_stock(folder) -> str:
    try:
        model = load(folder, dtype=torch.float32)
    except UserError as error:
        assert str(folder) in str(error) or "config.json" in str(error)  # it says where
        return "refused"
    with torch.inference_mode():
        ours = model(IDS)
    theirs = stock_logits(folder)
    assert torch.equal(ours.isnan(), theirs.isnan())
    scale = theirs.nan_to_num().abs().max().clamp(min=1)
    assert ((ours - theirs).nan_to_num().abs().max() / scale) < TOLERANCE
    return "as stock"


# ------------------------------------------------------------------------------------------------------ config.json

ROPE = ["rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"]
ROPE += ["original_max_position_embeddings"]
OTHER_KEYS = ["rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "model_type", "dtype"]
OTHER_KEYS += ["original_max_position_embeddings", "pad_token_id", "torch_dtype", "architectures", "layer_types"]
OTHER_KEYS += ["is_causal", "pretraining_tp", "use_cache"]
KEYS = [row[0] for row in CONFIG_KEYS] + list(FOREIGN_KEYS) + OTHER_KEYS

numbers = st.one_of(
    st.sampled_from([0, 1, -1, 2, 3, 4, 5, 6, 7, 16, 24, 32, 64, 256, 320, 10**9, 2**63, 10**40]),
    st.sampled_from([0.0, -0.0, 0.5, 1.0, 4.0, 8.0, 1e-5, 1e4, 1e-320, 1e300, float("nan"), float("inf")]),
)
words = st.sampled_from(["", "4", "null", "silu", "gelu", "gelu_pytorch_tanh", "default", "linear", "llama3", "yarn"])
plain = st.one_of(st.none(), st.booleans(), numbers, words, st.sampled_from([*FAMILIES, "float32", "bfloat16"]))
ropes = st.dictionaries(st.sampled_from(ROPE), st.one_of(numbers, words, st.none()), max_size=5)
llama3 = st.builds(
    lambda change: {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 16} | change,
    st.one_of(st.just({}), ropes),
)  # fmt: skip
layers = st.lists(st.sampled_from(["full_attention", "sliding_attention", "linear_attention"]), min_size=4, max_size=6)
values = st.one_of(plain, st.lists(plain, max_size=3), ropes, llama3, layers)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("drop"), st.sampled_from(KEYS), st.none()),
        st.tuples(st.just("set"), st.sampled_from(KEYS), values),
        st.tuples(st.just("set"), st.sampled_from(["rope_scaling", "rope_parameters"]), st.one_of(ropes, llama3)),
        st.tuples(st.just("set"), st.text(max_size=8).filter(lambda key: not key.startswith("__")), values),
    ),
    min_size=1,
    max_size=3,
)


@fuzz
@given(family=st.sampled_from(FAMILIES), edits=edits)
def test_config(golden_copy_once, family, edits):
    folder = golden_copy_once(family)
    (folder / "model.safetensors").write_bytes((GOLDEN / family / "model.safetensors").read_bytes())
    config = json.loads((GOLDEN / family / "config.json").read_text())
    for action, key, value in edits:
        config.pop(key, None) if action == "drop" else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))
    refused_or_as_stock(folder)


@pytest.fixture(scope="session")
def golden_copy_once(tmp_path_factory):
    """family -> a folder with its weights, copied once; every example writes over what it spoils."""
    made = {}

    def make(family: str):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(f"fuzz-{family}")
            for name in ("config.json", "model.safetensors"):
                (made[family] / name).write_bytes((GOLDEN / family / name).read_bytes())
            stock_logits(made[family])  # its first import can take longer than the deadline
        return made[family]

    return make


# ----------------------------------------------------------------------------------------------- model.safetensors


def split_header(content: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def flip_bytes(content: bytes, rng: random.Random) -> bytes:
    content, header_end = bytearray(content), 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        where = rng.randrange(8) if rng.random() < 0.1 else rng.randrange(8, header_end)
        match rng.randrange(3):
            case 0:
                content[where] ^= 1 << rng.randrange(8)
            case 1:
                content.insert(where, rng.randrange(256))
            case 2:
                del content[where]
    return bytes(content)


def edit_header(content: bytes, rng: random.Random) -> bytes:
    """Valid JSON that says something else: another name, dtype, shape or place; a tensor less, twice, or one more."""
    header, data = split_header(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        whole = [name for name, entry in header.items() if isinstance(entry, dict) and len(entry) == 3]
        name, other = rng.choice(whole), rng.choice(whole)
        entry = header[name]
        match rng.randrange(10):
            case 0:
                entry["dtype"] = rng.choice(["F32", "F16", "BF16", "I32", "U8", "F64", "F8_E4M3", "F3", "", None, 7])
            case 1:
                entry["shape"] = rng.choice([[64, 64], [64], [1, 64], [], [-1], [0, 2**62], [2**63], None, "64"])
            case 2:
                entry["data_offsets"] = rng.choice([[0, 4], [4, 0], [0], [-4, 0], [2**62, 2**62 + 4], None, "0, 4"])
            case 3:
                header[name], header[other] = header[other], header[name]  # often of the same shape: a legal change
            case 4:
                del header[name]
            case 5:
                header[rng.choice(["lm_head.weight", "x", "", name + "_scale", "model." + name])] = header.pop(name)
            case 6:
                header["__metadata__"] = rng.choice([{}, {"format": "tf"}, {"format": "pt"}, {"a": 1}, None, [], "pt"])
            case 7:
                entry.pop(rng.choice(list(entry)))
            case 8:
                header[name] = rng.choice([None, [], {}, "tensor", 0])
            case 9:
                entry["shape"], entry["data_offsets"] = header[other]["shape"], header[other]["data_offsets"]
    text = json.dumps(header)
    if rng.random() < 0.1:  # the first tensor's entry once more
        text = text[:-1] + ", " + text[1:].partition("}")[0] + "}}"
    return with_header(text.encode(), data)


def resize(content: bytes, rng: random.Random) -> bytes:
    size = rng.choice([0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, len(content) + 1, len(content) + 4096])
    if rng.random() < 0.3:  # a hole: the size is right, the bytes never came
        start = rng.randrange(len(content))
        return content[:start] + bytes(len(content) - start)
    return content[:size] + bytes(max(0, size - len(content)))


@fuzz
@given(family=st.sampled_from(FAMILIES), damage=st.sampled_from([flip_bytes, edit_header, resize]), seed=st.integers(0))
def test_weights(golden_copy_once, family, damage, seed):
    folder = golden_copy_once(family)
    (folder / "config.json").write_bytes((GOLDEN / family / "config.json").read_bytes())
    content = damage((GOLDEN / family / "model.safetensors").read_bytes(), random.Random(seed))
    (folder / "model.safetensors").write_bytes(content)
    refused_or_as_stock(folder)


# --------------------------------------------------------------------------------------------------- tokenizer files

TEXT = "It's 12345 things:\n\n  don't DON'T\t<s> été 日本 \U0001f600 \r\n x² zyzzyva  "
JUNK = [None, True, False, 0, 1, -1, 2.5, "", "x", "a b", [], ["a"], {}, {"type": "x"}, "ByteLevel", "Isolated", "BPE"]
SPLITS = (r"\s", "[a&&b]", "(")
JUNK += [{"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False} for r in SPLITS]
# Places without a say in the ids, and flags: there the reference library refuses junk that we do not look at.
UNREAD = {"version", "truncation", "padding", "decoder", "unk_token", "dropout"}
UNREAD |= {"continuing_subword_prefix", "end_of_word_suffix"}
FLAGS = {"single_word", "lstrip", "rstrip", "normalized", "special", "byte_fallback", "ignore_merges", "fuse_unk"}
FLAGS |= {"trim_offsets", "use_regex"}


def places(value, path=()):
    """Every place of a JSON value, of long lists and objects only some."""
    if path:
        yield path
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, item in items if len(items) < 30 else items[:2] + items[-2:] + items[40:42]:
        yield from places(item, (*path, key))


def put(value, path, junk, drop: bool) -> None:
    for key in path[:-1]:
        value = value[key]
    if drop:
        del value[path[-1]]
    else:
        value[path[-1]] = junk


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz-tokenizer")
    (folder / "config.json").write_bytes((GOLDEN / "llama" / "config.json").read_bytes())
    write_bpe_tokenizer(folder, digits=True)
    names = ("tokenizer.json", "tokenizer_config.json")
    return folder, {name: json.loads((folder / name).read_text()) for name in names}


@fuzz
@given(data=st.data())
def test_tokenizer_files(tokenizer_folder, data):
    """Whatever stands where in tokenizer.json: refused, or the ids that the reference library gives."""
    from tokenizers import Tokenizer

    folder, contents = tokenizer_folder
    reference_content = copy.deepcopy(contents["tokenizer.json"])
    for name, content in contents.items():
        content = copy.deepcopy(content)
        for _ in range(data.draw(st.integers(0, 2))):
            place = data.draw(st.sampled_from(list(places(content))))
            junk, drop = data.draw(st.sampled_from(JUNK)), data.draw(st.integers(0, 4)) == 0
            put(content, place, copy.deepcopy(junk), drop)
            no_flag = place[-1] in FLAGS and (drop or not isinstance(junk, bool))
            if name == "tokenizer.json" and not no_flag and not UNREAD & set(place):
                put(reference_content, place, copy.deepcopy(junk), drop)
        (folder / name).write_text(json.dumps(content))
    try:
        ids = load_tokenizer(folder).encode(TEXT)
    except UserError as error:
        assert str(folder) in str(error) or "the tokenizer has no token" in str(error)
        return
    reference = Tokenizer.from_str(json.dumps(reference_content))
    reference.encode_special_tokens = True  # take special tokens' names for text, as we do
    assert ids == reference.encode(TEXT, add_special_tokens=False).ids
