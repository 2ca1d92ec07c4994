"""A folder is enough to type a sentence: its tokenizer.json gives the ids of the library itself."""

import dataclasses

import numpy as np
import pytest
from conftest import SHARED
from goldens import FAMILIES, golden_folder, split
from random_models import random_params
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from attnlab import pretrained
from attnlab.data import load_tokenizer
from attnlab.heads import Standard
from attnlab.load import open_folder
from attnlab.models import LayerOverrides, generate
from experiments.configs import pretrained as config_file
from experiments.inspect_model import describe_text

LINES = [
    "O for a Muse of fire, that would ascend\n",
    "the brightest heaven of invention: a kingdom for a stage",
    "  two  spaces, a tab\tand naïve Œuvre 日本 🙂",
    "princes to act and monarchs to behold the swelling scene.",
]


def ends(single, **special):
    return processors.TemplateProcessing(single=single, special_tokens=[*special.items()])


KINDS = {
    # its model, normalizer, pre-tokenizer, decoder and post-processor, and how it learns
    "bpe": (
        models.BPE, None, pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), None,
        trainers.BpeTrainer, dict(vocab_size=290, initial_alphabet=pre.ByteLevel.alphabet()),
    ),
    "word_piece": (
        lambda: models.WordPiece(unk_token="[UNK]"), normalizers.BertNormalizer(),
        pre.BertPreTokenizer(), decoders.WordPiece(),
        ends("[CLS] $A [SEP]", **{"[CLS]": 2, "[SEP]": 3}), trainers.WordPieceTrainer,
        dict(vocab_size=90, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
    ),
    "unigram": (
        models.Unigram, normalizers.NFKC(), pre.Metaspace(), decoders.Metaspace(),
        ends("$A </s>", **{"</s>": 1}), trainers.UnigramTrainer,
        dict(vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>"),
    ),
}  # fmt: skip
PARTS = ("normalizer", "pre_tokenizer", "decoder", "post_processor")


def learn(kind, folder):
    model, *parts, trainer, options = KINDS[kind]
    made = Tokenizer(model())
    for name, part in zip(PARTS, parts, strict=True):
        if part is not None:
            setattr(made, name, part)
    made.train_from_iterator(LINES, trainer(**options, show_progress=False))
    if kind == "word_piece":  # as published files may have it; a text is neither cut nor filled
        made.enable_truncation(6)
        made.enable_padding(length=6)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    made.no_truncation()
    made.no_padding()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_places_are_those_of_the_library(kind, tmp_path):
    library = learn(kind, tmp_path)
    ours = load_tokenizer(pretrained.tokenizer_path(tmp_path))
    assert ours.size == library.get_vocab_size()
    files = sorted((SHARED / "tinyshakespeare").rglob("*.txt"))  # a real text where it is at hand
    more = files[0].read_text(encoding="utf-8").splitlines()[:1000] if files else []
    for text in LINES + [line for line in more if line]:
        read, expected = ours.read(text), library.encode(text)
        assert read.tokens.tolist() == expected.ids
        assert read.spans.tolist() == [list(span) for span in expected.offsets]
        for (start, end), name, token in zip(read.spans, read.names, expected.tokens, strict=True):
            assert name == (text[start:end] or token)
        for skips in (False, True):
            text_again = library.decode(expected.ids, skip_special_tokens=skips)
            assert ours.decode(read.tokens, skip_special_tokens=skips) == text_again
        assert ours.decode(read.tokens) == library.decode(expected.ids, skip_special_tokens=False)
        tokens, sizes = ours.encode([text])[0]
        assert tokens.tolist() == library.encode(text, add_special_tokens=False).ids
        assert sizes.sum() == len(text.encode())
        assert kind != "bpe" or ours.decode(tokens) == text


@pytest.fixture
def typed(tmp_path):
    """(a folder whose vocabulary has room for its tokenizer, that of the library)"""
    rng, tensors = np.random.default_rng(0), split(FAMILIES["llama"])[1]
    sizes = {name: (300, *a.shape[1:]) for name, a in tensors.items() if a.shape[0] == 23}
    larger = {name: rng.normal(size=size).astype(np.float32) for name, size in sizes.items()}
    folder = golden_folder(tmp_path / "llama", "llama", {"vocab_size": 300}, larger)
    return folder, learn("bpe", folder)


def test_a_folder_goes_on_with_a_sentence(typed):
    folder, library = typed
    told = describe_text(open_folder(folder), "O for a stage")
    model, params = pretrained.load(folder)
    ids = library.encode("O for a stage").ids
    count = min(20, model.config.max_len - len(ids))
    new = generate(params, np.array([ids]), model.config, count)
    assert f"continuation: {library.decode(np.asarray(new[0]).tolist())!r}" in told
    outputs = model.apply({"params": params}, np.array([ids]), capture=("probs",))
    probs = outputs.captured["probs"][:, 0]
    rows = [line.split() for line in told.split("attends to most")[1].splitlines()]
    [row] = [row for row in rows if row[:2] == ["1", "3"]]
    assert row[-1] == f"{float(probs[1, 3].mean(0).max()):.2f}"
    assert f"\n0      {ids[0]:<7} 'O'\n" in told
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        describe_text(open_folder(folder), "O for a stage")


def test_layers_with_unlike_numbers_of_heads_are_described(typed):
    opened = open_folder(typed[0])
    types = ((1, LayerOverrides(heads=Standard(num_heads=2))), (1, LayerOverrides()))
    config = dataclasses.replace(
        opened.config, num_layers=3, heads=Standard(num_heads=1), layer_types=types
    )
    other = dataclasses.replace(opened, config=config, params=random_params(config))
    heads = describe_text(other, "O for a").split("attends to most\n")[1].split("\n\n")[0]
    found = ["".join(line.split()[:2]) for line in heads.splitlines()]
    assert found == ["00", "01", "10", "20", "21"]


def test_the_config_trains_on_the_tokens_of_the_folder(typed, tmp_path):
    """Where there is room for what the task adds; else on bytes."""
    folder, library = typed
    config = config_file.get_config(str(folder))
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert library.get_vocab_size() == 290
    (folder / "tokenizer.json").unlink()
    assert config_file.get_config(str(folder)).data.tokenizer == "bytes"
    full = golden_folder(tmp_path / "full", "bert")
    learn("word_piece", full)
    assert config_file.get_config(str(full)).data.tokenizer == "bytes"
