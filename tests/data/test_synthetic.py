"""Synthetic datasets, by hand and by NumPy."""

import numpy as np
from conftest import assert_close

from attnlab import data
from attnlab.data.synthetic import examples


def test_every_case_of_a_small_graph():
    """Written out by hand: 0 -> 1 and 1 -> 0, selectors 2 and 3, query 4."""
    rows = examples(2, "complete")
    assert rows["tokens"].tolist() == [[0, 1, 2, 4], [1, 0, 2, 4], [0, 1, 3, 4], [1, 0, 3, 4]]
    assert rows["values"].tolist() == [[-1, -1, -1, v] for v in (0, 1, 1, 0)]
    assert len(examples(5, "complete")["tokens"]) == 2 * 5 * 4
    dataset = data.Endpoints(vertices=5).load(4)
    assert len(dataset.heldout(100)["tokens"]) == 2 * 5 * 4  # none is scored twice
    arcs = examples(5, "acyclic")["tokens"][:, :2]
    assert len(arcs) == 5 * 4
    assert (arcs[:, 0] < arcs[:, 1]).all()


def test_the_farthest_point_by_numpy():
    """Of every point another one, at the largest distance, all of length 1."""
    rows = data.Farthest(dimensions=3, heldout_rows=7).load(5).heldout(0)
    x, y = rows["features"], rows["answers"]
    assert_close(np.sum(x**2, axis=-1), np.ones((7, 5), np.float32))
    far = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)
    for row in range(7):
        for point in range(5):
            other = np.argmax(far[row, point])
            assert other != point
            assert np.array_equal(y[row, point], x[row, other])
    assert rows["scored"].all()


def test_every_key_is_stated_and_asked_once():
    """After the pairs, at even positions, and its value is the target; other tokens are no keys."""
    rows = data.Recall(vocab_size=16, pairs=3, heldout_rows=20).load(24).heldout(0)
    for tokens, values in zip(rows["tokens"], rows["values"], strict=True):
        asked = np.flatnonzero(values >= 0)
        assert len(asked) == 3
        assert (asked >= 6).all()
        assert (asked % 2 == 0).all()
        stated = dict(zip(tokens[:6:2].tolist(), tokens[1:6:2].tolist(), strict=True))
        assert dict(zip(tokens[asked].tolist(), values[asked].tolist(), strict=True)) == stated
        assert (tokens < 8).sum() == 6
        assert all(value >= 8 for value in stated.values())
