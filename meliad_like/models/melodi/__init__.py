"""MELODI: every layer passes compressed memories of a window on to the windows after it."""

from meliad_like.models.melodi.config import MelodiConfig
from meliad_like.models.melodi.decoder import Melodi

__all__ = ["Melodi", "MelodiConfig"]
