"""config.json: every attribute is read, known to change nothing, or refused by name."""

import dataclasses
import fnmatch
import reprlib
import warnings
from collections.abc import Callable, Iterable, Mapping

from attnlab.nested import JSON

LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = 1e38
MAX_LAYERS = 10_000

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
    "sliding_window": None,
    "layer_types": None,
}
QUANTIZED = ("quantization_config", "compression_config")


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One attribute of config.json.

    Attributes:
      name: in config.json.
      default: its value where config.json has none; values are of the same type.
      nullable: null is allowed too.
      json_type: of values; needed where the default is None. None with a default of None: any JSON
        value, which the family checks.
      least: of whole numbers.
      is_depth: it counts layers.
      compute: attributes -> its value where config.json has none or null.
      follows: attributes from which `compute` derives the only value that it may have.
    """

    name: str
    default: object = None
    nullable: bool = False
    json_type: type | None = None
    least: int = 1
    is_depth: bool = False
    compute: Callable[[JSON], object] | None = None
    follows: tuple[str, ...] = ()

    def check(self, value: object) -> None:
        """Raise ValueError unless `value` is of the right type, finite, and of a possible size."""
        if self.json_type is None and self.default is None:
            return
        if value is None and (self.nullable or self.compute is not None):
            return
        name, kind = self.name, self.json_type or type(self.default)
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
            like = "" if self.default is None else f", as {self.default!r} is"
            raise bad_value(name, value, f"should be a {kind.__name__}{like}")
        if kind is int:
            assert isinstance(value, int)
            most = MAX_LAYERS if self.is_depth else LARGEST_COUNT
            if not self.least <= value <= most:
                raise bad_value(name, value, f"must be from {self.least} to {most:,}")
        if kind is float:
            check_number(name, value, least=0.0 if "eps" in name else -LARGEST_NUMBER)


def derived(name: str, *follows: str) -> Attribute:
    """A whole number that must be the sum of other attributes, and may be null.

    >>> derived("head_dim", "width").follows
    ('width',)
    """
    total = lambda attributes: sum(attributes[other] for other in follows)
    return Attribute(name, json_type=int, compute=total, follows=follows)


def read_attributes(
    raw: JSON,
    attributes: Iterable[Attribute],
    fixed: Mapping[str, object],
    ignore: tuple[str, ...] = (),
    changes_nothing: Callable[[str], bool] = lambda name: False,
) -> JSON:
    """Read the attributes of a family from config.json.

    Other words that change nothing are let pass with one warning for all of them, and silently
    where they are null or false.

    Args:
      raw: the object in config.json.
      attributes: what the family reads.
      fixed: attributes that may only have this value, beside those of `FIXED`.
      ignore: patterns of further attributes to leave out.
      changes_nothing: whether a word of this name, which none of these is, does not change what
        the family computes.

    Returns:
      Name -> value of every attribute of the family.

    Raises:
      ValueError: names the attribute that is unknown, or has a value that is not supported.
    """
    known, fixed, passed = {a.name: a for a in attributes}, FIXED | dict(fixed), list[str]()
    for name, value in raw.items():
        if name in known:
            known[name].check(value)
        elif matches(name, ignore):
            continue
        elif name in fixed:
            if value != fixed[name]:
                raise bad_value(name, value, f"is not supported, only {fixed[name]!r}")
        elif name in QUANTIZED:
            if value is not None:
                raise bad_value(
                    name,
                    value,
                    "is not supported: quantized weights are not read; load the model before it "
                    "was quantized, or save it again after model.dequantize() of transformers",
                )
        elif matches(name, HARMLESS):
            continue
        elif changes_nothing(name):
            passed += [name] * (value not in (None, False))
        else:
            raise ValueError(
                f"config.json: {shown(name)[1:-1]} = {shown(value)} is unknown here and may change "
                f"what the model computes; if it does not, pass ignore=({shown(name)},)"
            )
    if passed:
        _warn(passed)
    found = {name: raw.get(name, one.default) for name, one in known.items()}
    for name, one in known.items():
        if one.compute is None or (found[name] is not None and not one.follows):
            continue
        computed = one.compute(found)
        if found[name] not in (None, computed):
            others = " and ".join(f"{other} = {shown(found[other])}" for other in one.follows)
            why = f"contradicts {others}, from which follows {computed!r}"
            raise bad_value(name, found[name], why)
        found[name] = computed
    return found


def _warn(passed: list[str]) -> None:
    names = ", ".join(shown(name, 40)[1:-1] for name in passed[:8])
    more = f" and {len(passed) - 8} more words" if len(passed) > 8 else ""
    code = "; the code that auto_map names is not run" if "auto_map" in passed else ""
    warnings.warn(
        f"config.json: {names}{more}: ignored, as transformers computes the same without{code}",
        stacklevel=5,
    )


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


def check_number(name: str, value: object, *, least: float = -LARGEST_NUMBER) -> None:
    """Raises ValueError unless `value` is a finite number of at least `least`."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not least <= value <= LARGEST_NUMBER
    ):
        bound = f" of at least {least:g}" if least > -LARGEST_NUMBER else ""
        raise bad_value(name, value, f"must be a finite number{bound}")
