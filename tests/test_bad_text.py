"""Texts of any bytes, and tokenizer files in any state: every character comes back, or one sentence says why not."""

import io
import json
import unicodedata

import pytest
import sentencepiece
from conftest import TRAINING_TEXT, write_bpe_tokenizer

from checkpoint import UserError
from tokenizer import load_tokenizer, read_text

PROSE = "It is a truth universally acknowledged.\r\nHé said “no”.\n"

# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    "content, text",
    [
        (b"", ""),
        (b"a", "a"),
        (b"\n", "\n"),
        (b"\xef\xbb\xbfa", "a"),
        ("a\ufeffb".encode(), "a\ufeffb"),  # only at the start is it a mark
        (b"a\r\nb\rc\nd\x0b\x0c\x85".replace(b"\x85", b"\xc2\x85"), "a\r\nb\rc\nd\x0b\x0c\x85"),
        (b"a\0b", "a\0b"),
        (bytes(1000), "\0" * 1000),
        (b"ab\0\0" * 9, "ab\0\0" * 9),  # NULs, and yet no UTF-16
        (b" \t two  spaces  ", " \t two  spaces  "),
        ("日本\u2028\u2029\U0001f600\uffff".encode(), "日本\u2028\u2029\U0001f600\uffff"),
        (b"<html> may be what one measures", "<html> may be what one measures"),
        (b"\x7f\x1b[0m\x04", "\x7f\x1b[0m\x04"),
    ],
)
def test_text_is_read_as_it_is(tmp_path, content, text):
    (tmp_path / "text").write_bytes(content)
    assert read_text(tmp_path / "text") == text


