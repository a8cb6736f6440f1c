"""MELODI: every layer passes compressed memories of a window on to the windows after it."""

from meliad_like.families.melodi.config import MelodiConfig
from meliad_like.families.melodi.decoder import Melodi

__all__ = ["Melodi", "MelodiConfig"]
