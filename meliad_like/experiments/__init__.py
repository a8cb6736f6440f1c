"""The tables and figures of the papers, each by one command: `python -m meliad_like.experiments table1 --scale=tiny`.

tables       which rows a table has, and what its paper says of them: a page for each paper
scales       the same rows on a laptop, on one GPU, or as they are in the paper
experiment   a table in a folder: trains, evaluates, times and reports its rows, each run in a process of its own
evaluations, step_time   the figures of a trained row; the time of a step of each row, and the memory that it takes
report, maps, pictures   what the runs left in their folders, as Markdown, CSV and plots
processes                runs side by side, each in a process of its own
shrinking                any run made so small that it takes seconds, for `smoke`
plan_table               the memory and the least time of each row's step on TPU slices
ancient_history          the one table whose rows are not trainings: spans of the past for a frozen model
"""
