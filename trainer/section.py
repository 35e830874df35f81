"""What the sections of a recipe are made of: the base class, and the kinds of numbers that keys hold."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$")]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """What all sections share: no unknown keys, no NaN, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)
