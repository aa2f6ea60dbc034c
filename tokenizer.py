"""Tokenizer files -> encode and decode, in the way the files themselves say; what they do not say is never guessed.

Two engines do the work: sentencepiece for a `tokenizer.model` of that kind (Mistral, Gemma2, Llama 2), tiktoken for
byte-level BPE in any of its three dresses (`tokenizer.json`, `vocab.json` + `merges.txt`, Llama 3's base64 lines).
"""

import base64
import binascii
import re
import unicodedata
from functools import lru_cache
from pathlib import Path

import regex
import sentencepiece
import tiktoken

from checkpoint import UserError, check_folder, read_config, read_json, what_it_is

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
        except RuntimeError:
            raise UserError(
                f"{file} is neither a sentencepiece model nor a tiktoken file{what_it_is(file)}; download it again"
            ) from None
        self.source = f"{file.name} (sentencepiece)"
        self.vocab_size = self.model.vocab_size()
        self.bos_id = self.model.bos_id() if self.model.bos_id() >= 0 else None
        self.bos_rule = "none"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; a special token's name in the text is text."""
        return self.model.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.model.decode([i for i in ids if i < self.vocab_size])

    def byte_count(self, ids: list[int]) -> int:
        """UTF-8 bytes of text that the tokens stand for."""
        return sum(1 if self.model.is_byte(i) else len(self.piece(i).encode()) for i in ids)

    def piece(self, token: int) -> str:
        return self.model.id_to_piece(token).replace("\u2581", " ")


class BPETokenizer:
    """Byte-level BPE: normalise, split into pieces, merge inside each piece.

    `tokens` maps the bytes of every token to its id. Those in `merge_order` can be reached by merging, earlier ones
    first. `splits` are regular expressions, applied one after the other. With `whole_words`, a piece that is a token
    is taken whole before any merge is tried (Llama 3's `ignore_merges`).
    """

    def __init__(
        self,
        source: str,
        tokens: dict[bytes, int],
        merge_order: list[bytes],
        splits: list[str],
        specials: dict[str, int],
        nfc: bool = False,
        whole_words: bool = False,
    ):
        self.source = source
        self.tokens = tokens
        self.specials = specials
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
        self.bytes_of_id = {i: token for token, i in tokens.items()} | {i: s.encode() for s, i in specials.items()}
        self.vocab_size = max(self.bytes_of_id) + 1
        self.encode_piece = lru_cache(maxsize=1 << 16)(self.encode_piece)  # most pieces of a text are words seen before
        self.bos_id: int | None = None
        self.bos_rule = "none"

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; a special token's name in the text is text. Raises UserError."""
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        unknown = set(text.encode()) - self.alphabet
        if unknown:
            character = next(c for c in text if not self.alphabet.issuperset(c.encode()))
            raise UserError(
                f"the tokenizer has no token for a byte of {character!r} (U+{ord(character):04X}), at character "
                f"{text.index(character):,} of the text; remove it"
            )
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


