"""Checks that many configs make."""

from dataclasses import dataclass
from typing import Literal, Optional

import pytest

from meliad_like.errors import UserError
from meliad_like.validation import check_choices

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Config:
    dtype: Dtype = "float32"
    rounded: Dtype | None = None
    older: Optional[Dtype] = None  # noqa: UP045
    size: int | None = None

    def __post_init__(self):
        check_choices(self)


def test_a_value_that_is_no_choice_is_refused():
    Config("bfloat16", "float32", "float32", 3)
    for field in ("dtype", "rounded", "older"):
        with pytest.raises(UserError, match=f"^Config.{field}='int8' is not one of float32, bfloat16"):
            Config(**{field: "int8"})
    with pytest.raises(UserError, match="^Config.dtype=None is not one of float32, bfloat16$"):
        Config(dtype=None)
