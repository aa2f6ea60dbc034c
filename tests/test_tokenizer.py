"""Tokenizers against the libraries that define them, on many scripts and on code; files that say too little."""

import json
import unicodedata

import pytest
from conftest import ROOT, write_bpe_tokenizer

from checkpoint import UserError
from tokenizer import LLAMA3_SPLIT, QWEN2_SPLIT, load_tokenizer

TEXTS = {
    "english": "It's 12345 things -> (x):\n\n  don't  DON'T we'll 'quoted'",
    "spaces": "  two  spaces\n\n<h1>\t\tx \r\n\r\n   \n a\u00a0b\u3000c   ",
    "code": "def f(x: int) -> str:\n    return {'a': x**2, \"b\": [1, 22, 333, 4444]}  # ok\n",
    "accents": "été naïve Việt Nam Ærøskøbing ÅNGSTRÖM e\u0301",
    "scripts": "日本語のテキスト。 Русский текст العربية हिन्दी ภาษาไทย 한국어 ελληνικά",
    "numbers": "٣٤٥ x² Ⅷ 1,000,000.00 3.14159",
    "emoji": "👩‍👩‍👧 🏳️‍🌈 😀!",
    "specials": "<s> </s> <|begin_of_text|> <|endoftext|> <bos> [INST] literal text",
    "novel": (ROOT / "data" / "heldout.txt").read_text(encoding="utf-8")[:20000],
}


def llama_folder(tmp_path, **config):
    """A folder with only what a tokenizer needs to know of a model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 0} | config))
    return tmp_path


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("name", TEXTS)
def test_demo_tokenizer_is_the_reference_librarys(demo, name):
    from tokenizers import Tokenizer

    reference, ours = Tokenizer.from_file(str(demo / "tokenizer.json")), load_tokenizer(demo)
    text = TEXTS[name]
    if name != "specials":  # the library takes a special token's name for the token
        assert ours.encode(text) == reference.encode(text).ids
    assert ours.decode(ours.encode(text)) == text
    assert ours.byte_count(ours.encode(text)) == len(text.encode())
    assert ours.bos_rule == "none"


def test_demo_tokenizer_on_a_whole_text_and_on_texts_end_to_end(demo):
    from tokenizers import Tokenizer

    text = (ROOT / "data" / "calibration.txt").read_text(encoding="utf-8")
    assert load_tokenizer(demo).encode(text) == Tokenizer.from_file(str(demo / "tokenizer.json")).encode(text).ids


@pytest.mark.parametrize("split", [LLAMA3_SPLIT, QWEN2_SPLIT], ids=["llama3", "qwen2"])
@pytest.mark.parametrize("name", TEXTS)
def test_split_patterns_cut_as_the_reference_library(tmp_path, split, name):
    """Llama 3's and Qwen2's pre-tokenizers, as their tokenizer.json spells them, over a small trained vocabulary."""
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

    folder = llama_folder(tmp_path)
    write_bpe_tokenizer(folder, vocab_size=600)
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if split == QWEN2_SPLIT:
        reference.normalizer = normalizers.NFC()
    reference.save(str(folder / "tokenizer.json"))
    ours, text = load_tokenizer(folder), TEXTS[name]
    if name != "specials":
        assert ours.encode(text) == reference.encode(text).ids
    expected = unicodedata.normalize("NFC", text) if split == QWEN2_SPLIT else text
    assert ours.decode(ours.encode(text)) == expected


def test_digits_one_by_one_or_in_threes(tmp_path):
    folder = llama_folder(tmp_path)
    write_bpe_tokenizer(folder, digits=True)
    tokens = load_tokenizer(folder)
    assert [tokens.decode([i]) for i in tokens.encode("12345")] == list("12345")


@pytest.mark.parametrize("name", TEXTS)
def test_llama_3_tiktoken_file(tmp_path, llama3_model, name):
    import base64

    import tiktoken

    folder = llama_folder(tmp_path, bos_token_id=128000, vocab_size=128256)
    (folder / "tokenizer.model").write_bytes(llama3_model)
    ranks = {base64.b64decode(t): int(r) for t, r in map(bytes.split, llama3_model.splitlines())}
    reference = tiktoken.Encoding("llama3", pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens={})
    ours, text = load_tokenizer(folder), TEXTS[name]
    assert ours.encode(text) == reference.encode_ordinary(text)
    assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_id, ours.bos_rule) == (128000, "start")


@pytest.mark.parametrize("name", TEXTS)
def test_mistral_sentencepiece_file(tmp_path, mistral_model, name):
    import sentencepiece

    folder = llama_folder(tmp_path, model_type="mistral")
    (folder / "tokenizer.model").write_bytes(mistral_model)
    reference = sentencepiece.SentencePieceProcessor(model_proto=mistral_model)
    ours, text = load_tokenizer(folder), TEXTS[name]
    assert ours.encode(text) == reference.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert ours.byte_count(ours.encode(text)) == len(text.encode()) + 1  # the dummy prefix
    assert (ours.bos_id, ours.bos_rule, ours.vocab_size) == (1, "start", 32768)
    (folder / "tokenizer.model").rename(folder / "tokenizer.json")
    with pytest.raises(UserError, match="not valid JSON"):  # told apart by content, not by name
        load_tokenizer(folder)


def test_merges_in_both_spellings_and_in_files_of_their_own(tmp_path):
    folder = llama_folder(tmp_path)
    write_bpe_tokenizer(folder, vocab_size=400)
    pairs = load_tokenizer(folder).encode(TEXTS["novel"])
    edit_json(
        folder / "tokenizer.json", lambda j: j["model"].update(merges=[" ".join(m) for m in j["model"]["merges"]])
    )
    assert load_tokenizer(folder).encode(TEXTS["novel"]) == pairs

    stored = json.loads((folder / "tokenizer.json").read_text())
    stored["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    }
    stored["normalizer"] = {"type": "NFC"}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    expected = load_tokenizer(folder).encode(TEXTS["novel"] + "e\u0301")
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    specials = {str(t["id"]): t for t in stored["added_tokens"]}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": specials}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for header, newline in (("#version: 0.2\n", "\n"), ("", "\r\n")):
        text = header + "\n".join(stored["model"]["merges"]) + "\n"
        (folder / "merges.txt").write_text(text.replace("\n", newline), newline="")
        assert load_tokenizer(folder).encode(TEXTS["novel"] + "e\u0301") == expected
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(UserError, match="does not say how a text is split"):
        load_tokenizer(folder)


def test_ignore_merges_takes_a_whole_word_first(tmp_path):
    """Llama 3's ignore_merges: a word that is a token but that merging cannot reach."""
    from tokenizers import Tokenizer

    folder = llama_folder(tmp_path)
    write_bpe_tokenizer(folder)
    for flag in (False, True):
        edit_json(
            folder / "tokenizer.json",
            lambda j: j["model"].update(ignore_merges=flag, vocab=j["model"]["vocab"] | {"zyzzyva": 320}),
        )
        reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ids = load_tokenizer(folder).encode("zyzzyva")
        assert ids == reference.encode("zyzzyva").ids and (ids == [320]) == flag


