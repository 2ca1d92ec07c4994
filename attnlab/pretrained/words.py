"""What transformers reads from a config.json: `words.json`, made of its source code by
tests/pretrained/parity/words.py."""

import functools
from pathlib import Path

from attnlab.nested import JSON
from attnlab.pretrained.tensors import read_json


@functools.cache
def _table() -> JSON:
    return read_json(Path(__file__).parent / "words.json")


@functools.cache
def known_words(model_type: str) -> frozenset[str] | None:
    """The words that can change what a family computes; None for one that is not in the table.

    >>> "attention_bias" in known_words("llama"), "unsloth_fixed" in known_words("llama")
    (True, False)
    """
    own = _table()["families"].get(model_type)
    return None if own is None else frozenset(f"{_table()['all']} {own}".split())


def default_tokens(model_type: str) -> JSON:
    """Word -> id of special tokens where config.json of a family has none.

    >>> default_tokens("llama")
    {'bos_token_id': 1, 'eos_token_id': 2}
    """
    found: JSON = _table()["tokens"].get(model_type, {})
    return found
