"""`python -m experiments.view`: of a run, of a folder, of two side by side."""

import functools
import json
import math
import shutil

import jax
import numpy as np
import pytest
from commands import command
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from written_page import Parsed

from attnlab import data, lab, load, pretrained, training
from attnlab.heads import Standard
from attnlab.models import FFN, ModelConfig, Norm, OutputHead, Relative
from attnlab.training.checkpoint import Checkpoints
from experiments.config import experiment_of
from experiments.configs import byte_lm, translation

MODEL = dict(
    width=12, num_layers=3, heads=dict(num_heads=2), ffn=dict(width=8), max_len=24,
    sharing="cycle:2",
)  # fmt: skip
SEEDS = (4, 9)
TEXT = "na\u00efve </script>"


def weights(config, seeds=()):
    """Large random ones, every number different; behind an axis of seeds."""
    rng = np.random.default_rng(1)
    names = ("source", "tokens")[config.kind != "encoder_decoder" :]
    texts = dict.fromkeys(names, jax.ShapeDtypeStruct((1, 4), "int32"))
    shapes = jax.eval_shape(config.build().init, jax.random.key(0), **texts)["params"]
    draw = lambda a: rng.normal(0, 0.5, (*seeds, *a.shape)).astype(np.float32)
    return jax.tree.map(draw, shapes)


def write_run(folder, config):
    """The workdir of two runs of a model, and the model and the weights of both seeds."""
    config.train.update(seeds=SEEDS, length=20)
    experiment = experiment_of(config)
    params = weights(experiment.model, (len(SEEDS),))
    write_seeds(folder, experiment, SEEDS, params)
    return folder, experiment.model, params


def write_seeds(folder, experiment, seeds, params):
    """The runs of one experiment as they are left on disk; params [seeds, ...]."""
    specs = [lab.RunSpec(f"seed{seed}", experiment, seed).to_dict() for seed in seeds]
    (folder / "specs.json").write_text(json.dumps(specs))
    notes = {"model": training.describe_model(experiment.model.build())}
    for i, spec in enumerate(specs):
        run = folder / "runs" / spec["id"]
        run.mkdir(parents=True)
        (run / "spec.json").write_text(json.dumps(spec))
        with Checkpoints(run / "checkpoints") as checkpoints:
            own = jax.tree.map(lambda a, i=i: a[i : i + 1], params)
            checkpoints.save(7, {"params": own}, notes)