@pytest.mark.parametrize(
    "family, settings, template, expected",
    [
        ("llama", {}, False, "none"),
        ("llama", {}, True, "start"),
        ("llama", {"add_bos_token": True}, False, "start"),
        ("llama", {"add_bos_token": False}, True, "none"),
        ("mistral", {}, True, "start"),
        ("qwen2", {"add_bos_token": True}, True, "none"),
        ("gemma2", {"add_bos_token": False}, False, "window"),
    ],
)
def test_bos_rule(tmp_path, family, settings, template, expected):
    folder = llama_folder(tmp_path, model_type=family)
    write_bpe_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"} | settings))
    if template:
        processor = {
            "type": "Sequence",
            "processors": [
                {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
                {
                    "type": "TemplateProcessing",
                    "single": [
                        {"SpecialToken": {"id": "<s>", "type_id": 0}},
                        {"Sequence": {"id": "A", "type_id": 0}},
                    ],
                },
            ],
        }
        edit_json(folder / "tokenizer.json", lambda j: j.update(post_processor=processor))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_rule, tokenizer.bos_id) == (expected, 0)


def test_text_with_a_byte_the_vocabulary_lacks(demo):
    with pytest.raises(UserError, match=r"U\+0004\), at character 3"):
        load_tokenizer(demo).encode("abc\x04")


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda j: j["model"].update(byte_fallback=True), "tokenizer.model"),
        (lambda j: j["model"].update(type="Unigram"), "not a byte-level BPE"),
        (lambda j: j["model"].update(merges=[]), "not a byte-level BPE"),
        (lambda j: j.update(normalizer={"type": "Lowercase"}), "Lowercase"),
        (lambda j: j.update(pre_tokenizer={"type": "Metaspace"}), "Metaspace"),
        (lambda j: j.update(pre_tokenizer=None), "not supported"),
        (lambda j: j["model"]["vocab"].update({"▁the": 319}), "not a byte-level vocabulary"),
    ],
)
def test_refused_tokenizer_files(tmp_path, change, complaint):
    folder = llama_folder(tmp_path)
    write_bpe_tokenizer(folder)
    edit_json(folder / "tokenizer.json", change)
    with pytest.raises(UserError, match=complaint):
        load_tokenizer(folder)


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(llama_folder(tmp_path))