def read_text(file: str | Path) -> str:
    """A UTF-8 text, as it is: line ends untouched, a byte-order mark dropped. Raises UserError."""
    try:
        return Path(file).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read the text {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text (byte {error.start:,} is wrong); convert it to UTF-8") from None


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
    settings = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").exists() else {}
    model_file, json_file, merges_file = path / "tokenizer.model", path / "tokenizer.json", path / "merges.txt"
    is_tiktoken = model_file.exists() and re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", model_file.read_bytes()[:4096])
    template = None
    if json_file.exists():
        stored = read_json(json_file)
        template = template_bos(stored)
    if model_file.exists() and not is_tiktoken:
        tokenizer = SentencePieceTokenizer(model_file)
        adds_bos = template is not None if json_file.exists() else True
    elif json_file.exists():
        tokenizer = from_tokenizer_json(json_file, stored)
        adds_bos = template is not None
    elif (path / "vocab.json").exists() and merges_file.exists():
        tokenizer = from_merges(path / "vocab.json", merges_file, settings)
        adds_bos = False
    elif is_tiktoken:
        tokenizer = from_tiktoken(model_file, config)
        adds_bos = True
    else:
        raise UserError(f"{path} has no tokenizer: it needs a tokenizer.model or a tokenizer.json")
    if isinstance(tokenizer, BPETokenizer):
        named = settings.get("bos_token")
        named = named.get("content") if isinstance(named, dict) else named
        tokenizer.bos_id = tokenizer.specials.get(named or template, config["bos_token_id"])
    if isinstance(settings.get("add_bos_token"), bool):
        adds_bos = settings["add_bos_token"]
    tokenizer.bos_rule = {"gemma2": "window", "qwen2": "none"}.get(config["model_type"], "start" if adds_bos else "none")
    if tokenizer.bos_rule != "none" and tokenizer.bos_id is None:
        raise UserError(f"{path}: this model wants a BOS token, but neither tokenizer nor config.json names one")
    return tokenizer


def template_bos(stored: dict) -> str | None:
    """The token that a tokenizer.json's post-processor puts before every text, if it puts one."""
    processor = stored.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing" and "SpecialToken" in step["single"][0]:
            return step["single"][0]["SpecialToken"]["id"]
    return None


def from_tokenizer_json(file: Path, stored: dict) -> BPETokenizer:
    """Hugging Face's tokenizer.json, if it is byte-level BPE."""
    model = stored.get("model") or {}
    if model.get("byte_fallback"):
        raise UserError(
            f"{file} falls back on bytes, which only its tokenizer.model reproduces faithfully; put tokenizer.model "
            "(sentencepiece) into the folder too"
        )
    if model.get("type") != "BPE" or not model.get("merges"):
        raise UserError(f"{file} is not a byte-level BPE tokenizer (model type {model.get('type')!r}, with merges)")
    specials = {token["content"]: token["id"] for token in stored.get("added_tokens") or []}
    tokens = byte_tokens(file, model["vocab"], specials)
    merges = [m if isinstance(m, list) else m.split(" ") for m in model["merges"]]
    return BPETokenizer(
        f"{file.name} (byte-level BPE)",
        tokens,
        merged_tokens(file, merges, tokens),
        read_splits(file, stored.get("pre_tokenizer")),
        specials,
        nfc=reads_nfc(file, stored.get("normalizer")),
        whole_words=bool(model.get("ignore_merges")),
    )


def from_merges(vocab_file: Path, merges_file: Path, settings: dict) -> BPETokenizer:
    """The older pair of files, for Qwen2 alone: they do not say how to split, but its tokenizer class does."""
    kind = settings.get("tokenizer_class")
    if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise UserError(
            f"{merges_file} does not say how a text is split, and tokenizer class {kind!r} is not known to; "
            "put the checkpoint's tokenizer.json into the folder"
        )
    lines = merges_file.read_text(encoding="utf-8").splitlines()
    lines = lines[1:] if lines and lines[0].startswith("#version") else lines  # a real merge may start with # too
    specials = {t["content"]: int(i) for i, t in (settings.get("added_tokens_decoder") or {}).items()}
    tokens = byte_tokens(vocab_file, read_json(vocab_file), specials)
    merges = merged_tokens(merges_file, [line.split(" ") for line in lines if line], tokens)
    return BPETokenizer("vocab.json + merges.txt", tokens, merges, [QWEN2_SPLIT], specials, nfc=True)


def from_tiktoken(file: Path, config: dict) -> BPETokenizer:
    """Llama 3's own format: one token and its rank a line, specials numbered after them, BOS first."""
    try:
        pairs = [line.split() for line in file.read_bytes().splitlines() if line]
        tokens = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise UserError(f"{file} is a damaged tiktoken file; download it again") from None
    if config["model_type"] != "llama" or config["bos_token_id"] != len(tokens):
        raise UserError(
            f"{file} is a tiktoken file, known only as Llama 3's, whose BOS has the id after its {len(tokens):,} tokens; "
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


def byte_tokens(file: Path, vocab: dict[str, int], specials: dict[str, int]) -> dict[bytes, int]:
    """A vocabulary of disguised tokens -> the bytes of each token and its id."""
    tokens = {}
    for token, i in vocab.items():
        if token in specials:
            continue
        if not BYTE_OF.keys() >= set(token):
            raise UserError(f"{file} is not a byte-level vocabulary: it holds the token {token!r}")
        tokens[bytes(BYTE_OF[c] for c in token)] = i
    return tokens


def merged_tokens(file: Path, merges: list[list[str]], tokens: dict[bytes, int]) -> list[bytes]:
    """What each merge makes, in order."""
    made = [bytes(BYTE_OF[c] for c in "".join(merge)) for merge in merges]
    unknown = [token for token in made if token not in tokens]
    if unknown:
        raise UserError(f"{file} merges into {unknown[0]!r}, which is not in its vocabulary; download it again")
    return made


def read_splits(file: Path, pre_tokenizer: dict | None) -> list[str]:
    """The regular expressions by which a tokenizer.json's pre-tokenizer cuts a text, in order."""
    patterns = []
    for step in (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer]):
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                patterns += [GPT2_SPLIT] if use_regex else []
            case {"type": "ByteLevel", "add_prefix_space": False}:
                patterns.append(GPT2_SPLIT)
            case {"type": "Digits", "individual_digits": individual}:
                patterns.append(r"\p{N}" if individual else r"\p{N}+")
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case _:
                raise UserError(f"{file} splits text by a rule that is not supported: {step}")
    return patterns


def reads_nfc(file: Path, normalizer: dict | None) -> bool:
    """Whether a tokenizer.json composes characters (NFC) before encoding; any other normaliser is refused."""
    steps = (normalizer or {}).get("normalizers", [normalizer] if normalizer else [])
    for step in steps:
        if step.get("type") != "NFC":
            raise UserError(f"{file} normalises text by a rule that is not supported: {step}")
    return bool(steps)
