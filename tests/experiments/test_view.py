"""`python -m experiments.view`, of a run, of a folder, of two side by side; and what else reads
them: `experiments.sample`, `experiments.export`, `experiments.inspect_model`."""

import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from config_files import succeed
from goldens import golden_folder
from small_data import word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from written_page import Parsed

from attnlab import data, lab, load, training
from attnlab.models import Sampling, generate, num_parameters, param_shapes
from attnlab.training.checkpoint import Checkpoints
from experiments.config import experiment_of
from experiments.configs import byte_lm, translation
from experiments.inspect_model import describe_text

MODEL = dict(
    width=12, num_layers=3, heads=dict(num_heads=2), ffn=dict(width=8), max_len=24,
    sharing="cycle:2",
)  # fmt: skip
SEEDS = (4, 9)
TEXT = "na\u00efve </script>"


def write_run(folder, config):
    """The workdir of two runs of a model, and the model and the weights of both seeds: large random
    ones, every number different."""
    config.train.update(seeds=SEEDS, length=20)
    experiment, rng = experiment_of(config), np.random.default_rng(1)
    draw = lambda a: rng.normal(0, 0.5, (len(SEEDS), *a.shape)).astype(np.float32)
    params = jax.tree.map(draw, param_shapes(experiment.model))
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
    """A published folder with a tokenizer of words, and the model in it."""
    path = golden_folder(tmp_path_factory.mktemp("published") / "gpt2", "gpt2", {"eos_token_id": 9})
    word_tokenizer(path / "tokenizer.json", {"?": 0, "the": 1, "cat": 2})
    opened = load.open_folder(path)
    return path, opened.config, opened.params


@pytest.mark.slow
def test_a_run_beside_a_folder(run, folder, tmp_path):
    out = tmp_path / "heads.html"
    words = [f"--workdir={run[0]}", f"--path={folder[0]}", f"--text={TEXT}", f"--out={out}"]
    told = succeed("experiments.view", *words, "--noablation")
    assert told.stdout.startswith(f"{out}: 14 heads, 0.")
    page = Parsed(out.read_text(encoding="utf-8"))
    ours, theirs = (side["maps"][0] for side in page.panels)
    assert ours["tokens"] == [*"na", "\\xc3", "\\xaf", *"ve </script>"]
    assert theirs["tokens"] == ["?"] * 4  # naïve </ script >
    assert ours["plan"] == {"attention": [0, 1, 0]}
    assert "entropy" in ours["statistics"]
    assert "loss without it" not in ours["statistics"]
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)[None]
    first = jax.tree.map(lambda a: a[0], run[2])
    sides = (run[1], first, ids), (*folder[1:], np.zeros((1, 4), np.int32))
    for i, (config, params, tokens) in enumerate(sides):
        call = jax.jit(functools.partial(config.build().apply, capture=("probs",)))
        probs = np.asarray(call({"params": params}, tokens).captured["probs"][:, 0])
        assert np.abs(page.probs(i) - probs).max() < 1 / 500


@pytest.mark.slow
def test_a_run_beside_its_fresh_start(run, tmp_path):
    out = tmp_path / "heads.html"
    out.write_text("an older page")
    flags = [f"--workdir={run[0]}", "--untrained", f"--out={out}", "--overwrite", "--title=<both>"]
    succeed("experiments.view", *flags)
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


def test_padding_behind_packed_texts_is_not_shown():
    inputs = {"tokens": np.ones((1, 5), int), "segments": np.array([[1, 1, 2, 0, 0]])}
    example = training.objectives.Example(inputs, inputs["tokens"], np.ones((1, 5)))
    assert load._lengths(example) == {"tokens": 3}


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


def test_what_a_run_cannot_read(run):
    opened = load.open_run(run[0])
    for asked, said in (("a" * 25, "1 to 24"), ([3, 256], "256"), ([3, -1], "-1")):
        with pytest.raises(ValueError, match=said):
            opened.read(asked)
    with pytest.raises(ValueError, match="one text"):
        opened.read("", "a")


