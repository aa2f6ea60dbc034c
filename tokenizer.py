"""Tokenizer files -> encode and decode, in the way the files themselves say; what they do not say is never guessed.

Two engines do the work: sentencepiece for a `tokenizer.model` of that kind (Mistral, Gemma2, Llama 2), tiktoken for
byte-level BPE in any of its three dresses (`tokenizer.json`, `vocab.json` + `merges.txt`, Llama 3's base64 lines).
"""

import base64
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

import regex
import sentencepiece
import tiktoken

from checkpoint import UserError, check_folder, fits, has, read_config, read_json, what_it_is

# Splits of a text into the pieces inside which BPE merges. GPT-2's is what "ByteLevel" means in a tokenizer.json.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The two that have to be known by name, since these files hold none: Llama 3's tiktoken file and Qwen2's merges.txt.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_SPLIT = CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class SentencePieceTokenizer:
    """A thin face on sentencepiece, which knows its own normalisation, dummy prefix and byte fallback."""

    def __init__(self, file: Path):
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_proto=file.read_bytes())
            self.pieces = self.model.id_to_piece([*range(self.model.vocab_size())])
        except (RuntimeError, UnicodeDecodeError):
            self.pieces = []
        if not self.pieces:  # of an empty file sentencepiece makes a model without a vocabulary
            raise UserError(
                f"{file} is neither a sentencepiece model nor a tiktoken file{what_it_is(file)}; download it again"
            )
        self.source = f"{file.name} (sentencepiece)"
        self.vocab_size = len(self.pieces)
        self.bos_id = self.model.bos_id() if self.model.bos_id() >= 0 else None
        self.bos_rule = "none"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; a special token's name in the text is text. Raises UserError.

        One character does not come back from `decode`: sentencepiece writes a space as U+2581 and cannot tell the two
        apart, so that a U+2581 in the text is read as a space.
        """
        check_characters(text)
        ids = self.model.encode(text)
        if self.model.unk_id() in ids:  # a model without byte fallback; decode would lose the character
            raise no_token_for(next(c for c in text if self.model.unk_id() in self.model.encode(c)), text)
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.model.decode([i for i in ids if i < self.vocab_size])

    def byte_count(self, ids: list[int]) -> int:
        """UTF-8 bytes of text that the tokens stand for."""
        return sum(1 if self.model.is_byte(i) else len(self.pieces[i].replace("\u2581", " ").encode()) for i in ids)


class BPETokenizer:
    """Byte-level BPE: normalise, split into pieces, merge inside each piece.

    `tokens` maps the bytes of every token to its id. Those in `merge_order` can be reached by merging, earlier ones
    first. `splits` are regular expressions, applied one after the other. With `whole_words`, a piece that is a token
    is taken whole before any merge is tried (Llama 3's `ignore_merges`). `specials` are never read from a text,
    `words` always: tokens that were added to a vocabulary without being special.
    """

    def __init__(
        self,
        source: str,
        tokens: dict[bytes, int],
        merge_order: list[bytes],
        splits: list[str],
        specials: dict[str, int],
        words: dict[str, int] | None = None,
        nfc: bool = False,
        whole_words: bool = False,
    ):
        self.source = source
        self.tokens = tokens
        self.specials = specials
        self.words = words or {}
        self.splits = [regex.compile(pattern) for pattern in splits]
        self.nfc = nfc
        self.whole_words = whole_words
        alphabet = [token for token in tokens if len(token) == 1]
        self.alphabet = frozenset(token[0] for token in alphabet)
        # tiktoken ranks a token by when it is merged; our own list turns its ranks into the checkpoint's ids
        reachable = list(dict.fromkeys(alphabet + merge_order))
        self.id_of_rank = [tokens[token] for token in reachable]
        ranks = {token: rank for rank, token in enumerate(reachable)}
        self.merges = tiktoken.Encoding(source, pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={})
        self.bytes_of_id = {i: token for token, i in tokens.items()} | {
            i: name.encode() for name, i in (specials | self.words).items()
        }
        self.encode_piece = lru_cache(maxsize=1 << 16)(self.encode_piece)  # most pieces of a text are words seen before
        self.bos_id: int | None = None
        self.bos_rule = "none"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; a special token's name in the text is text. Raises UserError."""
        check_characters(text)
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        if not self.alphabet.issuperset(text.encode()):  # tiktoken would panic
            raise no_token_for(next(c for c in text if not self.alphabet.issuperset(c.encode())), text)
        longest_first = "|".join(map(regex.escape, sorted(self.words, key=len, reverse=True)))
        stretches = split(regex.compile(longest_first), text) if self.words else [text]
        ids = []
        for stretch in stretches:
            ids += [self.words[stretch]] if stretch in self.words else self.encode_stretch(stretch)
        return ids

    def encode_stretch(self, text: str) -> list[int]:
        pieces = [text] if text else []
        for pattern in self.splits:
            pieces = [part for piece in pieces for part in split(pattern, piece)]
        return [i for piece in pieces for i in self.encode_piece(piece)]

    def encode_piece(self, piece: str) -> list[int]:
        if self.whole_words and piece.encode() in self.tokens:
            return [self.tokens[piece.encode()]]
        return [self.id_of_rank[rank] for rank in self.merges.encode_ordinary(piece)]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.bytes_of_id.get(i, "\ufffd".encode()) for i in ids).decode(errors="replace")

    def byte_count(self, ids: list[int]) -> int:
        """UTF-8 bytes of text that the tokens stand for."""
        return sum(len(self.bytes_of_id[i]) for i in ids)


