"""What every group of settings is made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A group of settings that refuses unknown keys and numbers that are not finite, and cannot be
    changed once made."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: Any, field: ValidationInfo) -> Any:
        """Pydantic would read true as 1."""
        values = value if isinstance(value, list | tuple) else [value]
        is_switch = cls.model_fields[str(field.field_name)].annotation is bool
        if not is_switch and any(isinstance(one, bool) for one in values):
            raise ValueError("true and false are not values of this setting")
        return value
