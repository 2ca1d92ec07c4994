"""What files of rows hold."""

import gzip
import zipfile

import pytest
from small_data import write

from attnlab.data import files, text_rows


def test_lines_end_where_files_are_aligned():
    """Unicode's other line ends stay within a line; CRLF and a missing last end do not matter."""
    text = "one\u2028still one\r\ntwo\x0bstill two\n\nfour".encode()
    assert files.split_lines(text, "f") == ["one\u2028still one", "two\x0bstill two", "", "four"]
    assert files.split_lines(b"", "f") == []


def test_one_part_is_split_by_the_source_line(tmp_path):
    """Pairs with the same source line stay together."""
    source = [f"line {i // 2}" for i in range(1000)]
    target = gzip.compress("\n".join(map(str, range(1000))).encode())
    write(tmp_path, {"a.en": "\n".join(source), "a.de.gz": target})
    found = text_rows.find_pairs(tmp_path, ("en", "de"), ("a",))
    sides = {part: {pair.source for pair in some} for part, some in found.items()}
    assert sum(map(len, sides.values())) == 500
    rest = [files.bucket(line, 100) for line in source]
    counts = [sum(n > 1 for n in rest), rest.count(1), rest.count(0)]
    assert [len(found[part]) for part in text_rows.SPLITS] == counts
    assert found["train"][:2] == [("line 0", "0"), ("line 0", "1")]


def test_multi30k(shared_data):
    parts = ("train", "val", "test_2016_flickr")
    found = text_rows.find_pairs(shared_data / "multi30k", ("en", "de"), parts)
    assert [len(found[part]) for part in text_rows.SPLITS] == [29_000, 1_014, 1_000]
    assert found["test"][0].target == "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt."


MANY = [f"text {i}" for i in range(60)]
ONE, TWO = MANY[::2], MANY[1::2]
FORMS = {
    "folders": {f"x/{'ab'[i % 2]}/{i}.txt": text for i, text in enumerate(MANY)},
    "suffixes": {
        "x.a": "\n".join(ONE),
        "x.b": "\n".join(TWO) + "\n",
        **dict.fromkeys(("README.txt", "LICENSE", "NOTICE"), "about"),
    },
    "lines": {"x.tsv": "".join(f"{'ba'[text in ONE]}\t{text}\n" for text in MANY)},
}
"""The same texts in each form that is read."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_forms_of_labelled_texts(tmp_path, form, packed):
    path = write(tmp_path / "data", FORMS[form])
    if form == "lines":
        content = FORMS[form]["x.tsv"].encode()
        (path / "x.tsv.gz").write_bytes(gzip.compress(content))
        path = path / ("x.tsv.gz" if packed else "x.tsv")
    elif packed:
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in FORMS[form].items():
                archive.writestr(f"top/{name}", text)
    found = text_rows.read_labelled(path)
    assert {one.text: one.label for one in found} == {t: "ab"[i % 2] for i, t in enumerate(MANY)}
    for one in found:
        assert one.split == ("test", "valid", "train")[min(files.bucket(one.text, 10), 2)]


def test_texts_that_change_are_read_again(tmp_path):
    path = tmp_path / "x.tsv"
    for word in ("one", "other"):
        path.write_text("".join(f"{'ab'[i % 2]}\t{text} {word}\n" for i, text in enumerate(MANY)))
        assert {one.text.split()[-1] for one in text_rows.read_labelled(path)} == {word}


def test_reviews(shared_data):
    """README and ANCHORS.md of the data: sizes of the parts, naive Bayes near 78.1 %."""
    sizes = {"sentence_polarity": (8550, 1057, 1055), "movie_reviews": (1600, 200, 200)}
    for name, counts in sizes.items():
        found = text_rows.read_labelled(shared_data / name / f"{name}.zip")
        parts = {part: [o for o in found if o.split == part] for part in text_rows.SPLITS}
        assert tuple(map(len, parts.values())) == counts
        if name == "sentence_polarity":
            assert abs(text_rows.naive_bayes(parts["train"], parts["test"]) - 0.781) < 0.01
