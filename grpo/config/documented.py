"""The help of options: what stands under a field is what `--help` and the page of options say of it."""

import ast
import contextlib
import inspect
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

Options = TypeVar("Options", bound=type)


def documented(options: Options) -> Options:
    """Decorates a dataclass of options: the docstring of a field becomes its `help`, as transformers' parser takes it.

    Read from the source, which Python keeps no docstring of a field of; without the source there is no help.
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
