"""Mixers, one file each: the ways in which a layer sees earlier tokens.

Importing this package imports every file in it, and so registers every mixer. docs/extending.md shows how to add one.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
