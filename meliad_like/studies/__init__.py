"""Studies of what trained models do with long documents: tables and charts, and a page of them.

Each study is a module with a function `run`, from a `StudyRequest` and the study's own flags to a `Study`. It raises a
UserError if a checkpoint, store, split or document is missing, or a checkpoint has another vocabulary than the store.
"""
