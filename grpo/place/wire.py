"""Values that go from process to process as JSON: whoever receives one says what it is, and gets nothing else.

Never pickles, which run what their sender wants run: the job's store and gloo's sockets ask nobody for a password.
"""

from functools import cache
from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(value: Any, kind: Any) -> str:
    """`value` as JSON.

    Args:
        kind: its type, as an annotation says it: `int | None`, a dataclass, a tuple or dict of these.
    """
    return _adapter(kind).dump_json(value, ensure_ascii=True).decode()


def from_json(text: str | bytes, kind: Any) -> Any:
    """Raises ValueError where `text` is no value of this type, or one that another version wrote."""
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"])
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(f"no {name} of this version: {where}: {wrong['msg']}") from error


class Wire:
    """A record that goes from process to process as JSON."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "ser_json_inf_nan": "constants"}

    def dumps(self) -> str:
        return to_json(self, type(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """Raises ValueError for what another version of this class wrote."""
        return from_json(text, cls)
