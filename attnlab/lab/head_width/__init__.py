"""Pieces of the head-width study: texts, runs, rows of results, workers, baselines, tuned rates.

A study is a list of `StudyRun`s. `run_one` trains one of them and returns a `Row`; `rows` keeps
rows in a CSV file; `executor` runs many in parallel processes; `rates` chooses learning rates from
rows; `analysis` is the registered analysis. `experiments/study.py` is the command.
"""
