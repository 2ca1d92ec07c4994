"""CoNLL-U is read as it is written, and the text is the one that was typed."""

import gzip

import pytest

from attnlab.interpret.treebank import parse_trees, read_trees, treebank_parts


def row(number, form, head="_", label="_", misc="_"):
    return "\t".join([number, form, "lemma", "_", "_", "_", head, label, "_", misc])


LINES = [
    "# newdoc id = one",
    "# text = «Can't!» del mar",
    row("1", "«", "2", "punct", "SpaceAfter=No"),
    row("2-3", "Can't", misc="Gloss=x|SpaceAfter=No"),
    row("2", "Ca", "0", "root"),  # what stands at a part of a token says nothing of blanks
    row("3", "n't", "2", "advmod:neg"),
    row("3.1", "wait", misc="CopyOf=2"),
    row("4", "!", "2", "punct", "SpaceAfter=No"),
    row("5", "»", "2", "punct"),
    row("6-7", "del"),
    row("6", "de", "8", "case", "SpaceAfter=No"),
    row("7", "el", "8", "det", "SpaceAfter=No"),
    row("8", "mar", "2", "obl"),
    "",
    "",
    row("1", "Sí", "0", "root", "SpaceAfter=No"),
]
TEXT = "«Can't!» del mar"


def test_words_stand_where_they_were_typed():
    one, two = parse_trees(f"{line}\r\n" for line in LINES)
    assert one.text == TEXT
    assert one.words == ("«", "Ca", "n't", "!", "»", "de", "el", "mar")
    standing = [one.text[a:b] for a, b in one.spans]
    assert standing == ["«", "Ca", "n't", "!", "»", "del", "del", "mar"]
    assert one.heads.tolist() == [1, -1, 1, 1, 1, 7, 7, 1]
    assert one.labels[2] == "advmod:neg"
    assert (two.text, two.spans.tolist(), two.heads.tolist()) == ("Sí", [[0, 2]], [-1])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["# fine", row("1", "a", "0"), row("2", "b", "0")[:-2]], "bank:3: no line of CoNLL-U"),
        ([row("one", "a", "0")], "bank:1: no line of CoNLL-U"),
        ([row("1", "a", "2"), ""], "before bank:2: a word depends on one that is not there"),
        ([row("1", "a", "_"), ""], "before bank:2: a word depends"),
        ([row("1", "a", "0"), row("3", "b", "1")], r"before bank:2: the numbers .* are \[1, 3\]"),
        ([row("1", "a", "0")] * 2, r"are \[1, 1\], not 1, 2, 3, ...; an empty line ends"),
        ([row("1.1", "a")], r"the numbers of its words are \[\]"),
    ],
)
def test_what_is_no_treebank(lines, said):
    with pytest.raises(ValueError, match=said):
        list(parse_trees(lines, "bank"))


def test_files_are_found_by_their_part(tmp_path):
    text = "\n".join(LINES)
    (tmp_path / "xx_bank-ud-dev.conllu").write_text(text, encoding="utf-8")
    (tmp_path / "xx_bank-ud-test.conllu.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "README.txt").write_text("nothing")
    parts = treebank_parts(tmp_path)
    assert set(parts) == {"dev", "test"}
    assert [[t.text for t in read_trees(p)] for p in parts.values()] == [[TEXT, "Sí"]] * 2
    with pytest.raises(FileNotFoundError, match=r"no folder .+ of a treebank"):
        treebank_parts(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no treebank at"):
        read_trees(tmp_path / "none.conllu")


def test_a_real_treebank(shared_data):
    """UD_English-EWT, test: the sentences and words it counts, and its own word on the text."""
    path = treebank_parts(shared_data / "ud_english_ewt")["test"]
    found = read_trees(path)
    assert (len(found), sum(len(tree.words) for tree in found)) == (2077, 25094)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [line[9:].rstrip("\n") for line in file if line.startswith("# text = ")]
    pairs = [(tree.text, text) for tree, text in zip(found, texts, strict=True)]
    apart = [pair for pair in pairs if pair[0] != pair[1]]
    assert len(apart) == 1  # a no-break space, which is told of by another word than SpaceAfter
    assert apart[0][0] == apart[0][1].replace("\u00a0", " ")
    for tree in found:
        assert tuple(tree.text[a:b] for a, b in tree.spans) == tree.words
