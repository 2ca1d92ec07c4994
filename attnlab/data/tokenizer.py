"""Text -> tokens: its bytes, byte pairs learnt from the training part, or a tokenizer.json."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from attnlab.extras import extra
from attnlab.names import lookup

FILE = "tokenizer.json"


class Encoded(NamedTuple):
    """A text as tokens.

    Attributes:
      tokens: [T], int32.
      sizes: [T], bytes of the text that each token stands for; they sum to those of the text.
    """

    tokens: np.ndarray
    sizes: np.ndarray


class ModelText(NamedTuple):
    """A text as a model reads it, with the special tokens that its tokenizer adds.

    Attributes:
      tokens: [T], int32.
      spans: [T, 2], start and end in the text, in characters; of a special token both are equal.
      names: the part of the text; of a special token its name.
    """

    tokens: np.ndarray
    spans: np.ndarray
    names: tuple[str, ...]


class Tokenizer:
    """A tokenizer of the package tokenizers, whatever its kind; `ByteTokenizer` needs no package.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      size: tokens are 0 to size - 1; None: as the vocabulary says.

    Attributes:
      size: of the vocabulary.
      content: the tokenizer.json that holds all of it; empty for bytes.

    >>> tokenizer = make_tokenizer("bytes", [])
    >>> tokenizer.size, [tokenizer.piece(token) for token in tokenizer.read("pé").tokens.tolist()]
    (256, ['p', '\\\\xc3', '\\\\xa9'])
    """

    def __init__(self, tokenizer: Any, size: int | None = None) -> None:
        self._tokenizer = tokenizer
        # Some ids may be unused.
        self.size = size or 1 + int(max(tokenizer.get_vocab().values(), default=-1))
        self.content: bytes = tokenizer.to_str(pretty=True).encode()

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Texts to train on, without special tokens."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_encoded(text, encoding) for text, encoding in zip(texts, found, strict=True)]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of `encode` alone, faster and on all cores."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in found]

    def read(self, text: str, *, special_tokens: bool = True) -> ModelText:
        """One text for a model, with the special tokens that the tokenizer adds or without."""
        encoding = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        spans = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        pairs = zip(encoding.offsets, encoding.tokens, strict=True)
        names = tuple(text[start:end] or name for (start, end), name in pairs)
        return ModelText(np.array(encoding.ids, np.int32), spans, names)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Tokens as text.

        Args:
          tokens: without padding (-1), for which it raises ValueError.
          skip_special_tokens: leave out special tokens, as the package tokenizers does by default;
            the default here is that of transformers.
        """
        ids = [int(t) for t in tokens]
        if ids and min(ids) < 0:
            raise ValueError(f"{min(ids)} is no token; leave out padding")
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def line(self, tokens: Sequence[int]) -> str:
        r"""Tokens as text on one line.

        >>> make_tokenizer("bytes", []).line(b"a\nb")
        'a\\nb'
        """
        return repr(self.decode(tokens))[1:-1]

    def piece(self, token: int) -> str:
        """One token for people: with the blank before a word. A part of a character is "\\xe2", or
        what the file calls it."""
        name: str | None = self._tokenizer.id_to_token(int(token))
        if name is None:
            return f"<{token}>"
        if "▁" in name:  # of SentencePiece, which decodes no blank at the start of a text
            return name.replace("▁", " ")
        text = self.decode([token])
        return name if not text or "\ufffd" in text else text

    def special_token(self, name: str) -> int:
        """The id of a special token; raises ValueError where there is none of this name."""
        known = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        return int(lookup(MappingProxyType(known), name, what="special token of the tokenizer"))

    @property
    def digest(self) -> str:
        """sha256 of `content`."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def files(self) -> dict[str, bytes]:
        """What `make_tokenizer` finds again in a folder."""
        return {FILE: self.content} if self.content else {}


class ByteTokenizer(Tokenizer):
    """The bytes of a text in UTF-8; a byte that is no letter of ASCII is "\\xe2" for people."""

    def __init__(self) -> None:
        self.size, self.content = 256, b""

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """A token for each byte."""
        return [Encoded(t, np.ones(len(t), np.int32)) for t in self.ids(texts)]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def read(self, text: str, *, special_tokens: bool = True) -> ModelText:
        """A token for each byte, with the span of its character."""
        starts = np.repeat(np.arange(len(text)), [len(c.encode()) for c in text])
        spans = np.stack([starts, starts + 1], axis=1).astype(np.int32)
        return ModelText(self.ids([text])[0], spans, tuple(text[start] for start in starts))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Invalid UTF-8 becomes U+FFFD. Raises ValueError for what is no byte."""
        ids = [int(token) for token in tokens]
        if wrong := [token for token in ids if not 0 <= token < 256]:
            raise ValueError(f"{wrong[0]} is no byte; leave out padding and special tokens")
        return bytes(ids).decode("utf-8", "replace")

    def piece(self, token: int) -> str:
        """The character, or the byte as "\\xe2"."""
        return chr(token) if token < 128 else f"\\x{token:02x}"

    def special_token(self, name: str) -> int:
        """Raises ValueError: there are none."""
        raise ValueError(f"a tokenizer of bytes has no special token {name!r}")


