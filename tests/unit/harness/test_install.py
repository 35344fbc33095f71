"""`make install`: pip's configuration in uv's words, what is tried in which order, and that the lists are whole."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.constraints import compile_arguments
from tools.install import INSTALLED, LISTS, Command, choose_installer, fill, make_environment, uv
from tools.pip_settings import for_uv, parse, read_pip_config

ROOT = Path(__file__).resolve().parents[3]


def options(*lines: str, **env: str) -> list[str]:
    return for_uv(parse(lines), env).options


def listed(path: Path) -> dict[str, Requirement]:
    """By name, what a list holds for this interpreter."""
    lines = [line.partition("  #")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = default_environment()
    return {canonicalize_name(r.name): r for r in found if r.marker is None or r.marker.evaluate(dict(here))}


def test_for_uv_translates_indexes_and_folders_of_pip() -> None:
    assert options(
        "global.index-url='https://one/simple'",
        "global.extra-index-url='https://two/simple\\nhttps://three/simple'",
        "global.find-links='/wheels'",
        "global.trusted-host='two'",
    ) == [
        *("--default-index", "https://one/simple"),
        *("--index", "https://two/simple", "--index", "https://three/simple"),
        *("--find-links", "/wheels"),
        *("--allow-insecure-host", "two"),
        *("--index-strategy", "unsafe-best-match"),
    ]
    assert options() == []


@pytest.mark.parametrize("yes", ["1", "true", "Yes", "on"])
def test_for_uv_with_offline_pip_is_offline(yes: str) -> None:
    assert options("global.find-links='/wheels'", f":env:.no-index='{yes}'") == [
        "--find-links",
        "/wheels",
        "--no-index",
    ]
    assert "--no-index" not in options("global.no-index='false'")


def test_for_uv_follows_precedence_of_pip() -> None:
    lines = [":env:.find-links='/of/env'", "global.find-links='/of/all'", "install.find-links='/of/install'"]
    assert options(*lines) == ["--find-links", "/of/env"]
    assert options(*lines[1:]) == ["--find-links", "/of/install"]
    assert options("download.find-links='/elsewhere'") == []


def test_for_uv_keeps_uv_settings_of_user() -> None:
    lines = ["global.index-url='https://one/simple'", "global.extra-index-url='https://two/simple'"]
    assert options(*lines, UV_DEFAULT_INDEX="https://mine", UV_INDEX_STRATEGY="first-index") == [
        "--index",
        "https://two/simple",
    ]
    config = parse(["global.cert='/pip.pem'", "global.timeout='60'"])
    assert for_uv(config, {"SSL_CERT_FILE": "/mine.pem"}).variables == {"UV_HTTP_TIMEOUT": "60"}


def test_read_pip_config_includes_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nextra-index-url =\n    https://two/simple\n    https://three/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels of/env")
    found = read_pip_config(sys.executable)
    assert found["extra-index-url"].split() == ["https://two/simple", "https://three/simple"]
    assert found["find-links"] == "/wheels of/env"


def program(path: Path, body: str) -> Command:
    """A stand-in for uv that writes its arguments down beside it and runs `body`."""
    path.write_text(f'#!/bin/sh\necho "$@" >> {path}.calls\n{body}\n')
    path.chmod(0o755)
    return Command(name="uv", words=[str(path)])


def test_fill_for_cpu_falls_back_to_pytorch_index(tmp_path: Path) -> None:
    fill(program(tmp_path / "uv", 'case "$*" in *cpu.txt) exit 1; esac'), "cpu")
    first, second, project = (tmp_path / "uv.calls").read_text().splitlines()
    assert first == f"--no-deps --requirement {LISTS['cpu']}"
    assert second == f"{first} --torch-backend cpu"
    assert project.endswith("--editable .")


def test_fill_with_failing_list_raises_with_attempts_and_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="PyTorch's CPU wheel index") as caught:
        fill(program(tmp_path / "uv", "echo no such wheel >&2; exit 1"), "cpu")
    assert str(caught.value).count("no such wheel") == 2
    with pytest.raises(ValueError, match=r"cuda\.txt\nno such wheel") as caught:
        fill(program(tmp_path / "uv", "echo no such wheel >&2; exit 1"), "cuda")
    assert "PyTorch" not in str(caught.value)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new one."""
    venv = tmp_path_factory.mktemp("environment") / "venv"
    make_environment(venv, "cpu")
    return venv


def test_make_environment_for_other_python_or_backend_starts_anew(environment: Path, tmp_path: Path) -> None:
    venv = shutil.copytree(environment, tmp_path / "venv", symlinks=True)
    config, held = venv / "pyvenv.cfg", venv / INSTALLED
    held.write_text("cpu\n")
    python = make_environment(venv, "cpu")
    assert held.exists()
    make_environment(venv, "cuda")
    assert not held.exists()
    held.touch()
    config.write_text(re.sub(r"version = \d+\.\d+\.", "version = 3.9.", config.read_text()))
    assert make_environment(venv, "cpu") == python
    assert not held.exists()


def test_choose_installer_without_uv_returns_pip(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    python = str(environment / "bin" / "python")
    assert choose_installer(python, "auto").name == "pip"
    with pytest.raises(ValueError, match="INSTALLER=pip does without"):
        choose_installer(python, "uv")
    program(tmp_path / "uv", "exit 0")
    assert choose_installer(python, "auto").words[0] == str(tmp_path / "uv")
    assert choose_installer(python, "pip").name == "pip"


def test_compile_command_ignores_find_links_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    assert "/wheels" in uv(sys.executable, "uv", "compile").words
    assert "/wheels" not in uv(sys.executable, "uv", "compile", ignored=("find-links",)).words
    assert "--upgrade" in compile_arguments("cuda", upgrade=True)
    assert "--excludes" not in compile_arguments("cuda", upgrade=False)


@pytest.mark.parametrize("backend", LISTS)
def test_constraints_satisfy_pyproject_requirements(backend: str) -> None:
    always = ("report", "qlora", "tasks", "track", "dev", "docs")
    extras = {"cpu": ("cpu", *always), "cuda": ("gpu", *always)}[backend]
    pins = listed(LISTS[backend])
    for text in metadata.requires("grpo-local") or []:
        wanted = Requirement(text)
        if wanted.name == "grpo-local":  # an extra that is part of another one
            assert wanted.extras <= set(extras)
        elif wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            (pin,) = pins[canonicalize_name(wanted.name)].specifier
            assert wanted.specifier.contains(pin.version), f"{wanted}: run `make constraints`"


def test_cpu_constraints_leave_out_torchvision_and_torchaudio() -> None:
    assert not {"torchvision", "torchaudio", "torchcodec"} & listed(LISTS["cpu"]).keys()
    (pin,) = listed(LISTS["cpu"])["torch"].specifier
    assert pin.version.endswith("+cpu")


def test_installed_environment_lacks_no_dependency() -> None:
    """A list that is not whole shows here: nothing is resolved when it is installed."""
    stamp = Path(sys.prefix) / INSTALLED
    if not stamp.exists() or stamp.read_text().strip() != "cpu":
        pytest.skip("this is not an environment of `make install`")
    result = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    missing = set(re.findall(r"requires (\S+), which is not installed", result.stdout))
    assert missing == {"torchvision", "torchaudio", "torchcodec"}, result.stdout
    assert len(result.stdout.splitlines()) == len(missing), result.stdout
    held = {canonicalize_name(name): pin for name, pin in listed(LISTS["cpu"]).items()}
    for name, pin in held.items():
        assert pin.specifier.contains(metadata.version(name), prereleases=True), name
