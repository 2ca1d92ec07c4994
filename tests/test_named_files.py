"""Names in the lists of the test suite exist."""

from conftest import ROOT
from depth import DEPTH


def test_what_is_slow_by_name_is_there():
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [n for n in DEPTH if f"\ndef {n.partition('[')[0]}(" not in text] == []
