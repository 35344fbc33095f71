"""Help of options: the docstring under a field is its text in `--help` and on the page of options."""

import ast
import contextlib
import inspect
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

Options = TypeVar("Options", bound=type)


def documented(options: Options) -> Options:
    """Decorator for a dataclass of options: a field's docstring becomes its `help`, as transformers' parser expects.

    Reads the source, because Python does not keep docstrings of fields; without the source there is no help.
    """
    source = ""
    with contextlib.suppress(OSError):
        source = inspect.getsource(options)
    texts = {}
    for definition in ast.parse(source).body[:1]:
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = " ".join(text.split())
    for each in fields(options):
        if each.name in texts:
            each.metadata = MappingProxyType({**each.metadata, "help": texts[each.name]})
    return options
