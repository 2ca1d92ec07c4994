"""What heads look at, as one page of HTML that needs nothing else: `view` -> `Page`.

Layers x heads as small pictures, one head large, as a matrix, as lines between tokens or on the
text itself; who looks where with numbers. The page loads nothing from anywhere. It is made of
arrays alone: what is shown comes from any model, of this library or not.
"""

import base64
import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab.sharing.plan import Group, resolve_kv_sources

HERE = Path(__file__).parent
SCRIPTS = ("drawing.js", "forms.js", "side.js", "viewer.js")
"""In the order in which they run."""
HEIGHT = 860
"""Pixels of a page inside a notebook."""


class Maps(NamedTuple):
    """One attention of a model on one text: all its layers and heads."""

    probs: Any
    """[L, N, T, S], or [L, 1, N, T, S] as a model shows them"""
    tokens: Sequence[str]
    """The T tokens that look"""
    keys: Sequence[str] | None = None
    """The S tokens that are looked at; None: the same"""
    statistics: Mapping[str, Any] = {}
    """Name -> [L, N], NaN where a head has none"""
    plan: Mapping[str, Sequence[Group]] = {}
    """Part -> its slot in every layer, as in `Plan`; the first is the one that lights up"""
    meanings: Mapping[str, str] = {}
    """Name of a statistic -> what it is"""
    name: str = "attention"


class Side(NamedTuple):
    """One model of a page; several stand side by side."""

    maps: Sequence[Maps]
    name: str = ""
    about: str = ""


