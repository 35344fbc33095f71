"""JSON between processes: the receiver names the expected type, and gets nothing else.

No pickles, which can run the sender's code: the job's store and gloo's sockets are not authenticated.
"""

from functools import cache
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: Any, kind: Any) -> str:
    """Serialise `value` as JSON.

    Args:
        kind: its type as an annotation: `int | None`, a dataclass, a tuple or dict of these.
    """
    return _adapter(kind).dump_json(value, ensure_ascii=True).decode()


def from_json(text: str | bytes, kind: Any) -> Any:
    """Parse JSON as a value of type `kind`.

    Raises:
        ValueError: `text` is not of this type, or another version wrote it.
    """
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"])
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"no {name} of this version: {where}: {wrong['msg']}") from error


class Wire:
    """Mixin for records sent between processes as JSON."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "ser_json_inf_nan": "constants"}

    def dumps(self) -> str:
        return to_json(self, type(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """Parse a record. Raises ValueError if another version of this class wrote it."""
        return from_json(text, cls)
