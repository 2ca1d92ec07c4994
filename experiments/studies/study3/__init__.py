"""The third study: positions, per-head Muon, exact widening, copying; README.md, and the plan in
docs/results/study3/plan.md.

`spec` describes a run and builds its model and training; `parts` lists the runs of every part and
chooses learning rates; `run` trains one; `rows` keeps finished runs in a CSV file; `copying` scores
copy bytes and the repeated-bytes probe; `widen` converts 4x16 to 4x64; `__main__` is the command.
"""
