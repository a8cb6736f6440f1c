"""The tables and figures of the papers, each by one command: `python -m meliad_like.experiments table1 --scale=tiny`.

tables       which columns, pictures and scales a table has; its rows are CSV files beside the gin files
experiment   a table in a folder: trains, evaluates, times and reports its rows
evaluations, step_time   the figures of a trained row; the time of a step of each row, and the memory that it takes
pretrained               the model with which the rows of some tables begin
report, maps, pictures   what the runs left in their folders, as Markdown, CSV and plots
ancient_history          the one table whose rows are not trainings: spans of the past for a frozen model
"""
