"""Readers turn the documents of a split into batches; what differs between the papers is the reader."""

from meliad_like.data.readers.base import (
    READERS,
    Reader,
    ReaderConfig,
    ReaderInputs,
    Split,
    check_tokens,
    label,
    leaks_the_future,
)
from meliad_like.data.readers.lanes import LanesReader, LanesReaderConfig
from meliad_like.data.readers.stream import (
    Concatenated,
    ShuffledReader,
    ShuffledReaderConfig,
    StreamReader,
    StreamReaderConfig,
)
from meliad_like.data.readers.windows import WindowsReader, WindowsReaderConfig

__all__ = [
    "READERS",
    "Concatenated",
    "LanesReader",
    "LanesReaderConfig",
    "Reader",
    "ReaderConfig",
    "ReaderInputs",
    "ShuffledReader",
    "ShuffledReaderConfig",
    "Split",
    "StreamReader",
    "StreamReaderConfig",
    "WindowsReader",
    "WindowsReaderConfig",
    "check_tokens",
    "label",
    "leaks_the_future",
]