def num_tokens(name: str) -> int:
    """How many tokens a tokenizer has, at most: 256 for "bytes", N for "bpe:N", else those of the
    file of that name.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: N is not a number above 256, or the file is no tokenizer.json.

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
    return load_tokenizer(name).size


def make_tokenizer(name: str, texts: Sequence[str], folder: Path | None = None) -> Tokenizer:
    """The tokenizer of that name; "bpe:N" is learnt from `texts`.

    Byte pair encoding on bytes (Sennrich et al. 2016, arXiv 1508.07909; Radford et al. 2019), by
    the package tokenizers: every text can be encoded and is decoded exactly.

    Args:
      name: "bytes"; "bpe:N", with at most N tokens, the 256 bytes among them; or the path of a
        tokenizer.json.
      texts: to learn byte pairs from, of the training part alone; not used for other names.
      folder: its tokenizer.json, if it has one, is loaded instead, unless the name is "bytes".

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: N is not a number above 256, a file is no tokenizer.json, or the tokenizer in
        `folder` has more tokens than the name allows.
      ModuleNotFoundError: a tokenizer other than "bytes" without the package tokenizers.

    >>> tokenizer = make_tokenizer("bpe:258", ["low lower lowest"])
    >>> [(e.tokens.tolist(), e.sizes.tolist()) for e in tokenizer.encode(["low", "é"])]
    [([257], [3]), ([127, 102], [2, 0])]
    >>> tokenizer.decode([257, 127, 102])
    'lowé'
    """
    if name == "bytes":
        return ByteTokenizer()
    size = num_tokens(name)
    if folder is not None and (folder / FILE).exists():
        if (kept := load_tokenizer(folder / FILE)).size > size:
            raise ValueError(
                f"{folder / FILE} has {kept.size} tokens, {name!r} at most {size}; take the "
                "tokenizer that the folder was made with, or another folder"
            )
        kept.size = size
        return kept
    return _learn(size, texts) if name.startswith("bpe:") else load_tokenizer(name)


def read_tokenizer(
    content: bytes, size: int | None = None, name: object = "the content"
) -> Tokenizer:
    """The tokenizer of the content of a tokenizer.json, with `size` tokens at most; `name` is for
    an error."""
    with extra("data"):
        import tokenizers
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8-sig"))
    except Exception as error:  # the library raises no narrower kind
        raise ValueError(f"{name} is no tokenizer.json: {error}") from None
    # A file may say that texts are truncated or padded to a length, which would be another text.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Tokenizer(tokenizer, size)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, such as `pretrained.tokenizer_path` finds. `read(text)`
    gives the ids that the package tokenizers gives, special tokens too, and where each stands in
    the text; `decode` is the way back.

    Truncation and padding that the file asks for are turned off.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is something else.
      ModuleNotFoundError: the package tokenizers is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "tokenizer.json")
    ...     _ = path.write_bytes(make_tokenizer("bpe:258", ["low lower lowest"]).content)
    ...     load_tokenizer(path).read("lower").names
    ('low', 'e', 'r')
    """
    if not (file := Path(path)).is_file():
        raise FileNotFoundError(
            f"no tokenizer {str(path)!r}; write bytes, bpe:N or the path of a tokenizer.json"
        )
    return read_tokenizer(file.read_bytes(), name=path)


def token_sizes(tokenizer: Tokenizer) -> np.ndarray | None:
    """Bytes of the text that each token stands for [size], where that depends on the token alone:
    of bytes and of byte pairs. None for other tokenizers.

    >>> token_sizes(make_tokenizer("bpe:258", ["low lower lowest"]))[-2:].tolist()
    [2, 3]
    """
    if not tokenizer.content:
        return np.ones(tokenizer.size, np.int32)
    content = json.loads(tokenizer.content)
    model, decoder = content["model"], content.get("decoder") or {}
    marks = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    # Names with a mark, as CLIP's "sea</w>", are longer than the text.
    if decoder.get("type") != "ByteLevel" or model["type"] != "BPE" or any(marks):
        return None
    sizes = np.zeros(tokenizer.size, np.int32)
    for name, token in model["vocab"].items():
        sizes[token] = len(name)  # a character stands for a byte
    for added in content.get("added_tokens") or []:
        sizes[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return sizes


def _encoded(text: str, encoding: Any) -> Encoded:
    # The end of a token in the text is known in characters; what lies between the ends of two
    # tokens belongs to the second, so that nothing is counted twice or not at all.
    ends = np.array([end for _, end in encoding.offsets], np.int64)
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    if not text.isascii():
        ends = np.cumsum([0] + [len(c.encode()) for c in text])[ends]
    if len(ends):
        ends[-1] = len(text.encode())
    return Encoded(np.array(encoding.ids, np.int32), np.diff(ends, prepend=0).astype(np.int32))


def _learn(size: int, texts: Sequence[str]) -> Tokenizer:
    with extra("data"):
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers
    learnt = tokenizers.Tokenizer(models.BPE())
    learnt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learnt.train_from_iterator(texts, trainer)
    return Tokenizer(learnt, size)
