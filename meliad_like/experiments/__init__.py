"""The tables and figures of the Block-Recurrent paper, each by one command.

  python -m meliad_like.experiments table1 --scale=tiny

tables     which rows a table has, and what the paper says of them
scales     the same rows on a laptop, on one GPU, or as they are in the paper
jobs       one training and evaluation a process, side by side; what is finished is not done again
step_time  the time of a step, of all rows in turn, and the memory that it takes
results    what the runs left in their folders, gathered
report     Markdown, CSV and a picture
"""