@pytest.fixture(scope="module")
def run(tmp_path_factory, nine_letters):
    config = byte_lm.get_config("tiny")
    config.model.update(MODEL)
    config.data.path = str(nine_letters)
    return write_run(tmp_path_factory.mktemp("run"), config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder with a tokenizer of words."""
    path = tmp_path_factory.mktemp("published") / "gpt2"
    config = ModelConfig(
        width=12, num_layers=2, heads=Standard(num_heads=3, biases=("q", "k", "v", "o")),
        ffn=FFN(activation="gelu_tanh"), vocab_size=5, max_len=16,
    )  # fmt: skip
    params = weights(config)
    pretrained.save(path, config.build(), params)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(path / "tokenizer.json"))
    return path, config, params


@pytest.mark.slow
def test_a_run_beside_a_folder(run, folder, tmp_path):
    out = tmp_path / "heads.html"
    words = [f"--workdir={run[0]}", f"--path={folder[0]}", f"--text={TEXT}", f"--out={out}"]
    told = command("experiments.view", *words, "--noablation")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"{out}: 12 heads, 0.")
    page = Parsed(out.read_text(encoding="utf-8"))
    ours, theirs = (side["maps"][0] for side in page.panels)
    assert ours["tokens"] == [*"na", "\\xc3", "\\xaf", *"ve </script>"]
    assert theirs["tokens"] == ["[UNK]"] * 4  # naïve </ script >
    assert ours["plan"] == {"attention": [0, 1, 0]}
    assert "entropy" in ours["statistics"]
    assert "loss without it" not in ours["statistics"]
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)[None]
    first = jax.tree.map(lambda a: a[0], run[2])
    sides = (run[1], first, ids), (*folder[1:], np.zeros((1, 4), np.int32))
    for i, (config, params, tokens) in enumerate(sides):
        model = config.build()
        found = jax.jit(functools.partial(model.apply, capture=("probs",)))(
            {"params": params}, tokens
        )
        probs = np.asarray(found.captured["probs"][:, 0])
        assert np.abs(page.probs(i) - probs).max() < 1 / 500
    again = command("experiments.view", *words)
    assert again.returncode == 1
    assert "--overwrite" in again.stderr


@pytest.mark.slow
def test_a_run_beside_its_fresh_start(run, tmp_path):
    out = tmp_path / "heads.html"
    out.write_text("an older page")
    flags = [f"--workdir={run[0]}", "--untrained", f"--out={out}", "--overwrite", "--title=<both>"]
    told = command("experiments.view", *flags)
    assert told.returncode == 0, told.stderr
    page, first = Parsed(out.read_text(encoding="utf-8")), f"{run[0].name}, seed4"
    assert [side["name"] for side in page.panels] == [first, f"{first}, untrained"]
    trained, fresh = (side["maps"][0] for side in page.panels)
    assert trained["tokens"] == fresh["tokens"]
    assert np.abs(page.probs(0) - page.probs(1)).max() > 0.1
    lost = [maps["statistics"]["loss without it"] for maps in (trained, fresh)]
    assert np.abs(np.subtract(*lost)).min() > 0
    assert "loss without it (group)" in trained["statistics"]


def test_without_a_text_a_run_shows_what_it_is_scored_on(run):
    opened = load.open_run(run[0], seed=9)
    read = opened.read()
    row = np.asarray(read.inputs["tokens"])
    assert row.shape == (1, 20)
    assert "".join(read.written["tokens"]) == bytes(row[0].tolist()).decode()
    model = opened.config.build()
    metric = read.metric(model)
    loss = float(jax.jit(lambda p: metric.output(p, None))(opened.params))
    ninth = jax.tree.map(lambda a: a[1], run[2])
    logits = jax.jit(model.apply)({"params": ninth}, row).logits[0]
    picked = np.asarray(jax.nn.log_softmax(logits))[np.arange(19), row[0, 1:]]
    spec = json.loads((run[0] / "specs.json").read_text())[0]
    source = data.Text(path=spec["config"]["data"]["path"]).load(20)
    held = np.asarray(source.heldout(8)["tokens"])
    [following] = held[(held[:, :-1] == row).all(axis=1), -1]
    last = float(jax.nn.log_softmax(logits[-1])[following])
    assert abs(loss + (picked.sum() + last) / 20 / math.log(2)) < 1e-4


def test_a_fresh_start_is_that_of_the_seed(run):
    opened = load.open_run(run[0], seed=9)
    inputs = {"tokens": np.zeros((1, 5), np.int32)}
    fresh = opened.initial(inputs)
    expected = jax.jit(opened.config.build().init)(jax.random.key(9), **inputs)["params"]
    assert jax.tree.all(jax.tree.map(np.array_equal, fresh, expected))
    assert not jax.tree.all(jax.tree.map(np.array_equal, fresh, opened.params))


def test_two_texts_for_an_encoder_decoder(run, tmp_path):
    config = translation.get_config()
    config.model.update(MODEL | dict(vocab_size=258, encoder=dict(num_layers=1), sharing="albert"))
    config.data.update(path="", tokenizer="bytes")
    opened = load.open_run(write_run(tmp_path, config)[0])
    read = opened.read("ab", "c\u00e9")
    assert read.inputs["tokens"].tolist() == [[256, 97, 98]]
    assert read.written == {"tokens": ["<start>", "a", "b"], "source": ["c", "\\xc3", "\\xa9"]}
    with pytest.raises(ValueError, match="two texts: give --source"):
        opened.read("ab")
    with pytest.raises(ValueError, match="leave --source"):
        load.open_run(run[0]).read("ab", "c")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["a" * 25], "1 to 24"),
        ([[3, 256]], "256"),
        ([[3, -1]], "-1"),
        (["", "a"], "one text"),
    ],
)
def test_what_a_run_cannot_read(run, asked, said):
    with pytest.raises(ValueError, match=said):
        load.open_run(run[0]).read(*asked)


def test_a_decoder_of_a_folder_goes_on_where_its_text_stops(tmp_path):
    """Its start token, then the text without the end token that the tokenizer puts behind it."""
    path = tmp_path / "t5"
    config = ModelConfig(
        kind="encoder_decoder", width=8, num_layers=1, vocab_size=6, max_len=16,
        norm=Norm(kind="rms"), heads=Standard(num_heads=2, scale=1.0),
        ffn=FFN(bias=False, activation="relu"), positions=Relative(),
        output=OutputHead(scale=8**-0.5),
    )  # fmt: skip
    pretrained.save(path, config.build(), weights(config))
    opened = load.open_folder(path)
    read = opened.read(source=[3, 4])
    assert read.inputs["tokens"].tolist() == [[0]]
    assert read.written == {"tokens": ["0"], "source": ["3", "4"]}
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "the": 2, "cat": 3}, "</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    words.save(str(path / "tokenizer.json"))
    opened = load.open_folder(path)
    read = opened.read("cat", "the cat")
    assert {name: a.tolist() for name, a in read.inputs.items()} == {
        "tokens": [[0, 3]], "source": [[2, 3, 1]],
    }  # fmt: skip
    assert opened.read(source="the cat").inputs["tokens"].tolist() == [[0]]
    assert opened.read([3, 1], "cat").inputs["tokens"].tolist() == [[3, 1]]
    settings = json.loads((path / "config.json").read_text()) | {"decoder_start_token_id": 2}
    (path / "config.json").write_text(json.dumps(settings))
    opened = load.open_folder(path)
    assert opened.read(source="cat").inputs["tokens"].tolist() == [[2]]
    written = "".join(opened.write("", 20, source="the cat"))
    assert opened.describe_text("the cat").endswith(f"continuation: {written!r}")


def test_tokens_that_neither_data_nor_task_have_are_written_as_numbers(nine_letters, tmp_path):
    config = byte_lm.get_config("tiny,masked")
    config.model.update(MODEL | dict(vocab_size=300))
    config.data.path = str(nine_letters)
    opened = load.open_run(write_run(tmp_path, config)[0])
    written = opened.read([97, 256, 257, 299]).written
    assert written == {"tokens": ["a", "[mask]", "<257>", "<299>"]}


def test_what_a_folder_cannot_read(folder, tmp_path):
    opened = load.open_folder(folder[0])
    with pytest.raises(ValueError, match="no text; give --text="):
        opened.read()
    assert opened.read([2, 4]).written["tokens"] == ["cat", "<4>"]
    assert opened.read("the cat").inputs["tokens"].tolist() == [[1, 2]]
    bare = shutil.copytree(folder[0], tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    opened = load.open_folder(bare)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, which holds"):
        opened.read("the cat")
    assert opened.read([2, 4]).written["tokens"] == ["2", "4"]
