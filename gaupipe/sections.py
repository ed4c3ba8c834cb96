"""What every group of settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A group of settings that refuses unknown keys and numbers that are not finite, and cannot
    be changed once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
