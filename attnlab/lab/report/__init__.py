"""The report of results: one HTML page that loads nothing, Markdown, figures and tables as files.

    from attnlab.lab.report import Description, Panel, write_report

    about = Description(question="Are wide heads better?", baseline={"layout": "standard"})
    write_report([Panel(results, about)], "runs/layouts/report.html")

`Results.report(path)` does the same for one sweep, `python -m experiments.report WORKDIR...` from
the command line. `Description` holds what a report needs beside the results. A page is data
(`page.Page`: sections of text, tables and figures); templates write it.
"""

from attnlab.lab.report.description import (
    Description,
    Expectation,
    PublishedRow,
    PublishedTable,
    read_description,
)

__all__ = [
    "Description", "Expectation", "PublishedRow", "PublishedTable", "read_description",
]  # fmt: skip
