"""Text -> numbers: its bytes, pairs of bytes that are learnt from the training part, or a file."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab.extras import extra

FILE = "tokenizer.json"


class Encoded(NamedTuple):
    """A text as tokens."""

    tokens: np.ndarray
    sizes: np.ndarray
    """Bytes of the text that each token stands for; they sum to the bytes of the text."""

    def spans(self, text: str) -> np.ndarray:
        """[T, 2]: from where to where in `text`, in characters, each token stands, with the blanks
        before it. One that stands for nothing goes on where the one before it stands.

        >>> Encoded(np.array([7, 8, 9]), np.array([3, 2, 0])).spans("low\u00e9").tolist()
        [[0, 3], [3, 4], [3, 4]]
        """
        characters = _characters(text)
        ends = np.cumsum(self.sizes)
        starts = np.maximum.accumulate(np.where(self.sizes > 0, ends - self.sizes, 0))
        if not len(characters):
            return np.zeros((len(ends), 2), np.int32)
        spans = np.stack([characters[starts], characters[np.maximum(ends, 1) - 1] + 1], axis=1)
        return spans.astype(np.int32)


class Read(NamedTuple):
    """A text as a model reads it, with the special tokens that its tokenizer puts around it."""

    tokens: np.ndarray
    spans: np.ndarray
    """[T, 2]: from where to where in the text, in characters; a special token is nowhere."""
    names: tuple[str, ...]
    """What stands there of the text; of a special token its name."""


class Tokenizer(NamedTuple):
    """What reads and writes text."""

    encode: Callable[[Sequence[str]], list[Encoded]]
    """Texts to train on, without special tokens."""
    read: Callable[[str], Read]
    """One text for a model."""
    decode: Callable[[Sequence[int]], str]
    piece: Callable[[int], str]
    """One token as a person reads it: with the blank before a word; a part of a character is
    "\\xe2", or what the file calls it."""
    size: int
    """Tokens are 0 to size - 1."""
    content: bytes
    """The file that holds all of it; empty for the bytes."""

    @property
    def digest(self) -> str:
        """sha256 of `content`."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def files(self) -> dict[str, bytes]:
        """What `make_tokenizer` finds again in a folder."""
        return {FILE: self.content} if self.content else {}


def num_tokens(name: str) -> int:
    """How many tokens a tokenizer has, at most: 256 for "bytes", N for "bpe:N", else those of the
    file of that name.

    >>> num_tokens("bytes"), num_tokens("bpe:4096")
    (256, 4096)
    """
    if name == "bytes":
        return 256
    if name.startswith("bpe:"):
        count = name.removeprefix("bpe:")
        if not count.isdecimal() or int(count) < 257:
            raise ValueError(
                f"tokenizer {name!r}: write bpe:N with N more than the 256 bytes, or bytes"
            )
        return int(count)
    return 1 + max(_read(Path(name)).get_vocab().values(), default=-1)  # some numbers may be free


def make_tokenizer(name: str, texts: Sequence[str], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of that name; "bpe:N" is learnt from `texts`, of the training part alone.

    Byte pair encoding on bytes (Sennrich et al. 2016, arXiv 1508.07909; Radford et al. 2019), by
    the package tokenizers: every text can be written, and is read again exactly. One that
    was kept in `folder` is taken from there.

    >>> tokenizer = make_tokenizer("bpe:258", ["low lower lowest"])
    >>> [(e.tokens.tolist(), e.sizes.tolist()) for e in tokenizer.encode(["low", "é"])]
    [([257], [3]), ([127, 102], [2, 0])]
    >>> tokenizer.decode([257, 127, 102])
    'lowé'
    """
    if name == "bytes":
        return Tokenizer(
            lambda texts: [Encoded(t, np.ones(len(t), np.int32)) for t in map(_as_bytes, texts)],
            lambda text: _read_bytes(text, _as_bytes(text)),
            lambda tokens: bytes(map(int, tokens)).decode("utf-8", "replace"),
            lambda token: chr(token) if token < 128 else f"\\x{token:02x}",
            256,
            b"",
        )
    size = num_tokens(name)
    if folder is not None and (folder / FILE).exists():
        found = _read(folder / FILE)
    else:
        found = _learn(size, texts) if name.startswith("bpe:") else _read(Path(name))
    return Tokenizer(
        lambda texts: [
            _encoded(text, encoding)
            for text, encoding in zip(
                texts, found.encode_batch(list(texts), add_special_tokens=False), strict=True
            )
        ],
        lambda text: _read_text(text, found.encode(text)),
        lambda tokens: found.decode([int(t) for t in tokens], skip_special_tokens=False),
        lambda token: _piece(found, int(token)),
        size,
        found.to_str(pretty=True).encode(),
    )


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def _read_bytes(text: str, tokens: np.ndarray) -> Read:
    starts = _characters(text)
    spans = np.stack([starts, starts + 1], axis=1).astype(np.int32)
    return Read(tokens, spans, tuple(text[start] for start in starts))


def _characters(text: str) -> np.ndarray:
    """Which character of the text each of its bytes belongs to."""
    return np.repeat(np.arange(len(text)), [len(c.encode()) for c in text])


def _read_text(text: str, encoding: Any) -> Read:
    spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
    names = zip(encoding.offsets, encoding.tokens, strict=True)
    pieces = tuple(text[start:end] or name for (start, end), name in names)
    return Read(np.array(encoding.ids, np.int32), spans, pieces)


def _piece(found: Any, token: int) -> str:
    name: str | None = found.id_to_token(token)
    if name is None:
        return f"<{token}>"
    if "▁" in name:  # of SentencePiece, which decodes no blank at the start of a text
        return name.replace("▁", " ")
    text: str = found.decode([token], skip_special_tokens=False)
    return name if not text or "\ufffd" in text else text


def _encoded(text: str, encoding: Any) -> Encoded:
    # Where a token ends in the text is known in characters; what lies between the ends of two
    # tokens belongs to the second, so that nothing is counted twice or not at all.
    at = np.cumsum([0] + [len(c.encode()) for c in text]) if not text.isascii() else None
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    ends = ends if at is None else at[ends]
    if len(ends):
        ends[-1] = len(text.encode())
    return Encoded(np.array(encoding.ids, np.int32), np.diff(ends, prepend=0).astype(np.int32))


def _learn(size: int, texts: Sequence[str]) -> Any:
    with extra("data"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    learnt = Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learnt.train_from_iterator(texts, trainer)
    return learnt


def _read(path: Path) -> Any:
    with extra("data"):
        from tokenizers import Tokenizer
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer {str(path)!r}; write bytes, bpe:N or the path of a tokenizer.json"
        )
    try:
        found = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower kind
        raise ValueError(f"{path} is no tokenizer.json: {error}") from None
    # A file may say that texts are cut or filled up to a length, which would be another text.
    found.no_truncation()
    found.no_padding()
    return found
