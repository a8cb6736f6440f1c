"""Families of models beside the decoder: each registers its config, and has the module that the config builds.

They use what the packages below offer, which know of them by the entry points in setup.py alone.
"""
