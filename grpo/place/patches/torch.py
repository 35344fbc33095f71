"""Patches of torch."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from grpo.place.patches.patch import Patch

LOAD = Patch(
    symbol="torch.load",
    looks="(f, map_location=None, pickle_module=None, *, weights_only=None, ...)",
    tested="torch 2.13, DeepSpeed 0.19",
    symptom="DeepSpeed reads checkpoints without an allow-list: a pickle can run code",
)
COMPILE = Patch(
    symbol="torch.compile",
    looks="(model=None, ...)",
    tested="torch 2.13, DeepSpeed 0.19",
    symptom="importing DeepSpeed's Muon compiles three functions: a second, for an optimizer that nobody has asked for",
)
BUILD = Patch(
    symbol="torch._inductor.cpp_builder.CppBuilder.build",
    looks="(self)",
    contains=("self.get_command_line()",),
    tested="torch 2.13",
    symptom="a compiler writes to a library's final place; one that is killed leaves half of it, and every later start "
    "ends with 'file too short'",
)
HEADERS = Patch(
    symbol="torch._inductor.codecache._HEADER_DIR",
    looks="str",
    tested="torch 2.13",
    symptom="compiled headers are kept in the folder for temporary files, whatever TORCHINDUCTOR_CACHE_DIR says: each "
    "start of an engine on CPUs compiles them again, 5 s of processor time",
)
HEADER_LOCKS = Patch(
    symbol="torch._inductor.codecache._HEADER_LOCK_DIR",
    looks="str",
    tested="torch 2.13",
    symptom="as with _HEADER_DIR: locks of headers that are kept elsewhere",
)
DYNAMO = Patch(
    symbol="torch._dynamo.config.disable",
    looks="bool",
    tested="torch 2.13, vLLM 0.31",
    symptom="with enforce_eager vLLM compiles a helper of its sampler all the same: 7 s of a core at a start on CPUs",
)
BOUND_DEVICE = Patch(
    symbol="torch.distributed.group.WORLD.bound_device_id",
    looks="device | NoneType",
    tested="torch 2.13, DeepSpeed 0.19",
    symptom="making a gloo group hangs: DeepSpeed binds the default group to a device, and torch then calls "
    "ncclCommSplit on every rank that is not in the new group (_new_process_group_helper), whatever its backend",
    upstream="https://github.com/pytorch/pytorch/issues/134314",
)


def loading_weights_only() -> contextlib.AbstractContextManager[None]:
    """Force `weights_only=True` on every `torch.load` in a `with` block."""

    def make(load: Any) -> Any:
        return functools.wraps(load)(lambda *args, **kwargs: load(*args, **{**kwargs, "weights_only": True}))

    return LOAD.applied(make)


def compiling_later() -> contextlib.AbstractContextManager[None]:
    """Defer `torch.compile` of functions decorated in a `with` block until their first call."""

    def make(compile_now: Any) -> Any:
        def compile_later(function: Any) -> Any:
            compiled = functools.cache(lambda: compile_now(function))
            return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

        return compile_later

    return COMPILE.applied(make)


def write_libraries_whole() -> None:
    """Let inductor write libraries atomically, in this process and in forked ones."""

    def make(compile_in_place: Any) -> Any:
        @functools.wraps(compile_in_place)
        def build(builder: Any) -> None:
            target, output = builder.get_target_file_path(), builder._output
            aside = f"{target}.{os.getpid()}"
            builder._output = output.replace(target, aside)
            try:
                compile_in_place(builder)
            finally:
                builder._output = output
            os.replace(aside, target)

        return build

    BUILD.apply(make)


def keep_headers(folder: Path) -> None:
    """Let inductor keep compiled headers in this folder, in this process and in forked ones."""
    HEADERS.apply(lambda _: str(folder))
    HEADER_LOCKS.apply(lambda _: str(folder / "locks"))


def compile_nothing() -> None:
    """Disable `torch.compile` from now on, in this process and in forked ones."""
    DYNAMO.apply(lambda _: True)


def unbound_default_group() -> contextlib.AbstractContextManager[None]:
    """Unbind the default group from its device in a `with` block, to allow new groups of other backends than NCCL."""
    return BOUND_DEVICE.applied(lambda _: None)
