"""Language models that read long documents in order, and remember.

`prepare`, `train` and `evaluate` do for a `RunConfig` what the commands of these names do, and `load` opens a model.

Glossary of dimensions, used in every shape annotation, shape suffix and einsum:

  b  batch lane                       r  recurrent states of a layer
  n  tokens in a segment              h  attention heads
  w  tokens in a window (= block)     k  head size
  c  blocks in a segment (n = c * w)  d  model width
  t  query position                   f  feed-forward width
  s  key position                     v  vocabulary size
  l  layers                           m  memories
  g  heads of keys, if fewer than h   p  size of a value, if not k
  u  summary tokens of a block        e  inserted or extracted vectors
  i  width of a linear map's input    o  width of its output
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meliad_like.config import RunConfig
    from meliad_like.library import LanguageModel, State, load
    from meliad_like.run.workflow import evaluate, prepare, train

__version__ = "0.1.0"
__all__ = ["LanguageModel", "RunConfig", "State", "evaluate", "load", "prepare", "train"]


def __getattr__(name: str):
    # Imported when it is asked for, because jax takes seconds to import. The commands' modules of the same names are
    # for `python -m`: imported as modules, they would hide these functions.
    if name not in __all__:
        raise AttributeError(f"module 'meliad_like' has no attribute {name!r}")
    home = {"RunConfig": "config", "LanguageModel": "library", "State": "library", "load": "library"}
    return getattr(importlib.import_module(f"meliad_like.{home.get(name, 'run.workflow')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
