"""The frame of all language models, and the decoder. The other families are in `families/`."""
