"""pip's configuration for uv, which does not read it: where packages come from, certificates, proxies."""

import ast
import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# pip's option, uv's option, and uv's own variable: where that is set, the user has set uv already.
OPTIONS = (
    ("index-url", "--default-index", "UV_DEFAULT_INDEX"),
    ("extra-index-url", "--index", "UV_INDEX"),
    ("find-links", "--find-links", "UV_FIND_LINKS"),
    ("trusted-host", "--allow-insecure-host", "UV_INSECURE_HOST"),
)
VARIABLES = (
    ("cert", "SSL_CERT_FILE"),
    ("client-cert", "SSL_CLIENT_CERT"),
    ("proxy", "ALL_PROXY"),
    ("timeout", "UV_HTTP_TIMEOUT"),
    ("default-timeout", "UV_HTTP_TIMEOUT"),  # PIP_DEFAULT_TIMEOUT, an older name that pip takes too
)
SECTIONS = ("global", "install", ":env:")  # a later one wins; pip's own order


@dataclass(frozen=True, slots=True, kw_only=True)
class UvSettings:
    """What makes uv look where pip looks."""

    options: list[str] = field(default_factory=list)
    """For `uv pip install` and `uv pip compile`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables that are not set yet."""


def read_pip_config(python: str) -> dict[str, str]:
    """What `python -m pip install` would take from files and variables. `python` is an interpreter that has pip."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    return parse(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines())


def parse(lines: Iterable[str]) -> dict[str, str]:
    """Options by name, of the lines of `pip config list`: `global.index-url='...'`."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in lines:
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in by_section:
            by_section[section][option] = str(ast.literal_eval(value))
    return {option: value for section in SECTIONS for option, value in by_section[section].items() if value}


def for_uv(config: Mapping[str, str], env: Mapping[str, str] = os.environ) -> UvSettings:
    """`config` in uv's words. pip takes the best version of all indexes, uv that of the first one unless asked."""
    options = []
    for option, flag, variable in OPTIONS:
        if variable not in env:
            options += [word for value in config.get(option, "").split() for word in (flag, value)]
    if "--index" in options and "UV_INDEX_STRATEGY" not in env:
        options += ["--index-strategy", "unsafe-best-match"]
    if config.get("no-index", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        options.append("--no-index")
    variables = {name: config[option] for option, name in VARIABLES if option in config and name not in env}
    return UvSettings(options=options, variables=variables)
