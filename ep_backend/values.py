"""Values that a deployment file and an engine's settings take alike."""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from ep_backend.config import MAX_COUNT, MAX_TIMEOUT_S
from ep_backend.layout import COUNT_MASK

NAME, HOST = r"^[a-z0-9][a-z0-9._-]{0,62}$", r"^[A-Za-z0-9._:%-]+$"
KEY = r"^[!-~]([ -~]*[!-~])?$"  # as a header of HTTP carries it


def _address(host: str) -> str:
    """No name has a colon, so that one with a colon is an address."""
    try:
        if ":" in host:
            IPv6Address(host)
    except ValueError:
        raise PydanticKnownError("string_pattern_mismatch", {"pattern": HOST}) from None
    return host


Name = Annotated[str, Field(pattern=NAME)]
Host = Annotated[str, Field(pattern=HOST), AfterValidator(_address)]
Key = Annotated[str, Field(min_length=1, pattern=KEY)]
Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1, lt=MAX_COUNT + 1)]
Tokens = Annotated[int, Field(ge=1, le=COUNT_MASK)]  # of one rank; lint, which knows how many there are, says more
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        annotation: Any = cls.model_fields[info.field_name or ""].annotation
        parts = (annotation, *get_args(annotation))
        kinds = {getattr(part, "__origin__", part) for part in parts}
        choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
        if isinstance(value, bool) and bool not in kinds:
            if float in kinds:
                raise PydanticKnownError("float_type")
            if int in kinds or any(type(choice) is int for choice in choices):
                raise PydanticKnownError("int_type")
        return value
