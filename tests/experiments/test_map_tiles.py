"""The picture of all heads on TensorBoard."""

import numpy as np
import pytest

from attnlab.lab.attention_maps import FILE, tiles
from experiments.configs import byte_lm
from experiments.run import run_config


def test_heads_stand_in_a_row_and_layers_below_each_other():
    probs = np.random.default_rng(0).random((3, 2, 4, 5))  # L, N, T, S
    picture = tiles(probs.astype(np.float16))
    assert picture.shape == (3 * 6, 2 * 7)
    tile = picture[2 * 6 : 3 * 6, 7:14]  # the last layer's second head, in its frame
    assert (tile[0].max(), tile[:, -1].max(), picture.max()) == (0, 0, 1)
    np.testing.assert_array_equal(tiles(np.zeros((1, 1, 2, 2))), 0)  # a sink takes all
    np.testing.assert_allclose(tile[1:-1, 1:-1], probs[2, 1] / probs[2, 1].max(), atol=2e-3)


@pytest.mark.slow
def test_layers_with_unlike_heads_have_no_map(nine_letters, tmp_path):
    config = byte_lm.get_config("tiny")
    config.data.path = str(nine_letters)
    config.train.steps, config.train.schedule.warmup_steps = 4, 1
    one_head = {"heads": {"layout": "standard", "num_heads": 1}}
    config.model.update(layer_types=((1, one_head), (1, {})))
    config.train.seeds = (0,)
    (result,) = run_config(config, tmp_path)
    assert result.status == "complete"
    assert not (tmp_path / "runs/seed0" / FILE).exists()
