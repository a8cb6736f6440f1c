"""Selectors of ancient history, which are trained on the gains of spans and rank candidates."""
