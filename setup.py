"""The README as PyPI shows it; all else is in pyproject.toml. On PyPI a link to a file of the repository is dead."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def readme(source: str | None) -> str:
    """Links and pictures lead below `source`; without one links are their text, and pictures are left out."""

    def absolute(found: re.Match[str]) -> str:
        picture, shown, path = found.groups()
        if source is None:
            return "" if picture else shown
        return f"{picture}[{shown}]({source}/{'raw' if picture else 'blob'}/HEAD/{path})"

    return RELATIVE.sub(absolute, Path("README.md").read_text(encoding="utf-8"))


urls = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
setup(long_description=readme(urls.get("Source")), long_description_content_type="text/markdown")
