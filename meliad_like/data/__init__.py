"""Token stores, which `prepare` makes of documents, and the readers that turn them into batches."""