Tokenizer = SentencePieceTokenizer | BPETokenizer


def check_characters(text: str) -> None:
    """Python's strings can hold halves of characters, from a command line in another encoding, say."""
    half = regex.search(r"[\ud800-\udfff]", text)
    if half:
        raise UserError(f"character {half.start():,} of the text is {half.group()!r}, half a character; remove it")


def no_token_for(character: str, text: str) -> UserError:
    return UserError(
        f"the tokenizer has no token for {character!r} (U+{ord(character):04X}), at character "
        f"{text.index(character):,} of the text; remove it"
    )


def read_text(file: str | Path) -> str:
    """A UTF-8 text, as it is: line ends untouched, a byte-order mark dropped. Raises UserError."""
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the text {file}: {error.strerror}") from None
    if data.startswith(b"version https://git-lfs"):
        raise UserError(f"{file} is no text{what_it_is(Path(file))}")
    encoding = utf_16_or_32(data)
    if encoding:
        raise UserError(f"{file} is {encoding} text; convert it: iconv -f {encoding} -t UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is not UTF-8 text: byte {error.start:,} is 0x{data[error.start]:02X}; if it is Latin-1 or "
            "Windows-1252 text, convert it: iconv -f WINDOWS-1252 -t UTF-8"
        ) from None


def utf_16_or_32(data: bytes) -> str | None:
    """The name of the encoding, if these bytes are text of 2 or 4 bytes a character. Without a mark at its start,
    such a text would pass for UTF-8 with NULs between its letters."""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "UTF-32"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    start = data[: 1 << 16]
    is_zero = [start[i::4].count(0) > 0.9 * len(start) / 4 for i in range(4)]  # first, second, ... byte of four
    if len(start) < 16 or sum(is_zero) not in (2, 3) or sum(is_zero) == 2 and is_zero[:2] != is_zero[2:]:
        return None
    return "UTF-16" if sum(is_zero) == 2 else "UTF-32"


