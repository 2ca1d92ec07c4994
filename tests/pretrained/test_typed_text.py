"""A folder is enough to type a sentence: its tokenizer.json gives the ids of the library itself."""

import numpy as np
import pytest
from conftest import SHARED
from goldens import FAMILIES, split, write
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from attnlab import pretrained
from attnlab.data import load_tokenizer
from attnlab.load import open_folder
from attnlab.models import generate
from experiments.configs import pretrained as config_file

LINES = [
    "O for a Muse of fire, that would ascend\n",
    "the brightest heaven of invention: a kingdom for a stage",
    "  two  spaces, a tab\tand naïve Œuvre 日本 🙂",
    "princes to act and monarchs to behold the swelling scene.",
]


def load(folder):
    return load_tokenizer(pretrained.tokenizer_path(folder))


def bpe():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    return made, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, show_progress=False)


def word_piece():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made, trainers.WordPieceTrainer(
        vocab_size=90, special_tokens=special, show_progress=False
    )


def unigram():
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre.Metaspace()
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made, trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip


KINDS = {"bpe": bpe, "word_piece": word_piece, "unigram": unigram}


def texts():
    """Lines of a real text where it is at hand."""
    files = sorted((SHARED / "tinyshakespeare").rglob("*.txt"))
    more = files[0].read_text(encoding="utf-8").splitlines()[:1000] if files else []
    return LINES + [line for line in more if line]


def learn(kind, folder):
    made, trainer = KINDS[kind]()
    made.train_from_iterator(LINES, trainer)
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
    library, ours = learn(kind, tmp_path), load(tmp_path)
    assert ours.size == library.get_vocab_size()
    for text in texts():
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


def folder_of(family, kind, tmp_path):
    """A golden model whose vocabulary has room for the tokenizer."""
    config, tensors, _, _ = split(FAMILIES[family])
    rng, count = np.random.default_rng(0), 300
    for name, a in tensors.items():
        if a.shape[0] == 23:
            tensors[name] = rng.normal(size=(count, *a.shape[1:])).astype(np.float32)
    folder = write(tmp_path / family, config | {"vocab_size": count}, tensors)
    return folder, learn(kind, folder)


def test_a_folder_goes_on_with_a_sentence(tmp_path):
    folder, library = folder_of("llama", "bpe", tmp_path)
    told = open_folder(folder).describe_text("O for a stage")
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
        open_folder(folder).describe_text("O for a stage")


def test_the_config_trains_on_the_tokens_of_the_folder(tmp_path):
    """Where there is room for what the task adds; else on bytes."""
    folder, library = folder_of("llama", "bpe", tmp_path)
    config = config_file.get_config(str(folder))
    assert config.data.tokenizer == str(folder / "tokenizer.json")
    assert library.get_vocab_size() == 290
    (folder / "tokenizer.json").unlink()
    assert config_file.get_config(str(folder)).data.tokenizer == "bytes"
    config, tensors, _, _ = split(FAMILIES["bert"])
    full = write(tmp_path / "full", config, tensors)
    learn("word_piece", full)
    assert config_file.get_config(str(full)).data.tokenizer == "bytes"
