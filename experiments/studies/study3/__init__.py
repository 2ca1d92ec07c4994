"""The third study: positions, per-head Muon, exact widening, copying, caches, shared layers;
README.md, and the plan in docs/results/study3/plan.md.

`spec` describes a run, its model and training as a `lab.RunSpec`; `parts` lists the runs of every
part and chooses learning rates; `rows` turns results into rows of CSV files; `copying` scores copy
bytes and the repeated-bytes probe; `widen` converts 4x16 to 4x64; `windows` has the data and the
schedules; `analysis` and `worth` have the tests; `__main__` is the command.
"""
