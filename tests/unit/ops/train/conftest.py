"""What tests of the sandbox share."""

import ctypes
import os
import tempfile
from collections.abc import Iterator

import psutil
import pytest

from grpo.ops.train.sandbox import must_isolate
from grpo.ops.train.sandbox_group import PREFIX, GroupPlace, own_place
from tests.support.sandboxed import living_since

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither folders, processes nor control groups, whatever a program did.

    Who loses all its parents becomes this process's child.
    """
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(psutil.Process().children(recursive=True))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        left = living_since(before)
    assert list(folder.iterdir()) == []
    assert left == []
    place = own_place()
    assert place is None or list(place.folder.glob(f"{PREFIX}{os.getpid()}-*")) == []


@pytest.fixture(params=[True, False], ids=["isolated", "limits alone"])
def isolated(request: pytest.FixtureRequest) -> bool:
    if request.param and not must_isolate():
        pytest.fail("this machine gives no namespaces, so nothing of the sandbox itself can be tested on it")
    return request.param


@pytest.fixture
def place() -> GroupPlace:
    """Where this machine lets this process make control groups."""
    found = own_place()
    if found is None:
        pytest.skip("this process may make no control group with a limit of memory")
    return found


@pytest.fixture
def nothing_is_known() -> Iterator[None]:
    """Of this machine's sandbox, before the test and after it."""
    must_isolate.cache_clear()
    yield
    must_isolate.cache_clear()