@pytest.mark.parametrize(
    "content, complaint",
    [
        (PROSE.encode("utf-16"), "is UTF-16 text; convert it"),
        (PROSE.encode("utf-16-le"), "is UTF-16 text; convert it"),  # valid UTF-8, with a NUL after every letter
        (PROSE.encode("utf-16-be"), "is UTF-16 text; convert it"),
        (b"\xfe\xff" + PROSE.encode("utf-16-be"), "is UTF-16 text; convert it"),
        (PROSE.encode("utf-32"), "is UTF-32 text; convert it"),
        (PROSE.encode("utf-32-le"), "is UTF-32 text; convert it"),
        (PROSE.encode("utf-32-be"), "is UTF-32 text; convert it"),
        (b"Caf\xe9", "byte 3 is 0xE9; if it is Latin-1"),
        (b"He said \x93no\x94", "byte 8 is 0x93; if it is Latin-1 or Windows-1252"),
        ("日本".encode("shift_jis"), "not UTF-8 text: byte 0 is 0x93"),
        ("cut in the middle: é".encode()[:-1], "not UTF-8 text: byte 19 is 0xC3"),
        (b"a surrogate \xed\xa0\x80", "not UTF-8 text: byte 12 is 0xED"),
        (b"overlong \xc0\x80", "not UTF-8 text: byte 9 is 0xC0"),
        (b"\x1f\x8b\x08\x00gzip", "not UTF-8 text: byte 1 is 0x8B"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_text_that_is_not_utf_8(tmp_path, content, complaint):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(UserError, match=complaint) as error:
        read_text(tmp_path / "text")
    assert "\n" not in str(error.value) and str(tmp_path / "text") in str(error.value)


def test_text_that_is_no_file(tmp_path):
    for file in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="cannot read the text"):
            read_text(file)


# ------------------------------------------------------------------------------------------------- there and back again


def train_sentencepiece(folder, **settings) -> None:
    """A small model of the kind of Llama 2's, Mistral's and Gemma's: BPE, nothing normalised, bytes to fall back on."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT.split("\n")),
        model_writer=model,
        minloglevel=2,
        **dict(vocab_size=420, model_type="bpe", byte_fallback=True, character_coverage=1.0)
        | dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
        | settings,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    """Both engines, over small vocabularies: "bpe", "bpe-nfc" (Qwen2) and "sentencepiece"."""
    made = {}
    for kind in ("bpe", "bpe-nfc", "sentencepiece"):
        folder = tmp_path_factory.mktemp(kind)
        config = {"model_type": "mistral" if kind == "sentencepiece" else "llama", "bos_token_id": 1}
        (folder / "config.json").write_text(json.dumps(config))
        if kind == "sentencepiece":
            train_sentencepiece(folder)
        else:
            write_bpe_tokenizer(folder)
            stored = json.loads((folder / "tokenizer.json").read_text())
            stored["normalizer"] = {"type": "NFC"} if kind == "bpe-nfc" else None
            (folder / "tokenizer.json").write_text(json.dumps(stored))
        made[kind] = load_tokenizer(folder)
    return made


CHARACTERS = [chr(c) for c in (*range(0x3100), *range(0x3100, 0x110000, 23)) if not 0xD800 <= c < 0xE000]
KINDS = pytest.mark.parametrize("kind", ["bpe", "bpe-nfc", "sentencepiece"])


def after_normalising(kind: str, text: str) -> str:
    """Sentencepiece writes a space as U+2581, and so reads that character as a space."""
    return {"bpe-nfc": unicodedata.normalize("NFC", text), "sentencepiece": text.replace("\u2581", " ")}.get(kind, text)


@KINDS
def test_every_character_comes_back(engines, kind):
    text = "x".join(CHARACTERS)
    assert engines[kind].decode(engines[kind].encode(text)) == after_normalising(kind, text)


TEXTS = {
    "empty": "",
    "one letter": "a",
    "a space": " ",
    "spaces around": "  a  ",
    "line ends": "a\r\nb\n\n\rc\n",
    "NUL": "\0a\0\0",
    "special tokens": "<s></s><unk><|endoftext|><|begin_of_text|><bos>[INST]<0x0A>",
    "decomposed": "e\u0301 \u1112\u1161\u11ab",
    "emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "controls": "".join(map(chr, range(32))) + "\x7f\x85\u200b\u2028\ufeff\ufffd\ufffe",
}


@KINDS
@pytest.mark.parametrize("name", TEXTS)
def test_texts_come_back(engines, kind, name):
    tokenizer, text = engines[kind], TEXTS[name]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == after_normalising(kind, text)
    assert tokenizer.bos_id not in ids and (len(ids) > 0) == (text != "")


@KINDS
@pytest.mark.parametrize("run", [" ", "\n", "\t", "a", "1", "!", "\u3000", "\u00a0", "\0", "日", "\U0001f600", "a\r\n"])
def test_a_long_run_comes_back(engines, kind, run):
    text = run * 100_000
    assert engines[kind].decode(engines[kind].encode(text)) == text


@KINDS
def test_half_a_character_is_refused(engines, kind):
    with pytest.raises(UserError, match=r"character 3 of the text is '\\udcff', half a character"):
        engines[kind].encode("abc\udcff")  # how Python reads a command line that is not UTF-8


def test_a_character_without_a_token_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    train_sentencepiece(tmp_path, byte_fallback=False)
    with pytest.raises(UserError, match=r"no token for '日' \(U\+65E5\), at character 2"):
        load_tokenizer(tmp_path).encode("ab日 日")


def test_added_words_are_read_from_a_text_and_special_tokens_are_not(tmp_path):
    from tokenizers import AddedToken, Tokenizer

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    write_bpe_tokenizer(tmp_path)
    reference = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    reference.add_tokens([AddedToken(word, normalized=False) for word in ("<call>", "    ", "  ", "<call>s")])
    reference.save(str(tmp_path / "tokenizer.json"))
    reference.encode_special_tokens = True
    text = "a<call>b <s>\n       x<call>s  </s><call"
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.byte_count(tokenizer.encode(text)) == len(text)


# ----------------------------------------------------------------------------------------------------- tokenizer files


def set_at(*path_and_value):
    """Put a value at a place of tokenizer.json; ... removes what is there."""
    *path, last, value = path_and_value

    def spoil(folder):
        stored = json.loads((folder / "tokenizer.json").read_text())
        at = stored
        for key in path:
            at = at[key]
        if value is ...:
            del at[last]
        else:
            at[last] = value
        (folder / "tokenizer.json").write_text(json.dumps(stored))

    return spoil


def write(name: str, content):
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / name).write_bytes(content)


def split_by(regex: str, **changes):
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} | changes
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return set_at("pre_tokenizer", {"type": "Sequence", "pretokenizers": [step, byte_level]})


def only(name: str, content: bytes):
    def spoil(folder):
        (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes(content)

    return spoil


def old_pair(vocab, merges: bytes, **settings):
    def spoil(folder):
        (folder / "tokenizer.json").unlink()
        write("vocab.json", vocab)(folder)
        write("merges.txt", merges)(folder)
        write("tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"} | settings)(folder)

    return spoil


def template(single):
    return set_at("post_processor", {"type": "TemplateProcessing", "single": single})


def directory(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").mkdir()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
VOCAB = {"a": 0, "b": 1, "ab": 2}
SPLIT = "splits text by"
DAMAGED = {
    # other files in its place
    "tokenizer.json is a pointer": (write("tokenizer.json", POINTER), "git lfs pull"),
    "tokenizer.json is a web page": (write("tokenizer.json", b"<!DOCTYPE html>"), "web page"),
    "tokenizer.json is empty": (write("tokenizer.json", b""), "it is empty"),
    "tokenizer.json is cut": (write("tokenizer.json", b'{"model": {"vocab": {"a": 0,'), "not valid JSON"),
    "tokenizer.json is a list": (write("tokenizer.json", []), "JSON object"),
    "tokenizer.json is a directory": (directory, "tokenizer.json is not a file"),
    "tokenizer.model is a pointer": (write("tokenizer.model", POINTER), "git lfs pull"),
    "tokenizer.model is a web page": (write("tokenizer.model", b"<html>"), "web page"),
    "tokenizer.model is empty": (write("tokenizer.model", b""), "it is empty"),
    "tokenizer.model is zeros": (write("tokenizer.model", bytes(999)), "zeros only"),
    "tokenizer.model is noise": (write("tokenizer.model", bytes(range(256)) * 9), "neither a sentencepiece model nor"),
    "tiktoken, cut": (only("tokenizer.model", b"YQ== 0\nYg== 1\nYW"), "not a token and its rank"),
    "tiktoken, ranks": (only("tokenizer.model", b"YQ== 0\nYg== 2\n"), "do not count from 0 up"),
    "tiktoken, twice": (only("tokenizer.model", b"YQ== 0\nYQ== 1\n"), "do not count from 0 up"),
    "tiktoken, another BOS": (only("tokenizer.model", b"YQ== 0\nYg== 1\n"), "known only as Llama 3's"),
    "tekken": (only("tekken.json", b"{}"), "has no tokenizer"),
    # tokenizer.json of another kind
    "no model": (set_at("model", ...), "it has no model"),
    "model is a list": (set_at("model", []), "it has no model"),
    "WordPiece": (set_at("model", "type", "WordPiece"), "not a byte-level BPE tokenizer"),
    "byte fallback": (set_at("model", "byte_fallback", True), "put tokenizer.model"),
    "dropout": (set_at("model", "dropout", 0.1), "dropout = 0.1"),
    "suffix": (set_at("model", "end_of_word_suffix", "</w>"), "end_of_word_suffix"),
    "lower case": (set_at("normalizer", {"type": "Lowercase"}), "normalises text by a rule that is not supported"),
    "NFC in a list": (set_at("normalizer", ["NFC"]), "its normalizer is no list of steps"),
    # the vocabulary
    "vocab is a list": (set_at("model", "vocab", ["a"]), "is damaged"),
    "no vocab": (set_at("model", "vocab", ...), "is damaged"),
    "id is text": (set_at("model", "vocab", "a", "7"), "not a whole number"),
    "id is true": (set_at("model", "vocab", "a", True), "not a whole number"),
    "id is below 0": (set_at("model", "vocab", "a", -1), "from 0 up"),
    "id twice": (set_at("model", "vocab", "a", 7), "share one"),
    "raw token": (set_at("model", "vocab", "日本", 1000), "not a byte-level vocabulary: it holds the token '日本'"),
    "no merges": (set_at("model", "merges", []), "with merges"),
    "merges are numbers": (set_at("model", "merges", 0, 5), "the merge 5"),
    "merge of three": (set_at("model", "merges", 0, "a b c"), "the merge"),
    "merge of one": (set_at("model", "merges", 0, ["a"]), "the merge"),
    "merge of strangers": (set_at("model", "merges", 0, ["a", "日"]), "the merge"),
    "merge into nothing": (set_at("model", "merges", 0, "q q"), "the merge .'q', 'q'. is not of two tokens"),
    "merges is a dict": (set_at("model", "merges", {"a": "b"}), "is damaged"),
    "ignore_merges": (set_at("model", "ignore_merges", "yes"), "is damaged"),
    "added is null": (set_at("added_tokens", None), "added tokens are no list"),
    "added without id": (set_at("added_tokens", 0, "id", ...), "added tokens are no list"),
    "added as text": (set_at("added_tokens", ["<s>"]), "added tokens are no list"),
    "added word": (set_at("added_tokens", 0, {"content": "x", "id": 9, "special": False, "rstrip": True}), "take"),
    # how a text is cut
    "no pre_tokenizer": (set_at("pre_tokenizer", None), "must end in ByteLevel"),
    "pre_tokenizer is text": (set_at("pre_tokenizer", "ByteLevel"), "its pre_tokenizer is no list of steps"),
    "no steps": (set_at("pre_tokenizer", "pretokenizers", 5), "its pre_tokenizer is no list of steps"),
    "no ByteLevel": (set_at("pre_tokenizer", {"type": "Digits", "individual_digits": True}), "must end in ByteLevel"),
    "ByteLevel first": (set_at("pre_tokenizer", "pretokenizers", [
        {"type": "ByteLevel", "add_prefix_space": False}, {"type": "Digits", "individual_digits": True}]), SPLIT),
    "prefix space": (set_at("pre_tokenizer", {"type": "ByteLevel", "add_prefix_space": True}), SPLIT),
    "Metaspace": (set_at("pre_tokenizer", {"type": "Metaspace"}), SPLIT),
    "split is no regex": (split_by("(a"), "which is no regular expression"),
    "split is a number": (set_at("pre_tokenizer", {"type": "Split", "pattern": {"Regex": 5}}), SPLIT),
    "split is a string": (split_by("", pattern={"String": " "}), SPLIT),
    "split removes": (split_by(" ", behavior="Removed"), SPLIT),
    "split inverted": (split_by(r"\S+", invert=True), SPLIT),
    "escaped twice": (split_by(r"\\p{L}+|\\s+"), r"in which '\\\\\\\\' is not supported"),
    "set operation": (split_by(r"[\p{L}&&[^a]]+"), r"is not supported"),
    "set in a set": (split_by(r"[a[bc]]+"), r"in which '\[a\[' is not supported"),
    "line anchor": (split_by(r"^\s+"), r"in which '\^' is not supported"),
    "end anchor": (split_by(r"\s+$"), r"in which '\$' is not supported"),
    "flag": (split_by(r"(?m:a.b)"), r"in which '\(\?' is not supported"),
    "escape": (split_by(r"\h+"), r"in which '\\\\h' is not supported"),
    # what comes before a text
    "template is empty": (template([]), "by a rule that is not supported"),
    "template is text": (template("$A"), "by a rule that is not supported"),
    "template without id": (template([{"SpecialToken": {}}]), "by a rule that is not supported"),
    "BERT's template": (set_at("post_processor", {"type": "BertProcessing", "cls": ["[CLS]", 1]}), "by a rule"),
    "post_processor is text": (set_at("post_processor", "x"), "its post_processor is no list of steps"),
    "settings are a list": (write("tokenizer_config.json", []), "JSON object"),
    "bos_token is a list": (write("tokenizer_config.json", {"bos_token": ["<s>"]}), "its bos_token is"),
    "bos_token is empty": (write("tokenizer_config.json", {"bos_token": {"content": 7}}), "its bos_token is 7"),
    "add_bos_token is text": (write("tokenizer_config.json", {"add_bos_token": "true"}), "its add_bos_token is 'true'"),
    "BOS beyond the model": (set_at("added_tokens", 0, "id", 400), "BOS is token 400, beyond config.json's 320"),
    # the older pair
    "merges of one": (old_pair(VOCAB, b"#version: 0.2\na b\nab\n"), "merges.txt is damaged: the merge .'ab'."),
    "merges of three": (old_pair(VOCAB, b"a b ab\n"), "merges.txt is damaged"),
    "merges in Latin-1": (old_pair(VOCAB, b"\xe9 b\n"), "not UTF-8"),
    "merges are a pointer": (old_pair(VOCAB, POINTER), "git lfs pull"),
    "vocab of text": (old_pair({"a": "0"}, b"a b\n"), "vocab.json is damaged"),
    "vocab.json is a list": (old_pair(["a"], b"a b\n"), "JSON object"),
    "unknown class": (old_pair(VOCAB, b"a b\n", tokenizer_class=["x"]), "for tokenizer class .'x'. it is not known"),
    "added is a list": (old_pair(VOCAB, b"a b\n", added_tokens_decoder=[1]), "added_tokens_decoder is no list"),
    "added under a name": (old_pair(VOCAB, b"a b\n", added_tokens_decoder={"x": {"content": "y"}}), "added_tokens_dec"),
    "added is text": (old_pair(VOCAB, b"a b\n", added_tokens_decoder={"5": "y"}), "added_tokens_decoder"),
}  # fmt: skip


@pytest.fixture(scope="session")
def bpe_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe-files")
    write_bpe_tokenizer(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("fault", DAMAGED)
def test_damaged_tokenizer(tmp_path, bpe_files, fault):
    spoil, complaint = DAMAGED[fault]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 320, "bos_token_id": 0}))
    for name, content in bpe_files.items():
        (tmp_path / name).write_bytes(content)
    load_tokenizer(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError, match=complaint) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
