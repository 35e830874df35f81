"""What the sections of a recipe are made of: the base class, and the kinds of numbers and texts that keys hold.

Every number has both its bounds, wide enough for any run that could work: a deadline of 1e300 s overflows somewhere,
and what is smaller than 1e-20 is as good as 0 to float32.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_LARGEST = 1e9


def _zero_or_enough(value: float) -> float:
    if 0 < value < 0.01:
        raise ValueError("should be 0 (greedy) or at least 0.01, below which vLLM samples at 0.01")
    return value


Count = Annotated[int, Field(ge=1, le=10**9)]
Natural = Annotated[int, Field(ge=0, le=10**9)]
Held = Annotated[int, Field(ge=1, le=2**16)]  # as many are in memory at the same time
Processes = Annotated[int, Field(ge=1, le=256)]
Mebibytes = Annotated[int, Field(ge=1, le=2**20)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # NumPy takes no larger one, and vLLM hands it on to NumPy
Positive = Annotated[float, Field(ge=1e-20, le=_LARGEST)]
Rate = Annotated[float, Field(ge=1e-20, le=1)]
NotNegative = Annotated[float, Field(ge=0, le=_LARGEST)]
Amount = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(ge=0, lt=1)]
Portion = Annotated[float, Field(ge=1e-6, le=1)]
Softness = Annotated[float, Field(ge=0.01, le=100)]
Temperature = Annotated[float, Field(ge=0, le=100), AfterValidator(_zero_or_enough)]
Seconds = Annotated[float, Field(ge=1, le=1e6)]  # eleven days; sockets count milliseconds in 32 bits
CallSeconds = Annotated[float, Field(ge=0.01, le=1e6)]  # of one call of user code
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[\w-][\w.-]*$", max_length=200)]
Dtype = Literal["float32", "bfloat16"]


class Section(BaseModel):
    """What all sections share: no unknown keys, no NaN, no change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True)