def split(pattern: regex.Pattern, text: str) -> list[str]:
    """Cut a text at every match; what lies between two matches is a piece too, so that no character is lost."""
    pieces, end = [], 0
    for match in pattern.finditer(text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in pieces + [text[end:]] if piece]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder, with `.bos_id` and `.bos_rule` ("none", "start" or "window").

    Files are told apart by what is in them, in this order: a sentencepiece `tokenizer.model`, `tokenizer.json`,
    `vocab.json` + `merges.txt`, a tiktoken-format `tokenizer.model`. Raises UserError.
    """
    path = check_folder(path)
    config = read_config(path)
    settings = read_json(path / "tokenizer_config.json") if has(path / "tokenizer_config.json") else {}
    model_file, json_file, merges_file = path / "tokenizer.model", path / "tokenizer.json", path / "merges.txt"
    is_tiktoken = has(model_file) and re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", model_file.read_bytes()[:4096])
    stored = read_json(json_file) if has(json_file) else {}
    template = template_bos(json_file, stored)
    if has(model_file) and not is_tiktoken:
        tokenizer = SentencePieceTokenizer(model_file)
        adds_bos = template is not None or not stored
    elif stored:
        tokenizer = from_tokenizer_json(json_file, stored)
        adds_bos = template is not None
    elif has(path / "vocab.json") and has(merges_file):
        tokenizer = from_merges(path / "vocab.json", merges_file, settings)
        adds_bos = False
    elif is_tiktoken:
        tokenizer = from_tiktoken(model_file, config)
        adds_bos = True
    else:
        raise UserError(f"{path} has no tokenizer: it needs a tokenizer.model or a tokenizer.json")
    if isinstance(tokenizer, BPETokenizer):
        named = settings.get("bos_token")
        named = (named.get("content") if isinstance(named, dict) else named) or template
        if not isinstance(named, str | None):
            raise damaged(path / "tokenizer_config.json", f"its bos_token is {named!r:.80}, not a name")
        tokenizer.bos_id = tokenizer.specials.get(named, config["bos_token_id"])
    if tokenizer.bos_id is not None and tokenizer.bos_id >= config["vocab_size"]:
        raise UserError(f"{path}: BOS is token {tokenizer.bos_id}, beyond config.json's {config['vocab_size']:,}")
    asked = settings.get("add_bos_token")
    if not isinstance(asked, bool | None):
        raise damaged(path / "tokenizer_config.json", f"its add_bos_token is {asked!r:.80}, not true or false")
    adds_bos = adds_bos if asked is None else asked
    by_family = {"gemma2": "window", "qwen2": "none"}
    tokenizer.bos_rule = by_family.get(config["model_type"], "start" if adds_bos else "none")
    if tokenizer.bos_rule != "none" and tokenizer.bos_id is None:
        raise UserError(f"{path}: this model wants a BOS token, but neither tokenizer nor config.json names one")
    return tokenizer


# -------------------------------------------------------------------------------------- files, and what they must hold


def damaged(file: Path, what: str) -> UserError:
    return UserError(f"{file} is damaged: {what}; download it again")


def steps_of_part(file: Path, stored: dict, part: str, list_key: str) -> list[dict]:
    """The steps of one part of a tokenizer.json, which holds null, one step or a sequence of them."""
    content = stored.get(part)
    if isinstance(content, dict):
        content = content.get(list_key) if content.get("type") == "Sequence" else [content]
    elif content is None:
        content = []
    if not fits(content, [dict]):
        raise damaged(file, f"its {part} is no list of steps")
    return content


def template_bos(file: Path, stored: dict) -> str | None:
    """The token that a tokenizer.json's post-processor puts before every text, if it puts one."""
    for step in steps_of_part(file, stored, "post_processor", "processors"):
        match step:
            case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(name)}}, *_]}:
                return name
            case {"type": "ByteLevel"} | {"type": "TemplateProcessing", "single": [{"Sequence": dict()}, *_]}:
                pass
            case _:
                raise UserError(f"{file} adds tokens around a text by a rule that is not supported: {step!r:.200}")
    return None


