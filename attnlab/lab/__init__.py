"""Pieces of a study: texts, runs, rows of results, processes, n-gram baselines, tuned rates.

A study is a list of `RunSpec`s. `run_one` trains one of them and returns a `Row`; `rows` keeps rows
in a CSV file; `executor` runs many specs in parallel processes; `rates` chooses learning rates from
rows; `analysis` and `mixed_model` are the registered analysis. `experiments/study.py` is
the command.
"""
