"""Records that go from node to node as JSON."""

from typing import Any, ClassVar, Self

from pydantic import TypeAdapter, ValidationError


class Wire:
    """A record that goes from process to process as JSON."""

    __slots__ = ()
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def dumps(self) -> str:
        return TypeAdapter(type(self)).dump_json(self).decode()

    @classmethod
    def loads(cls, text: str | bytes) -> Self:
        """Raises ValueError for what another version of this class wrote."""
        try:
            return TypeAdapter(cls).validate_json(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(str(part) for part in wrong["loc"])
            raise ValueError(f"no {cls.__name__} of this version: {where}: {wrong['msg']}") from error
