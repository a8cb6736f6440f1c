"""Language models that read long documents in order, and remember.

Glossary of dimensions, used in every shape annotation, shape suffix and einsum:

  b  batch lane                       r  recurrent states of a layer
  n  tokens in a segment              h  attention heads
  w  tokens in a window (= block)     k  head size
  c  blocks in a segment (n = c * w)  d  model width
  t  query position                   f  feed-forward width
  s  key position                     v  vocabulary size
  l  layers                           m  memories
"""

__version__ = "0.1.0"


def __getattr__(name: str):
    # Imported when it is asked for, because jax takes seconds to import.
    if name == "load":
        from meliad_like.library import load

        return load
    raise AttributeError(f"module 'meliad_like' has no attribute {name!r}")
