"""The known name that a misspelt one is most like."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)', for the one of the known names that is most like it; '' without one.

    One that begins with `name` is meant rather than one that is as long. Dashes before a flag do not count.
    """
    names = {each.lstrip("-"): each for each in known}
    word = name.lstrip("-")
    longer = [each for each in names if word and each.startswith(word)]
    close = difflib.get_close_matches(word, longer or list(names), n=1, cutoff=0.0 if longer else 0.6)
    return f" (did you mean {names[close[0]]}?)" if close else ""
