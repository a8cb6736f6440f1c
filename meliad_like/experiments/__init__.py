"""The tables and figures of the papers, each by one command.

  python -m meliad_like.experiments table1 --scale=tiny

tables       which rows a table has, and what its paper says of them: a page for each paper
scales       the same rows on a laptop, on one GPU, or as they are in the paper
pretrained   the pretrained model that the rows of some tables begin with
jobs         trains and evaluates a row with a seed, each in a process of its own; finished runs are skipped
evaluations  the figures of a trained row
step_time    the time of a step of each row, measured in turn, and the memory that it takes
ancient_history, history_report   the one table whose rows are not trainings: spans of the past for a frozen model
results      gathers what the runs left in their folders
report       Markdown and CSV
pictures     plots
"""
