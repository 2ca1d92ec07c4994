"""The head-width study: its runs, its rows of results, its analysis and its pages.

A study is a list of `StudyRun`s. `run_one` trains one of them and returns a `Row`; `rows` keeps
rows in a CSV file; `executor` runs many in parallel processes; `rates` chooses learning rates from
rows. `design` has the stages and `stages` runs them. `analysis` is the registered analysis, as
functions on a DataFrame; `hypotheses` applies them, and `page` and `figures` write the page.
`gpu_study` is the study on one GPU. `experiments/studies/head_width/__main__.py` is the command.
"""
