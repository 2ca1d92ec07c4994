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
def known_words(model_type: str) -> frozenset[str]:
    """The words that transformers reads for a family; empty for one that is not in the table.

    >>> "attention_bias" in known_words("llama"), "unsloth_fixed" in known_words("llama")
    (True, False)
    """
    own = _table()["families"].get(model_type)
    return frozenset() if own is None else frozenset(f"{_table()['all']} {own}".split())


def changes_nothing(model_type: str, name: str) -> bool:
    """Whether a word of config.json is one that transformers does not read for a family.

    >>> changes_nothing("llama", "unsloth_fixed"), changes_nothing("llama", "attention_bias")
    (True, False)
    """
    known = known_words(model_type)
    # Words that begin with the name of a stack stand for the words of that stack.
    return bool(known) and name not in known and not name.startswith(("encoder", "decoder"))


def default_tokens(model_type: str) -> JSON:
    """Word -> id of special tokens where config.json of a family has none.

    >>> default_tokens("llama")
    {'bos_token_id': 1, 'eos_token_id': 2}
    """
    found: JSON = _table()["tokens"].get(model_type, {})
    return found
