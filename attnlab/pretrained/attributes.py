"""config.json: every attribute is read, known to change nothing, or refused by name."""

import dataclasses
import fnmatch
import functools
import json
import reprlib
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

from attnlab.nested import JSON

LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = 1e38
MAX_LAYERS = 10_000
"""Of a model, and experts of a layer."""

# Of tokens, classes and generation: what `metadata` keeps.
KEPT = """
bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id pad_token_id unk_token_id
decoder_start_token_id forced_bos_token_id forced_eos_token_id id2label label2id num_labels
problem_type task_specific_params finetuning_task tokenizer_class prefix max_length min_length
do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens use_cache
""".split()  # noqa: SIM905
# And of training and bookkeeping: nothing that a forward pass computes with.
UNKEPT = """
architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path
initializer_range initializer_factor output_attentions output_hidden_states return_dict
gradient_checkpointing torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward
classifier_dropout classifier_dropout_prob qa_dropout seq_classif_dropout summary_* _num_labels
output_past attn_implementation _attn_implementation _attn_implementation_autoset output_scores
return_dict_in_generate n_ctx directionality pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head pooler_type reorder_and_upcast_attn pretraining_tp
cache_implementation
""".split()  # noqa: SIM905
HARMLESS = (*KEPT, *UNKEPT)
FIXED: JSON = {
    "pruned_heads": {},
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
    # A cache of transformers keeps no more keys, whether or not the family has windows.
    "sliding_window": None,
    "layer_types": None,
}
"""Word -> the value that is supported; others where `_is_usual`."""
SAME = {"decoder": [("is_decoder", True), ("is_causal", True)], "encoder": [("is_causal", False)]}
"""Kind of a model -> words and their values that change nothing."""
QUANTIZED = ("quantization_config", "compression_config")


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One attribute of config.json.

    Attributes:
      name: in config.json.
      default: its value where config.json has none; values are of the same type.
      kind: type of the values; needed where the default is None. None with a default of None: any
        JSON value, which the family checks.
      nullable: null is allowed. It always is where the default is None or computed.
      least: of whole numbers.
      is_depth: it counts layers or experts.
      compute: attributes -> its value where config.json has none or null.
    """

    name: str
    default: object = None
    kind: type | None = None
    nullable: bool = False
    least: int = 1
    is_depth: bool = False
    compute: Callable[[JSON], object] | None = None

    def check(self, value: object) -> None:
        """Raise ValueError unless `value` is of the right type, finite, and of a possible size."""
        if self.kind is None and self.default is None:
            return
        if value is None and (self.nullable or self.default is None or self.compute):
            return
        name, kind = self.name, self.kind or type(self.default)
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
            like = "" if self.default is None else f", as {self.default!r} is"
            raise bad_value(name, value, f"should be a {kind.__name__}{like}")
        most = MAX_LAYERS if self.is_depth else LARGEST_COUNT
        if kind is int and not self.least <= value <= most:  # type: ignore[operator]
            raise bad_value(name, value, f"must be from {self.least} to {most:,}")
        bound = 0.0 if "eps" in name else -LARGEST_NUMBER
        if kind is float and not bound <= value <= LARGEST_NUMBER:  # type: ignore[operator]
            raise bad_value(name, value, f"must be a finite number of at least {bound:g}")


def read_attributes(
    raw: JSON, attributes: Iterable[Attribute], ignore: tuple[str, ...] = (), model_type: str = ""
) -> JSON:
    """Read the attributes of a family from config.json.

    Other words that transformers does not read for the family are let pass with one warning for all
    of them, and silently where they are null or false.

    Args:
      raw: the object in config.json.
      attributes: what the family reads.
      ignore: patterns of further attributes to leave out.
      model_type: of the family; "": no other word passes.

    Returns:
      Name -> value of every attribute of the family.

    Raises:
      ValueError: names the attribute that is unknown, or has a value that is not supported.
    """
    known, passed = {a.name: a for a in attributes}, list[str]()
    for name, value in raw.items():
        if name in known:
            known[name].check(value)
        elif matches(name, (*ignore, *HARMLESS)):
            continue
        elif name in FIXED:
            if value != FIXED[name] and not _is_usual(name, value):
                raise bad_value(name, value, f"is not supported, only {FIXED[name]!r}")
        elif name in QUANTIZED and value is not None:
            raise bad_value(
                name,
                value,
                "is not supported: quantized weights are not read; load the model before it was "
                "quantized, or save it again after model.dequantize() of transformers",
            )
        elif name not in QUANTIZED and not changes_nothing(model_type, name):
            raise ValueError(
                f"config.json: {shown(name)[1:-1]} = {shown(value)} is unknown here and may change "
                f"what the model computes; if it does not, pass ignore=({shown(name)},)"
            )
        elif value not in (None, False):
            passed.append(shown(name, 40)[1:-1])
    if passed:
        more = f" and {len(passed) - 8} more words" if len(passed) > 8 else ""
        code = "; the code that auto_map names is not run" if "auto_map" in passed else ""
        names = ", ".join(passed[:8]) + more
        why = "ignored, as transformers computes the same without"
        warnings.warn(f"config.json: {names}: {why}{code}", stacklevel=5)
    found = {name: raw.get(name, one.default) for name, one in known.items()}
    for name, one in known.items():
        if one.compute is not None and found[name] is None:
            found[name] = one.compute(found)
            one.check(found[name])
    return found


def _is_usual(name: str, value: object) -> bool:
    """Whether a word of `FIXED` says what is computed without it too."""
    if name == "layer_types":
        return isinstance(value, list) and all(one == "full_attention" for one in value)
    return name == "position_embedding_type" and not str(value).startswith("relative")


@functools.cache
def _table() -> JSON:
    """What transformers reads from a config.json: made of its source code by
    tests/pretrained/parity/words.py."""
    found: JSON = json.loads((Path(__file__).parent / "words.json").read_text())
    return found


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


def default_values(model_type: str) -> JSON:
    """Attribute -> its value where config.json of a family has none.

    >>> default_values("mistral")["num_key_value_heads"]
    8
    """
    found: JSON = _table()["defaults"].get(model_type, {})
    return found


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Is one of these shell patterns that of the name?

    >>> matches("h.3.attn.bias", ["h.*.bias"])
    True
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def shown(value: object, limit: int = 120) -> str:
    """The `repr` of a value from a file, cut to about `limit` characters.

    >>> shown("x" * 1000, 20), shown([1, None])
    ("'xxxxxxx...xxxxxxxx'", '[1, None]')
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    return short.repr(value)


def bad_value(name: str, value: object, why: str) -> ValueError:
    """The error about an attribute of config.json.

    >>> str(bad_value("rotary_dim", 99, "is more than the width of a head, 64"))
    'config.json: rotary_dim = 99 is more than the width of a head, 64'
    """
    return ValueError(f"config.json: {name} = {shown(value)} {why}")
