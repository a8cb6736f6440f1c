"""The tables and figures of the papers, each by one command.

  python -m meliad_like.experiments table1 --scale=tiny

tables       which rows a table has, and what its paper says of them: a page for each paper
scales       the same rows on a laptop, on one GPU, or as they are in the paper
pretrained   a pretrained model that rows begin with
jobs         one training and evaluation a process, side by side; what is finished is not done again
evaluations  what is measured of a trained row
step_time    the time of a step, of all rows in turn, and the memory that it takes
ancient_history, history_report   the one table whose rows are no runs: spans of the past for a frozen model
results      what the runs left in their folders, gathered
report       Markdown and CSV
pictures     what is drawn
"""
