"""Tokenizers built from a GGUF header: the same ids as llama.cpp gives, without a second file.

Two kinds. "llama" (sentencepiece BPE: tokens with scores) becomes a sentencepiece model, written
here field by field; "gpt2" (byte-level BPE: tokens and merges) becomes a Rust `tokenizers` model
with the pre-tokenizer that the header names. Text of control tokens counts as those tokens unless
`special` is false, as in llama.cpp.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvproof.errors import RequestError
from kvproof.gguf import GGUF

# Token types of GGUF, which are sentencepiece's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# GPT-2's own split, which `ByteLevel` has built in.
_GPT2 = ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "phi-2")
# Digits one by one, then GPT-2's split.
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}


class _Words(Protocol):
    """Ids of text in which nothing is special, and text of ids."""

    def ids(self, text: str) -> list[int]: ...

    def text(self, ids: Sequence[int]) -> str: ...


class Tokenizer:
    """Text to ids and back. `bos`, `eos` are ids or None; `add_bos` is what the header asks for."""

    def __init__(self, file: GGUF) -> None:
        tokens = file.strings("tokenizer.ggml.tokens")
        if tokens is None:
            raise RequestError(
                f"{file.path}: tokenizer.ggml.tokens is missing: no tokenizer inside"
            )
        words = tokens.tolist()
        kinds = file.numbers("tokenizer.ggml.token_type", len(words))
        types = np.full(len(words), NORMAL) if kinds is None else kinds.astype(np.int64)
        strange = np.flatnonzero((types < NORMAL) | (types > BYTE))
        if len(strange):
            at = int(strange[0])
            raise RequestError(
                f"{file.path}: tokenizer.ggml.token_type[{at}]: expected {NORMAL} to {BYTE}, found "
                f"{types[at]}"
            )
        self.vocab_size = len(words)
        self.bos = _token_id(file, "bos", len(words))
        self.eos = _token_id(file, "eos", len(words))
        self.chat_template = file.text("tokenizer.chat_template")
        model = file.text("tokenizer.ggml.model")
        if model == "llama":
            self._words: _Words = _SentencePiece(file, words, types)
        elif model == "gpt2":
            self._words = _ByteLevel(file, words, types)
        else:
            raise RequestError(
                f"{file.path}: tokenizer.ggml.model {model!r} is not supported (llama, gpt2)"
            )
        add_bos = file.flag("tokenizer.ggml.add_bos_token")
        # llama.cpp's defaults where the header says nothing.
        self.add_bos = model == "llama" if add_bos is None else add_bos
        self._special = {words[i]: int(i) for i in np.flatnonzero(types == CONTROL)}
        self._control = set(self._special.values())
        self._lengths = sorted({len(w) for w in self._special}, reverse=True)
        first = "".join(sorted({w[0] for w in self._special if w}))
        self._hint = re.compile(f"[{re.escape(first)}]") if first else None

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = True) -> list[int]:
        """Ids of `text`, with the beginning-of-text token if `add_bos` (None: as the header says).

        `special`: text such as "<bos>" becomes the control token of that name.
        """
        ids: list[int] = []
        if (self.add_bos if add_bos is None else add_bos) and self.bos is not None:
            ids.append(self.bos)
        if not special:
            return ids + (self._words.ids(text) if text else [])
        start = 0
        for at, end, token in self._find(text):
            if at > start:
                ids += self._words.ids(text[start:at])
            ids.append(token)
            start = end
        if start < len(text):
            ids += self._words.ids(text[start:])
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`; control tokens are left out unless `special`."""
        if not special:
            return self._words.text([i for i in ids if i not in self._control])
        names = {i: w for w, i in self._special.items()}
        text, run = "", list[int]()
        for i in [*ids, -1]:
            if i >= 0 and i not in self._control:
                run.append(i)
                continue
            text += self._words.text(run) + names.get(i, "")
            run = []
        return text

    def _find(self, text: str) -> list[tuple[int, int, int]]:
        """(start, end, id) of the control tokens in `text`, from the left, longest first."""
        found: list[tuple[int, int, int]] = []
        start = 0
        while self._hint and (hit := self._hint.search(text, start)):
            at = start = hit.start()
            for length in self._lengths:
                token = self._special.get(text[at : at + length])
                if token is not None:
                    found.append((at, at + length, token))
                    start = at + length
                    break
            else:
                start += 1
        return found


def _token_id(file: GGUF, name: str, count: int) -> int | None:
    return file.whole(f"tokenizer.ggml.{name}_token_id", 0, count - 1)