def test_a_decoder_of_a_folder_goes_on_where_its_text_stops(tmp_path):
    """Its start token, then the text without the end token that the tokenizer puts behind it."""
    path = golden_folder(tmp_path / "t5", "t5")
    read = load.open_folder(path).read(source=[3, 4])
    assert read.inputs["tokens"].tolist() == [[0]]
    assert read.written == {"tokens": ["0"], "source": ["3", "4"]}
    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "the": 2, "cat": 3}, "</s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    words.save(str(path / "tokenizer.json"))
    opened = load.open_folder(path)
    read = opened.read("cat", "the cat")
    found = {name: a.tolist() for name, a in read.inputs.items()}
    assert found == {"tokens": [[0, 3]], "source": [[2, 3, 1]]}
    assert opened.read(source="the cat").inputs["tokens"].tolist() == [[0]]
    assert opened.read([3, 1], "cat").inputs["tokens"].tolist() == [[3, 1]]
    settings = json.loads((path / "config.json").read_text()) | {"decoder_start_token_id": 2}
    (path / "config.json").write_text(json.dumps(settings))
    opened = load.open_folder(path)
    assert opened.read(source="cat").inputs["tokens"].tolist() == [[2]]
    written = "".join(opened.write("", 20, source="the cat"))
    assert describe_text(opened, "the cat").endswith(f"continuation: {written!r}")


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


def text_of(opened, *given, **options):
    return "".join(opened.write(*given, **options))


def test_a_run_goes_on_with_a_text(run, capsys):
    """Greedily as `generate` does, one of its bytes a token, no longer than the model reads."""
    opened = load.open_run(run[0], SEEDS[1])
    told = text_of(opened, "def né", 100)
    assert "only 17 of 100 new tokens fit" in capsys.readouterr().err
    prompt = jnp.asarray([list("def né".encode())])
    new = generate(opened.params, prompt, opened.config, opened.config.max_len - 7)
    ours = [*"def né".encode(), *np.asarray(new)[0].tolist()]
    assert told == bytes(ours).decode(errors="replace")
    assert not capsys.readouterr().err
    hot = Sampling(temperature=2.0)
    drawn = [text_of(opened, "a", 9, hot, draw=draw) for draw in (0, 1, 2, 0)]
    assert len(set(drawn)) == 3
    assert drawn[0] == drawn[3]
    with pytest.raises(ValueError, match="the text fills all 24 tokens of the model"):
        text_of(opened, "a" * 24, 9)


def test_a_folder_writes_words_or_numbers(folder, tmp_path):
    opened = load.open_folder(folder[0])
    tokens, spans = opened.split("the cat")
    assert (tokens.tolist(), spans.tolist()) == ([1, 2], [[0, 3], [4, 7]])
    assert text_of(opened, "the cat", 3).split()[:2] == ["the", "cat"]
    assert text_of(opened, [1, 2], 5) == text_of(opened, "the cat", 5)
    bare = shutil.copytree(folder[0], tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    row = list(map(int, text_of(load.open_folder(bare), [1, 2], 3).split(",")))
    assert (row[:2], len(row)) == ([1, 2], 5)
    told = json.dumps({"eos_token_id": [row[3], 99]})  # 99 is no token of this model
    (bare / "generation_config.json").write_text(told)
    cut = ",".join(map(str, row[: row.index(row[3], 2)]))
    assert text_of(load.open_folder(bare), [1, 2], 3) == cut


def test_a_stored_tokenizer_is_exported(folder, tmp_path):
    out = tmp_path / "out"
    succeed("experiments.export", f"--path={folder[0]}", f"--out={out}")
    assert (out / "tokenizer.json").read_bytes() == (folder[0] / "tokenizer.json").read_bytes()


def test_a_run_a_folder_and_a_config_are_inspected(run, folder):
    file = "--config=experiments/configs/byte_lm.py:tiny,sharing=sandwich"
    for words, title, model in (
        ([f"--workdir={run[0]}"], "12: layout standard, 2 heads, sharing cycle:2", run[1]),
        ([f"--path={folder[0]}"], "12: layout standard, 4 heads", folder[1]),
        ([file, "--config.model.num_layers=3"], "16: layout standard, 2 heads", None),
    ):
        done = succeed("experiments.inspect_model", *words)
        assert done.stdout.startswith(f"decoder of width {title}")
        if model:
            assert f"{num_parameters(model):,}" in done.stdout
            assert f"texts of {model.max_len} tokens" in done.stdout
    assert "  attention  0 1 2" in done.stdout
