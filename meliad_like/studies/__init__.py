"""Studies of what trained models do with long documents, as pages to read and numbers to go on with."""
