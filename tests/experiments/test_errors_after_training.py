"""What is drawn after a training may fail; the training is kept."""

import json

from experiments.configs import byte_lm
from experiments.running import arm, maps


def test_an_error_in_maps_or_sample_does_not_lose_the_training(tmp_path, monkeypatch, capsys):
    config = byte_lm.get_config("tiny")
    (tmp_path / "text.txt").write_text("the rose is a rose.\n" * 300)
    config.data.path, config.train.steps = str(tmp_path / "text.txt"), 4
    config.train.seeds = (0,)

    def fails(*_):
        raise MemoryError("a large figure")

    monkeypatch.setattr(maps, "tiles", fails)
    result = arm.run(config, tmp_path / "run", loggers=["tensorboard"], profile="2:3")
    assert result["status"] == arm.COMPLETE
    kept = json.loads((tmp_path / "run/result.json").read_text())
    assert kept["heldout_loss"] == result["heldout_loss"]
    assert kept["sample"]["written"]
    assert "MemoryError: a large figure" in capsys.readouterr().err
    about = json.loads((tmp_path / "run/provenance.json").read_text())
    assert about["hyperparameters"]["train"]["steps"] == 4
    assert list((tmp_path / "run/profile").rglob("*.xplane.pb"))