def from_tokenizer_json(file: Path, stored: dict) -> BPETokenizer:
    """Hugging Face's tokenizer.json, if it is byte-level BPE."""
    model, added = stored.get("model"), stored.get("added_tokens", [])
    if not isinstance(model, dict):
        raise damaged(file, "it has no model")
    if model.get("byte_fallback"):
        raise UserError(
            f"{file} falls back on bytes, which only its tokenizer.model reproduces faithfully; put tokenizer.model "
            "(sentencepiece) into the folder too"
        )
    if model.get("type") != "BPE" or not model.get("merges"):
        raise UserError(f"{file} is not a byte-level BPE tokenizer (model type {model.get('type')!r}, with merges)")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise UserError(f"{file} asks for {option} = {model[option]!r:.80}, which is not supported")
    if not fits(model, {"vocab": dict, "merges": list}) or model.get("ignore_merges") not in (None, False, True):
        raise damaged(file, "its vocab, merges or ignore_merges have another form than they should")
    specials, words = added_tokens(file, added)
    tokens = byte_tokens(file, model["vocab"], specials | words)
    return BPETokenizer(
        f"{file.name} (byte-level BPE)",
        tokens,
        merged_tokens(file, [m.split(" ") if isinstance(m, str) else m for m in model["merges"]], tokens),
        read_splits(file, stored),
        specials,
        words,
        nfc=reads_nfc(file, stored),
        whole_words=bool(model.get("ignore_merges")),
    )


def added_tokens(file: Path, added: object) -> tuple[dict[str, int], dict[str, int]]:
    """The tokens that were added to a vocabulary and their ids: the special ones, and those that are words."""
    if not fits(added, [{"content": str, "id": int}]) or not all(
        isinstance(token.get("special", True), bool) for token in added
    ):
        raise damaged(file, "its added tokens are no list of names and ids")
    specials = {token["content"]: token["id"] for token in added if token.get("special", True)}
    words = {token["content"]: token["id"] for token in added if not token.get("special", True)}
    if "" in words or any(token.get(flag) for token in added for flag in ("lstrip", "rstrip", "single_word")
                          if token["content"] in words):  # fmt: skip
        raise UserError(f"{file} adds tokens that take in the spaces around them, which is not supported")
    return specials, words


def from_merges(vocab_file: Path, merges_file: Path, settings: dict) -> BPETokenizer:
    """The older pair of files, for Qwen2 alone: they do not say how to split, but its tokenizer class does."""
    kind = settings.get("tokenizer_class")
    if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise UserError(
            f"{merges_file} does not say how a text is split, and for tokenizer class {kind!r} it is not known; "
            "put the checkpoint's tokenizer.json into the folder"
        )
    added, settings_file = settings.get("added_tokens_decoder") or {}, vocab_file.with_name("tokenizer_config.json")
    if not fits(added, dict) or not fits([*added.values()], [dict]) or not all(map(str.isdecimal, added)):
        raise damaged(settings_file, "its added_tokens_decoder is no list of tokens")
    specials, words = added_tokens(settings_file, [token | {"id": int(i)} for i, token in added.items()])
    tokens = byte_tokens(vocab_file, read_json(vocab_file), specials | words)
    lines = read_text(merges_file).splitlines()
    lines = lines[1:] if lines and lines[0].startswith("#version") else lines  # a real merge may start with # too
    merges = merged_tokens(merges_file, [line.split(" ") for line in lines if line], tokens)
    return BPETokenizer("vocab.json + merges.txt", tokens, merges, [QWEN2_SPLIT], specials, words, nfc=True)


def from_tiktoken(file: Path, config: dict) -> BPETokenizer:
    """Llama 3's own format: one token and its rank a line, specials numbered after them, BOS first."""
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        raise damaged(file, "a line is not a token and its rank") from None
    if sorted(tokens.values()) != list(range(len(pairs))):
        raise damaged(file, "its ranks do not count from 0 up")
    if config["model_type"] != "llama" or config["bos_token_id"] != len(tokens):
        raise UserError(
            f"{file} is a tiktoken file, known only as Llama 3's, whose BOS comes after its {len(tokens):,} tokens; "
            f"config.json says {config['model_type']} and bos_token_id {config['bos_token_id']}"
        )
    order = sorted(tokens, key=tokens.get)
    specials = {"<|begin_of_text|>": len(tokens), "<|end_of_text|>": len(tokens) + 1}
    source = f"{file.name} (tiktoken)"
    return BPETokenizer(source, tokens, order, [LLAMA3_SPLIT], specials, whole_words=True)


