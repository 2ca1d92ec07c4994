"""Looks up names in a registry, and keywords of functions; an unknown one is an error that lists
those that are known."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def lookup(table: Mapping[str, T], name: str, *, what: str) -> T:
    """`table[name]`, or a ValueError that lists the known names.

    Args:
      table: name -> entry.
      name: the name to look up.
      what: what the names are of, for the error.

    >>> lookup({"apple": 1, "pear": 2}, "aple", what="fruit")
    Traceback (most recent call last):
    ValueError: unknown fruit 'aple': did you mean 'apple'? known: apple, pear
    """
    if isinstance(name, str) and name in table:
        return table[name]
    near = nearest(str(name), table)
    hint = f"did you mean {near!r}? " if near else ""
    known = ", ".join(one or repr(one) for one in table)
    raise ValueError(f"unknown {what} {name!r}: {hint}known: {known}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name at an edit distance of at most 2 that keeps more than half of the letters,
    closest first; None if there is none.

    >>> nearest("wid", ["standard", "wide"]), nearest("rope", ["none", "rotary"])
    ('wide', None)
    """
    close = [(edit_distance(name, other), other) for other in known]
    close = [(d, other) for d, other in close if d <= 2 and 2 * d < max(len(name), len(other))]
    return min(close)[1] if close else None


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and replacements of a letter that make b of a.

    >>> edit_distance("albrt", "albert"), edit_distance("wide", "narrow")
    (1, 6)
    """
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


def _hints(names: str, hint: str) -> dict[str, str]:
    return {name: hint.replace("NAME", name) for name in names.split()}


_MODEL_WIDTH = _hints("hidden_size d_model embed_dim dim n_embd", "width")
HINTS: dict[str, dict[str, str]] = {
    # Attention and heads.
    "is_causal": _hints("causal", "is_causal"),
    "mask": _hints("attn_mask attention_mask", "mask (True = may attend)")
    | _hints("key_padding_mask", "mask=~NAME[:, None, None] (True = may attend)"),
    "dropout_rate": _hints("dropout dropout_p", "dropout_rate"),
    "dropout_key": _hints(
        "dropout_rng deterministic broadcast_dropout",
        "dropout_rate and dropout_key; attnlab.adapters.attention_fn has the keywords of Flax",
    )
    | _hints(
        "dtype precision module force_fp32_for_softmax",
        "attnlab.adapters.attention_fn, which has the keywords of Flax",
    ),
    "local_window_size": _hints("window window_size sliding_window", "local_window_size"),
    "logits_soft_cap": _hints("soft_cap softcap", "logits_soft_cap"),
    "implementation": _hints("backend", "implementation"),
    "tap": _hints(
        "return_probs return_weights need_weights capture patch",
        'attnlab.capture({}, ..., names=("probs",)) to return or replace values inside',
    ),
    # Layouts.
    "num_heads": _hints("heads n_head n_heads nhead num_attention_heads", "num_heads")
    | _MODEL_WIDTH,
    "num_kv_heads": _hints("kv_heads n_kv_heads num_key_value_heads", "num_kv_heads"),
    "head_dim": _hints("key_dim dim_head d_k", "head_dim")
    | _hints("qkv_features", "head_dim=NAME // num_heads"),
    "key_width": _hints("kdim", "key_width"),
    "value_width": _hints("vdim", "value_width"),
    "biases": _hints("bias use_bias", "biases=('q', 'k', 'v', 'o')"),
    "layout": _hints("num_heads num_kv_heads head_dim", "layout=Standard(width=..., num_heads=...)")
    | _hints("qkv_features", "layout=Standard(width=..., num_heads=..., head_dim=...)"),
    # Models.
    "kind": _hints("causal is_causal", "kind='decoder'"),
    "heads": _hints(
        "num_heads num_kv_heads head_dim value_dim qk_norm extras biases scale",
        "heads=Standard(num_heads=..., NAME=...)",
    )
    | _hints("num_heads n_head n_heads nhead num_attention_heads", "heads=Standard(num_heads=...)")
    | _hints("num_key_value_heads", "heads=Standard(num_heads=..., num_kv_heads=...)")
    | _hints("key_dim", "heads=Standard(num_heads=..., head_dim=...)")
    | _hints("layout", "heads, as in heads=Wide(num_heads=4)"),
    "num_layers": _hints("depth n_layers n_layer num_hidden_layers layers", "num_layers")
    | _MODEL_WIDTH,
    "max_len": _hints(
        "max_length max_position_embeddings block_size context_length max_seq_len n_positions",
        "max_len",
    ),
    "ffn": _hints(
        "intermediate_size mlp_dim d_ff dim_feedforward ffn_dim ffn_width", "ffn=FFN(width=...)"
    )
    | _hints("activation hidden_act", "ffn=FFN(activation=...)"),
    "clip": _hints("intermediate_size hidden_dim mlp_dim d_ff dim_feedforward", "width"),
    "norm": _hints("layer_norm_eps rms_norm_eps", "norm=Norm(eps=...)"),
    "eps": _hints("epsilon", "eps"),
    "positions": _hints("rope_theta", "positions=Rotary(base=...)"),
    "base": _hints("theta rope_theta", "base"),
    "attention": _hints("window order implementation", "attention=Attention(NAME=...)")
    | _hints("sliding_window", "attention=Attention(window=...)"),
    "dropout": _hints("dropout_rate", "dropout=Dropout(rate=...)"),
    "output": _hints("tied tie_word_embeddings", "output=OutputHead(kind='tied')"),
    "sharing": _hints("plan sharing_plan", "sharing"),
    "compute": _hints("dtype", "compute=Compute(dtype=...)"),
    # Training.
    "optimizer": _hints("learning_rate lr", "optimizer=OptimizerConfig(learning_rate=...)")
    | _hints("weight_decay", "optimizer=OptimizerConfig(NAME=...)"),
    "schedule": _hints("warmup_steps final_learning_rate", "schedule=ScheduleConfig(NAME=...)"),
    "learning_rate": _hints("lr", "learning_rate"),
    # Calls of models.
    "padding_mask": _hints("attention_mask key_padding_mask", "padding_mask (True = a token)"),
    "deterministic": _hints("train training is_training", "deterministic=not NAME"),
    "capture": _hints("output_attentions", 'capture=("probs",)'),
    "sampling": _hints("temperature top_k top_p", "sampling=Sampling(NAME=...)"),
}
"""Our keyword -> keywords of other libraries, or of other records of ours, and what to write."""


def check_keywords(function: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first name of `names` that is not in `known`.

    >>> check_keywords("attend", ["causal"], ["is_causal", "scale"])
    Traceback (most recent call last):
    TypeError: attend() got an unknown keyword 'causal': write is_causal; known: is_causal, scale
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            near = nearest(name, known)
            written = [HINTS[ours][name] for ours in known if name in HINTS.get(ours, {})]
            hint = f": write {written[0].format(function)};" if written else ";"
            hint = f": did you mean {near!r}?" if near and not written else hint
            raise TypeError(
                f"{function}() got an unknown keyword {name!r}{hint} known: {', '.join(known)}"
            )


def checks_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """The function, with the TypeError of `check_keywords` for an unknown keyword."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_keywords(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked
