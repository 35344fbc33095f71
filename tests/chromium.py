"""Debian's Chromium, in which tests open the page of `grpo report`; playwright drives it and brings none along.

`python -m tests.chromium install` installs it if GRPO_TEST_CHROMIUM=install allows it, and
`python -m tests.chromium report` says in one line what was not tested without it: `make test` calls both.
"""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from tests.support import debian

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")
# Without a sandbox: tests run as root in containers, and open pages of their own.
ARGUMENTS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")


def program() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def why_not() -> str:
    """Why there is no browser here, and what to do about it; empty if there is one."""
    if program():
        return ""
    return (
        f"Chromium is not installed: apt-get install --no-install-recommends {' '.join(PACKAGES)}, or let "
        "`GRPO_TEST_CHROMIUM=install make test` do it"
    )


def is_promised() -> bool:
    """Whether it was to be installed: then a test without it fails instead of being skipped."""
    return debian.is_promised("GRPO_TEST_CHROMIUM")


def install() -> None:
    """Install it if it is missing, and GRPO_TEST_CHROMIUM=install."""
    if not is_promised() or program():
        return
    debian.install(PACKAGES)


@contextlib.contextmanager
def headless() -> Iterator[Any]:
    """A playwright `Browser` without a window, for the length of a `with` block."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["install"]:
            install()
        case ["report"]:
            if reason := why_not():
                print(f"NOT TESTED: the page of grpo report in a browser: {reason}")
        case _:
            sys.exit("python -m tests.chromium install | report")
