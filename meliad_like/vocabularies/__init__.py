"""Vocabularies, which turn text into tokens and back."""
