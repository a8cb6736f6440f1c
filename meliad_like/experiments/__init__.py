"""The tables and figures of the papers, each by one command: `python -m meliad_like.experiments table1 --scale=tiny`.

tables       which rows, columns and scales a table has, and what its paper says: a page for each paper, and CSV files
experiment   a table in a folder: trains, evaluates, times and reports its rows; `processes` runs them side by side
evaluations, step_time   the figures of a trained row; the time of a step of each row, and the memory that it takes
report, maps, pictures   what the runs left in their folders, as Markdown, CSV and plots
ancient_history          the one table whose rows are not trainings: spans of the past for a frozen model
"""