class _SentencePiece:
    def __init__(self, file: GGUF, words: list[str], types: Any) -> None:
        import sentencepiece

        scores = file.numbers("tokenizer.ggml.scores", len(words))
        if scores is None:
            raise RequestError(f"{file.path}: tokenizer.ggml.scores: expected {len(words)} entries")
        space_prefix = file.flag("tokenizer.ggml.add_space_prefix")
        unknown = _token_id(file, "unknown", len(words))
        if unknown is None:
            found = np.flatnonzero(types == UNKNOWN)
            unknown = int(found[0]) if len(found) else 0
        kinds = types.tolist()
        kinds[unknown] = UNKNOWN  # sentencepiece wants exactly one; some converters mark it control
        # The text of a user-defined token stands for it before spaces become U+2581, which is how
        # llama.cpp keeps runs of spaces apart from runs of that character; sentencepiece cannot.
        self._spaced = {
            words[i]: int(i) for i in np.flatnonzero(types == USER_DEFINED) if " " in words[i]
        }
        longest_first = sorted(self._spaced, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._model = sentencepiece.SentencePieceProcessor()
        proto = _model_proto(words, scores, kinds, space_prefix is not False)
        try:
            self._model.LoadFromSerializedProto(proto)
        except RuntimeError as error:  # a doubled or empty token, no byte tokens, two unknowns
            raise RequestError(
                f"{file.path}: tokenizer.ggml.tokens make no tokenizer: "
                f"{str(error).removeprefix('INTERNAL: ')}"
            ) from error

    def ids(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._split.finditer(text) if self._split else ():
            if match.start() > start:
                ids += self._model.EncodeAsIds(text[start : match.start()])
            ids.append(self._spaced[match[0]])
            start = match.end()
        if start < len(text):
            ids += self._model.EncodeAsIds(text[start:])
        return ids

    def text(self, ids: Sequence[int]) -> str:
        text: str = self._model.DecodeIds(list(ids))
        return text


def _model_proto(words: list[str], scores: Any, kinds: list[int], space_prefix: bool) -> bytes:
    """A serialized sentencepiece ModelProto (BPE, byte fallback, no normalization).

    Written by hand: 262144 pieces take 0.2 s this way, seconds through protobuf objects. Fields:
    1 pieces {1 text, 2 score, 3 type}; 2 trainer {3 model type = BPE, 35 byte fallback};
    3 normalizer {1 name, 3 dummy prefix, 4 remove extra spaces, 5 escape spaces}.
    """
    parts: list[bytes] = []
    floats = np.asarray(scores, "<f4").tobytes()
    for i, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        raw = word.encode()
        head = b"\x0a" + _varint(len(raw))
        body = head + raw + b"\x15" + floats[4 * i : 4 * i + 4] + b"\x18" + bytes((kind,))
        parts.append(b"\x0a" + _varint(len(body)) + body)
    trainer = b"\x18\x02" + b"\x98\x02\x01"
    normalizer = b"\x0a\x08identity" + struct.pack("6B", 0x18, space_prefix, 0x20, 0, 0x28, 1)
    parts.append(b"\x12" + _varint(len(trainer)) + trainer)
    parts.append(b"\x1a" + _varint(len(normalizer)) + normalizer)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class _ByteLevel:
    def __init__(self, file: GGUF, words: list[str], types: Any) -> None:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Rust

        merges = file.strings("tokenizer.ggml.merges")
        if merges is None:
            raise RequestError(f"{file.path}: tokenizer.ggml.merges is missing (gpt2 tokenizer)")
        pairs = []
        for merge in merges:
            # The space that parts the two is never the first character.
            cut = merge.find(" ", 1)
            if cut < 0:
                raise RequestError(f"{file.path}: tokenizer.ggml.merges: {merge!r} is not a pair")
            pairs.append((merge[:cut], merge[cut + 1 :]))
        pre = file.text("tokenizer.ggml.pre") or "default"
        splits: list[Any]
        if pre in _GPT2:
            splits = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        elif pre in _DIGITS:
            splits = [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        elif pre in _SPLITS:
            splits = [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        else:
            known = sorted({*_GPT2, *_DIGITS, *_SPLITS})
            raise RequestError(
                f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported ({', '.join(known)})"
            )
        vocab = {word: i for i, word in enumerate(words)}
        lacking = [
            merge
            for merge in pairs
            if not {merge[0], merge[1], merge[0] + merge[1]} <= vocab.keys()
        ]
        if lacking:
            raise RequestError(
                f"{file.path}: tokenizer.ggml.merges: {' '.join(lacking[0])!r} is made of or makes "
                "what is not a token"
            )
        self._model = Rust(models.BPE(vocab, pairs, fuse_unk=False))
        self._model.pre_tokenizer = pre_tokenizers.Sequence(splits)
        self._model.decoder = decoders.ByteLevel()
        # User-defined tokens stand for their text wherever it occurs.
        self._model.add_tokens(
            [AddedToken(words[i], normalized=False) for i in np.flatnonzero(types == USER_DEFINED)]
        )

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text
