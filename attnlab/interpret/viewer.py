"""Attention of all heads as one self-contained HTML page: `view` -> `Page`.

A grid of layers x heads, and one head large: as a matrix, as edges between tokens, or on the text.
The page loads nothing from elsewhere. It is made of arrays, which may come from any model.
"""

import base64
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from attnlab.atomic import write_atomic
from attnlab.sharing import Group

HERE = Path(__file__).parent
SCRIPTS = ("drawing.js", "forms.js", "panel.js", "viewer.js")
"""Parts of the script of a page, in the order in which they run."""
HEIGHT = 860
"""Pixels of a page inside a notebook."""


class AttentionMaps(NamedTuple):
    """One attention of a model on one text: all its layers and heads."""

    probs: ArrayLike
    """[L, N, T, S], or [L, 1, N, T, S] as `capture` returns them."""
    tokens: Sequence[str]
    """The T query tokens."""
    keys: Sequence[str] | None = None
    """The S key tokens; None: the same."""
    statistics: Mapping[str, ArrayLike] = {}
    """Name -> [L, N], NaN where a head has none."""
    plan: Mapping[str, Sequence[Group]] = {}
    """Sublayer -> parameter group of every layer, as in `Plan`; the first is highlighted."""
    descriptions: Mapping[str, str] = {}
    """Name of a statistic -> its description."""
    name: str = "attention"
    """On the button that selects it."""


class Panel(NamedTuple):
    """One model of a page; several stand next to each other."""

    maps: Sequence[AttentionMaps]
    """Its attentions, of which one is shown at a time."""
    name: str = ""
    """The heading."""
    description: str = ""
    """The line below it."""


class Page(NamedTuple):
    """A complete page: a file, or the output of a notebook cell."""

    html: str
    """The whole file."""

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the page. Raises FileExistsError if the file exists, unless `overwrite`."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists already; pass overwrite=True, or another path")
        write_atomic(path, self.html.encode())
        return path

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="attention heads" srcdoc="{html.escape(self.html)}" width="100%" '
            f'height="{HEIGHT}" style="border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page of {len(self.html):,} characters"


def view(
    probs: ArrayLike,
    tokens: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    statistics: Mapping[str, ArrayLike] | None = None,
    plan: Mapping[str, Sequence[Group]] | None = None,
    title: str = "Attention heads",
    description: str = "",
) -> Page:
    """The page of one attention on one text.

    Values are stored in a byte each, in steps of 1/255 of the largest of their row, so p is off by
    at most 1/510 (1/254 where talking heads make some negative). Causal attention is stored up to
    the diagonal: 144 heads of 512 tokens take 26 MB, otherwise 51 MB.

    Args:
      probs: [L, N, T, S], or [L, 1, N, T, S] as `capture` returns them.
      tokens: the T query tokens.
      keys: the S key tokens, if they are others.
      statistics: name -> [L, N], such as `head_statistics`.
      plan: sublayer -> parameter group of every layer; layers that share are highlighted together.
      title, description: of the page. For several models or attentions see `view_panels`.

    Raises:
      ValueError: shapes that do not fit, several texts, or values that are not finite.

    >>> probs = np.tri(3)[None, None] / np.arange(1, 4)[:, None]
    >>> page = view(probs, ["a", "b", "c"], statistics={"first": [[0.6]]})
    >>> "http" in page.html, "Layer" in page.html
    (False, True)
    """
    maps = AttentionMaps(probs, tokens, keys, statistics or {}, plan or {})
    return view_panels([Panel([maps], description=description)], title=title)


def view_panels(panels: Sequence[Panel], *, title: str = "Attention heads") -> Page:
    """The page of one or several models, each with one or several attentions (of an encoder, of a
    decoder, and cross-attention).

    Args:
      panels: models.
      title: of the page.

    Raises:
      ValueError: as `view`.

    >>> probs = np.tri(3)[None, None] / np.arange(1, 4)[:, None]
    >>> panel = Panel([AttentionMaps(probs, ["a", "b", "c"])], name="one")
    >>> "one" in view_panels([panel]).html
    True
    """
    contents, values = [], []
    for i, panel in enumerate(panels):
        parts = []
        for j, maps in enumerate(panel.maps):
            probs = _checked(maps)
            lower = _is_lower(probs)
            signed = bool((probs < 0).any())
            parts.append(_describe(maps, probs.shape, lower, signed))
            for layer, heads in enumerate(probs):
                for head, p in enumerate(heads):
                    kept = base64.b64encode(quantise(p, lower, signed)).decode()
                    name = f"v{i}-{j}-{layer}-{head}"
                    values.append(f'<script type="text/plain" id="{name}">{kept}</script>')
        contents.append({"name": panel.name, "description": panel.description, "maps": parts})
    # In ASCII and without "<" it can stand inside a script; groups may be integers of NumPy.
    page = json.dumps({"panels": contents}, allow_nan=False, default=int).replace("<", "\\u003c")
    pieces = {
        "title": html.escape(title),
        "style": _read("viewer.css"),
        "script": "\n".join(map(_read, SCRIPTS)),
        "page": page,
        "values": "\n".join(values),
    }
    return Page(re.sub(r"\{\{(\w+)\}\}", lambda m: pieces[m[1]], _read("viewer.html")))


