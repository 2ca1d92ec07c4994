"""config.json: every attribute is read, known to change nothing, or refused by name."""

import fnmatch
import reprlib
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attnlab.model.config import ModelConfig


class OrNull(NamedTuple):
    """Default of an attribute that may be null, which means something else."""

    default: Any


class Null(NamedTuple):
    """Type of an attribute that is null by default."""

    type: type[Any]


LARGEST_COUNT = 2**31 - 1
LARGEST_NUMBER = 1e38
MAX_LAYERS = 10_000
DEPTHS = {"n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_hidden_layers"}
"""Attributes that count layers."""
MAY_BE_ZERO = {
    "type_vocab_size",
    "first_k_dense_replace",
    "max_window_layers",
    "encoder_stride",
    "pooler_output_size",
}
"""Whole numbers that may be 0; others are at least 1."""


# Token numbers, generation, training, bookkeeping: nothing that a forward pass computes with.
HARMLESS = """
architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path
initializer_range initializer_factor bos_token_id eos_token_id sep_token_id cls_token_id
mask_token_id pad_token_id unk_token_id decoder_start_token_id use_cache output_attentions
output_hidden_states return_dict task_specific_params id2label label2id num_labels
problem_type gradient_checkpointing finetuning_task tokenizer_class prefix torchscript
use_bfloat16 tf_legacy_loss chunk_size_feed_forward classifier_dropout
classifier_dropout_prob qa_dropout seq_classif_dropout summary_* _num_labels output_past
attn_implementation _attn_implementation _attn_implementation_autoset max_length min_length
do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens n_ctx directionality
pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
pooler_type reorder_and_upcast_attn pretraining_tp cache_implementation
""".split()  # noqa: SIM905
FIXED: dict[str, Any] = {
    "pruned_heads": {},
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "is_encoder_decoder": False,
    "position_embedding_type": "absolute",
}
# Their names of activations, and ours; the first name of each is the one that is written.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}


def read_settings(
    raw: dict[str, Any], defaults: dict[str, Any], fixed: dict[str, Any], ignore: tuple[str, ...]
) -> dict[str, Any]:
    """The attributes of `defaults`, with what `raw` says of them.

    Attributes of `fixed` may only have that value. Raises ValueError that names the attribute.
    """
    fixed = FIXED | fixed
    for name, value in raw.items():
        if name in defaults:
            _check(name, value, defaults[name])
        elif any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
            continue
        elif name in fixed:
            if value != fixed[name]:
                raise ValueError(
                    f"config.json: {name} = {shown(value)} is not supported, only {fixed[name]!r}"
                )
        elif not any(fnmatch.fnmatchcase(name, pattern) for pattern in HARMLESS):
            raise ValueError(
                f"config.json: {shown(name)[1:-1]} = {shown(value)} is unknown here and may change "
                f"what the model computes; if it does not, pass ignore=({shown(name)},)"
            )
    plain = {
        name: default.default if isinstance(default, OrNull) else default
        for name, default in defaults.items()
    }
    plain |= {name: None for name, default in plain.items() if isinstance(default, Null)}
    return {name: raw.get(name, default) for name, default in plain.items()}


SIZES = {
    "vocab_size": "vocab_size",
    "max_len": "max_position_embeddings",
    "width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
}
"""Field of a ModelConfig -> what Hugging Face calls it from BERT to Llama."""


def size_fields(settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of `SIZES`."""
    return {ours: settings[theirs] for ours, theirs in SIZES.items()}


def size_settings(config: "ModelConfig") -> dict[str, Any]:
    """The inverse of `size_fields`."""
    return {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}


def activation(settings: dict[str, Any], name: str) -> str:
    """Our name of the activation that `settings[name]` names."""
    theirs = settings[name]
    if theirs not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {name} = {shown(theirs)} is not supported; known: "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[theirs]


def their_activation(ours: str) -> str:
    """The inverse of `activation`."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


def shown(value: Any, limit: int = 120) -> str:
    """The `repr` of a value from a file, cut to about `limit` characters.

    >>> shown("x" * 1000, 20), shown([1, None])
    ("'xxxxxx...xxxxxxx'", '[1, None]')
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    return short.repr(value)


def _check(name: str, value: Any, default: Any) -> None:
    """Check an attribute against its default: of its type, finite, and of a possible size."""
    if isinstance(default, OrNull | Null) and value is None:
        return
    default = default.default if isinstance(default, OrNull) else default
    kind: type[Any] = default.type if isinstance(default, Null) else type(default)
    if kind is type(None):  # the family checks it
        return
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
        like = "" if isinstance(default, Null) else f", as {default!r} is"
        raise ValueError(f"config.json: {name} = {shown(value)} should be a {kind.__name__}{like}")
    if kind is int:
        least, most = int(name not in MAY_BE_ZERO), LARGEST_COUNT
        most = MAX_LAYERS if name in DEPTHS else most
        if not least <= value <= most:
            raise ValueError(
                f"config.json: {name} = {shown(value)} must be from {least} to {most:,}"
            )
    if kind is float:
        check_number(name, value, least=0 if "eps" in name else -LARGEST_NUMBER)


def check_number(name: str, value: Any, *, least: float = -LARGEST_NUMBER) -> None:
    """Raise ValueError for what is no number, not finite, or less than `least`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= LARGEST_NUMBER:
        bound = f" of at least {least:g}" if least > -LARGEST_NUMBER else ""
        raise ValueError(
            f"config.json: {name} = {shown(value)} is no number; write a finite one{bound}"
        )
