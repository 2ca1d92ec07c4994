"""Proofs by the share of a row that its keys get: what gates, sinks and extra keys alone can do."""

from collections.abc import Iterator

import numpy as np

from attnlab.conversion.measure import MEASURABLE, difference, draw
from attnlab.conversion.question import Question, Witness
from attnlab.heads.old.spec import HeadSpec


def shown(spec: HeadSpec) -> set[str]:
    """The maps that have a bias, told or not: a norm's bias is one of q and k, extra keys give a
    row something that no text has."""
    letters = {ours for ours, theirs in spec.tied.items() if theirs in spec.biases}
    letters |= {"o"} & set(spec.biases) | ({"q", "k"} if spec.qk_norm_bias else set())
    return letters | ({"v", "o"} if spec.extra_keys else set())


def _has_shares(spec: HeadSpec) -> bool:
    return bool(spec.sink or spec.extra_keys)


def mass(ask: Question) -> Iterator[Witness]:
    """S keys that are the same get S / (S + A + e) of a row where all scores are 0: A extra keys,
    e = 1 for a sink of 0. So (S + A + e) / S times what the values add does not depend on S.

    Scores are 0 where keys are (y = 0) or queries (x = 0); without e and A no score matters.
    """
    target = ask.target
    if target.sink == "learnt" or not any(map(_has_shares, (ask.source, target))):
        return
    count, one, biased = target.extra_keys or 0, int(target.sink == "one"), shown(target)
    x, context, values = draw(ask.source, ask.rng)
    x, context, values = (np.repeat(a[:, :1], a.shape[1], axis=1) for a in (x, context, values))
    texts = []
    if not (count or one):
        texts = [(x, context)]
    if not count and "k" not in biased:
        texts += [(x, 0 * context)]
    if "q" not in biased:
        texts += [(0 * x, context)]
    for queries, keys in texts:
        added = []
        for s in (1, 3):
            mask = np.broadcast_to(np.arange(7) < s, (3, 1, 5, 7))
            with_, without = (ask.measure(queries, keys, t * values, mask=mask) for t in (1.0, 0.0))
            added.append((s + count + one) / s * (with_ - without))
        found = difference(added[1], added[0])
        if found > MEASURABLE:
            keys_of = f" / (S + {count + one})" if count + one else ""
            total = f"S{keys_of} of a row" if keys_of else "the whole row"
            yield Witness(
                "mass",
                f"S equal keys get {total} in the target; of the source, 1 and 3 of them differ by "
                f"{found:.2g} beyond that",
                "one key, and the same key three times",
                found,
                0.0,
            )
            return


def gates(ask: Question) -> Iterator[Witness]:
    """Where all keys are alike, queries choose nothing: the output then moves with x by the gates
    alone, N numbers of x where there is one per head."""
    source, target = ask.source, ask.target
    plain = not (source.gate or _has_shares(source))
    if plain or target.gate == "element" or target.extra_keys:
        return
    if target.sink and "k" in shown(target):
        return
    allowed = target.num_heads if target.gate else 0
    mask = np.broadcast_to(np.arange(7) < 1, (3, 1, 5, 7))
    _, context, values = draw(source, ask.rng)
    values = np.broadcast_to(values[:1], values.shape)
    rows: list[np.ndarray] = []
    while len(rows) < allowed + 2:
        out = ask.measure(draw(source, ask.rng)[0], 0 * context, values, mask=mask)
        rows += list(out.reshape(-1, out.shape[-1]))
    outputs = np.stack(rows)
    if not np.all(np.isfinite(outputs)):  # a norm of zeros without an epsilon
        return
    singular = np.linalg.svd(outputs - outputs[0], compute_uv=False)
    found = int(np.sum(singular > MEASURABLE * np.max(np.abs(outputs))))
    if found > allowed:
        by = f"in {allowed} directions, a gate for each head" if allowed else "nowhere"
        yield Witness(
            "gate",
            f"where one key is seen, x moves the output of the target {by}; that of the source "
            f"moves in {found}",
            "outputs of many x that see one key",
            found,
            allowed,
        )