def quantise(probs: np.ndarray, lower: bool = False, signed: bool = False) -> bytes:
    """[T, S] -> the largest magnitude of each row (float32, little-endian), then a byte per value:
    255ths of it (`signed`: 128 + 127ths); with `lower` only those up to the diagonal.

    >>> quantise(np.array([[0.5, 0.25], [0.0, 0.0]]))[8:].hex()
    'ff800000'
    """
    tops = np.abs(probs).max(axis=-1, keepdims=True).astype("<f4")
    share = np.divide(probs, tops, out=np.zeros(probs.shape, np.float32), where=tops > 0)
    steps = np.rint(share * 127 + 128 if signed else share * 255).clip(0, 255).astype(np.uint8)
    if lower:
        steps = steps[np.tril_indices(len(probs))]
    return bytes(tops.tobytes() + steps.tobytes())


def _checked(attention: AttentionMaps) -> np.ndarray:
    """The probs [L, N, T, S] in float32."""
    probs = np.asarray(attention.probs)
    if probs.ndim == 5 and probs.shape[1] == 1:
        probs = probs[:, 0]
    if probs.ndim != 4:
        raise ValueError(
            f"probs {probs.shape} must be [layers, heads, queries, keys] of one text; "
            "of several choose one, as probs[:, 0]"
        )
    layers, heads, length, size = probs.shape
    if 0 in probs.shape:
        raise ValueError(f"probs {probs.shape} are empty")
    texts = (("tokens", attention.tokens, length), ("keys", _keys(attention), size))
    for name, text, count in texts:
        if isinstance(text, str):
            raise ValueError(f"{name} must be a list of {count} strings, not {text!r}")
        if len(text) != count:
            raise ValueError(f"{len(text)} {name} do not fit probs {probs.shape}: give {count}")
    for name, value in attention.statistics.items():
        if np.shape(value) != (layers, heads):
            raise ValueError(
                f"statistic {name!r} {np.shape(value)} must be [layers, heads] {(layers, heads)}"
            )
    for sublayer, groups in attention.plan.items():
        if len(groups) != layers:
            raise ValueError(f"plan: {sublayer!r} has {len(groups)} layers, probs have {layers}")
    probs = probs.astype(np.float32)
    if not np.isfinite(probs).all():
        raise ValueError("probs contain NaN or inf: the model diverged or overflowed")
    return probs


def _keys(attention: AttentionMaps) -> Sequence[str]:
    return attention.tokens if attention.keys is None else attention.keys


def _is_lower(probs: np.ndarray) -> bool:
    """Does no query attend to a later key?"""
    length, size = probs.shape[2:]
    ahead = ~np.tri(length, size, dtype=bool)
    return length == size and not any(p[:, ahead].any() for p in probs)


def _describe(
    attention: AttentionMaps, shape: tuple[int, ...], lower: bool, signed: bool
) -> dict[str, object]:
    """Data of the attention in the page, without its values."""
    layers, heads, length, size = shape
    return {
        "name": attention.name,
        "layers": layers,
        "heads": heads,
        "rows": length,
        "columns": size,
        "lower": lower,
        "signed": signed,
        "tokens": list(map(str, attention.tokens)),
        "keys": list(map(str, _keys(attention))),
        "statistics": {name: list(_rows(a)) for name, a in attention.statistics.items()},
        "plan": {sublayer: list(groups) for sublayer, groups in attention.plan.items()},
        "descriptions": dict(attention.descriptions),
    }


def _rows(values: ArrayLike) -> Iterator[list[float | None]]:
    """JSON has no NaN; six digits are enough to read."""
    for row in np.asarray(values, np.float64).tolist():
        yield [float(f"{x:.6g}") if math.isfinite(x) else None for x in row]


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8").rstrip("\n")
