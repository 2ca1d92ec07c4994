"""What a theorem or a paper says of the arms of a sweep before they run, as data.

A config file of a separation has `claim(arg)`, the `record` of its `Claim`; the report then
begins with what came of it, in one sentence and one figure (`reporting/claims.py`).
"""

from typing import Any, NamedTuple


class Expect(NamedTuple):
    """One number of an arm, every seed of it, is at most or at least `value`.

    With `of` the number is the mean of the arm divided by that of the arm `of`.
    """

    arm: str
    relation: str
    """"at most", "at least" or "exactly"."""
    value: float
    says: str
    """The words for it, with {mean}, {least}, {most} (over seeds) or {ratio}: "one head is right in
    {most:.1f} % of the cases at most"."""
    of: str = ""
    number: str = ""
    """Which of result.json; empty: the main metric, held out."""


class Drawing(NamedTuple):
    """The figure that shows it."""

    kind: str
    """"bars": a bar an arm; "dots": a dot an arm, best on top, not from zero; "curves": over the
    steps; "over": over a number of the config."""
    caption: str
    number: str = ""
    """Of "curves": which of metrics.jsonl."""
    label: str = ""
    """Of its axis; empty: the unit of the main metric."""
    field: str = ""
    """Of "over": which of the config ("model.width"); a curve for what stands before the
    comma in the names of arms."""
    log: bool = False
    """Is the axis of values logarithmic?"""


class Claim(NamedTuple):
    """A question whose answer is known."""

    question: str
    source: str
    """Who proved or measured it."""
    expects: tuple[Expect, ...]
    drawing: Drawing

    def record(self, arg: str = "") -> dict[str, Any]:
        """As JSON, whatever the words of the config: its `claim`."""
        expects = [expect._asdict() for expect in self.expects]
        return self._asdict() | {"expects": expects, "drawing": self.drawing._asdict()}