class Page(NamedTuple):
    """A page that is whole: a file, or the output of a cell in a notebook."""

    html: str

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes it. Raises FileExistsError for a file that is there, unless `overwrite`."""
        with Path(path).open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(self.html)
        return Path(path)

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="attention heads" srcdoc="{html.escape(self.html)}" width="100%" '
            f'height="{HEIGHT}" style="border:0"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page of {len(self.html):,} characters"


def view(
    probs: Any,
    tokens: Sequence[str],
    *,
    keys: Sequence[str] | None = None,
    statistics: Mapping[str, Any] | None = None,
    plan: Mapping[str, Sequence[Group]] | None = None,
    title: str = "Attention heads",
    about: str = "",
) -> Page:
    """The page of one attention on one text.

    probs [L, N, T, S] (or [L, 1, N, T, S], as `show=("probs",)` gives them) of the T `tokens`, to
    the S `keys` where these are others. `statistics` are name -> [L, N], as `head_statistics` gives
    them, `plan` part -> slot of every layer: layers that share weights light up together. For
    several models, or several attentions of one, see `view_sides`.

    A value is kept in a byte: in steps of 1/255 of the largest of its row, so p is off by at most
    1/510. Where no token looks ahead only what lies up to the diagonal is kept: 144 heads of 512
    tokens are 51 MB, of a decoder 26 MB. Mixed probs (talking heads) may be negative: then the
    steps are of 1/127.

    Raises ValueError for shapes that do not fit each other, several texts, and values that are not
    finite.

    >>> probs = np.tri(3)[None, None] / np.arange(1, 4)[:, None]
    >>> page = view(probs, ["a", "b", "c"], statistics={"first": [[0.6]]})
    >>> "http" in page.html, "Layer" in page.html
    (False, True)
    """
    maps = Maps(probs, tokens, keys, statistics or {}, plan or {})
    return view_sides([Side([maps], about=about)], title=title)


def view_sides(sides: Sequence[Side], *, title: str = "Attention heads") -> Page:
    """The page of one model or of several side by side, each with one attention or several (of an
    encoder, of a decoder, between them)."""
    told, values = [], []
    for i, side in enumerate(sides):
        parts = []
        for j, maps in enumerate(side.maps):
            probs = _checked(maps)
            lower = _is_lower(probs)
            signed = bool((probs < 0).any())
            parts.append(_describe(maps, probs.shape, lower, signed))
            for layer, heads in enumerate(probs):
                for head, p in enumerate(heads):
                    kept = base64.b64encode(quantise(p, lower, signed)).decode()
                    name = f"v{i}-{j}-{layer}-{head}"
                    values.append(f'<script type="text/plain" id="{name}">{kept}</script>')
        told.append({"name": side.name, "about": side.about, "maps": parts})
    # In ASCII and without "<" it can stand inside a script.
    page = json.dumps({"sides": told}, allow_nan=False).replace("<", "\\u003c")
    pieces = {
        "title": html.escape(title),
        "style": _read("viewer.css"),
        "script": "\n".join(map(_read, SCRIPTS)),
        "page": page,
        "values": "\n".join(values),
    }
    fill = lambda found: pieces[found[1]]
    return Page(re.sub(r"\{\{(\w+)\}\}", fill, _read("viewer.html")))


def quantise(probs: np.ndarray, lower: bool = False, signed: bool = False) -> bytes:
    """[T, S] -> the largest size of each row (float32, little-endian), then a byte per value: its
    step of 255 (`signed`: 128 + its step of 127); with `lower` only those up to the diagonal.

    >>> quantise(np.array([[0.5, 0.25], [0.0, 0.0]]))[8:].hex()
    'ff800000'
    """
    tops = np.abs(probs).max(axis=-1, keepdims=True).astype("<f4")
    share = np.divide(probs, tops, out=np.zeros(probs.shape, np.float32), where=tops > 0)
    steps = np.rint(share * 127 + 128 if signed else share * 255).clip(0, 255).astype(np.uint8)
    if lower:
        steps = steps[np.tril_indices(len(probs))]
    return tops.tobytes() + steps.tobytes()


def _checked(maps: Maps) -> np.ndarray:
    """The probs [L, N, T, S] in float32."""
    probs = np.asarray(maps.probs)
    if probs.ndim == 5 and probs.shape[1] == 1:
        probs = probs[:, 0]
    if probs.ndim != 4:
        raise ValueError(
            f"probs {probs.shape} must be [layers, heads, queries, keys] of one text; "
            "of several choose one, as probs[:, 0]"
        )
    layers, heads, length, size = probs.shape
    if 0 in probs.shape:
        raise ValueError(f"probs {probs.shape} hold nothing to see")
    texts = (("tokens", maps.tokens, length), ("keys", _keys(maps), size))
    for name, text, count in texts:
        if isinstance(text, str):
            raise ValueError(f"{name} must be a list of {count} texts, one a token, not {text!r}")
        if len(text) != count:
            raise ValueError(f"{len(text)} {name} do not fit probs {probs.shape}: give {count}")
    for name, value in maps.statistics.items():
        if np.shape(value) != (layers, heads):
            raise ValueError(
                f"statistic {name!r} {np.shape(value)} must be [layers, heads] {(layers, heads)}"
            )
    for part, slots in maps.plan.items():
        if len(slots) != layers:
            raise ValueError(f"plan: {part!r} names {len(slots)} layers, probs have {layers}")
    probs = probs.astype(np.float32)
    if not np.isfinite(probs).all():
        raise ValueError("probs hold values that are not finite: the model diverged, or overflowed")
    return probs


def _keys(maps: Maps) -> Sequence[str]:
    return maps.tokens if maps.keys is None else maps.keys


def _is_lower(probs: np.ndarray) -> bool:
    """Does no token look ahead?"""
    length, size = probs.shape[2:]
    ahead = ~np.tri(length, size, dtype=bool)
    return length == size and not any(p[:, ahead].any() for p in probs)


def _describe(maps: Maps, shape: tuple[int, ...], lower: bool, signed: bool) -> dict[str, Any]:
    """All that the page knows of it but its values."""
    layers, heads, length, size = shape
    return {
        "name": maps.name,
        "layers": layers,
        "heads": heads,
        "rows": length,
        "columns": size,
        "lower": lower,
        "signed": signed,
        "tokens": list(map(_text, maps.tokens)),
        "keys": list(map(_text, _keys(maps))),
        "statistics": {name: list(_rows(a)) for name, a in maps.statistics.items()},
        "plan": {part: _slots(slots) for part, slots in maps.plan.items()},
        "meanings": dict(maps.meanings),
    }


def _slots(slots: Sequence[Group]) -> list[int | str]:
    """Those that read what another layer made name it: "@0"."""
    makers = enumerate(resolve_kv_sources(tuple(slots)))
    return [int(slots[i] or 0) if maker == i else f"@{maker}" for i, maker in makers]


def _text(token: Any) -> str:
    return token if isinstance(token, str) else str(token)


def _rows(values: Any) -> Iterator[list[float | None]]:
    """JSON has no NaN; six digits are enough to read."""
    for row in np.asarray(values, np.float64).tolist():
        yield [float(f"{x:.6g}") if math.isfinite(x) else None for x in row]


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8").rstrip("\n")
