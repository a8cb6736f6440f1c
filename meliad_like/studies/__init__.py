"""Studies of what trained models do with long documents: pages to read, and the numbers behind them.

Each study has a function `run`, which writes the page and the numbers into the folder `request.output`. It raises
UserError if a checkpoint, store, split or document is missing, or a checkpoint has another vocabulary than the store.
"""
