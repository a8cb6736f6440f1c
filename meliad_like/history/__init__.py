"""Ancient history: spans of a document's distant past in the window of a language model, which need not be trained."""