def byte_characters() -> dict[str, int]:
    """GPT-2's disguise of bytes as printable characters, undone: character -> byte. Bytes that print stand for
    themselves, the others take the code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = byte_characters()


def undisguised(token: str) -> bytes | None:
    return bytes(BYTE_OF[c] for c in token) if BYTE_OF.keys() >= set(token) else None


def byte_tokens(file: Path, vocab: dict[str, int], added: dict[str, int]) -> dict[bytes, int]:
    """A vocabulary of disguised tokens -> the bytes of each token and its id; added tokens are no disguises."""
    tokens = {}
    for token, i in vocab.items():
        if token in added:
            continue
        if undisguised(token) is None:
            raise UserError(f"{file} is not a byte-level vocabulary: it holds the token {token!r}")
        tokens[undisguised(token)] = i
    ids = [*tokens.values(), *added.values()]
    if not fits([*ids, *vocab.values()], [int]) or len(set(ids)) < len(ids) or min(ids, default=0) < 0:
        raise damaged(file, "a token's id is not a whole number from 0 up, or two tokens share one")
    return tokens


def merged_tokens(file: Path, merges: list[list[str]], tokens: dict[bytes, int]) -> list[bytes]:
    """What each merge makes, in order."""
    for merge in merges:
        parts = [*merge, "".join(merge)] if fits(merge, [str]) else []
        if len(parts) != 3 or not all(undisguised(part) in tokens for part in parts):
            raise damaged(file, f"the merge {merge!r:.80} is not of two tokens, or makes none of its vocabulary")
    return [undisguised("".join(merge)) for merge in merges]


def read_splits(file: Path, stored: dict) -> list[str]:
    """The regular expressions by which a tokenizer.json's pre-tokenizer cuts a text, in order."""
    patterns, steps = [], steps_of_part(file, stored, "pre_tokenizer", "pretokenizers")
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False} if step is steps[-1]:
                patterns += [] if step.get("use_regex") is False else [GPT2_SPLIT]
            case {"type": "Digits", "individual_digits": bool(individual)}:
                patterns.append(r"\p{N}" if individual else r"\p{N}+")
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                patterns.append(check_pattern(file, pattern))
            case _:
                raise UserError(f"{file} splits text by a rule that is not supported: {step!r:.200}")
    if not steps or steps[-1]["type"] != "ByteLevel":
        raise UserError(f"{file} splits text by a rule that is not supported: its pre_tokenizer must end in ByteLevel")
    return patterns


# What Oniguruma, for which a tokenizer.json is written, and Python's regex may read differently: set operations and
# sets in sets, anchors (Oniguruma's hold at every line), most escapes and kinds of groups. A doubled backslash comes of
# a file that was escaped twice, and matches nothing.
DIALECT = re.compile(
    r"&&|\\\\|(?<!\\)\[\^?\]?(?:[^][\\]|\\.)*\[|(?<![\\[])[\^$]|\(\?(?![:=!>]|<[=!]|i:)|\\(?![pPsSdDrntux])\w"
)


def check_pattern(file: Path, pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise damaged(file, f"it splits text by {pattern!r:.80}, which is no regular expression ({error})") from None
    strange = DIALECT.search(pattern)
    if strange:
        raise UserError(f"{file} splits text by {pattern!r:.80}, in which {strange.group()!r} is not supported")
    return pattern


def reads_nfc(file: Path, stored: dict) -> bool:
    """Whether a tokenizer.json composes characters (NFC) before encoding; any other normaliser is refused."""
    steps = steps_of_part(file, stored, "normalizer", "normalizers")
    for step in steps:
        if step.get("type") != "NFC":
            raise UserError(f"{file} normalises text by a rule that is not supported: {step!r:.200}")
    return bool(steps)
