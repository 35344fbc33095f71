"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' (did you mean X?)' for the most similar known name; '' if none is close.

    Names that begin with `name` win over names of similar length. Leading dashes of flags are ignored.
    """
    names = {each.lstrip("-"): each for each in known}
    word = name.lstrip("-")
    longer = [each for each in names if word and each.startswith(word)]
    close = difflib.get_close_matches(word, longer or list(names), n=1, cutoff=0.0 if longer else 0.6)
    return f" (did you mean {names[close[0]]}?)" if close else ""
