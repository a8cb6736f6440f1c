"""Documents, vocabularies, token stores, and the readers that turn them into batches."""
