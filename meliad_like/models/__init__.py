"""Language models: each file registers the config of a family, and has the module that it builds.

Importing this package imports every file in it, and so registers every family.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
