"""Published models as our decoder, one file for each family: a table of config.json's fields and the file's tensors.

Importing this package imports every file in it, and so registers every family.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
