"""Patches of TRL."""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from grpo.place.patches.patch import Patch

MODULES = ("trl.generation.vllm_client", "trl.generation.vllm_generation")  # the second imports the first

_LOADS = (
    "TRL imports vLLM wherever it is installed: a third of a rank's imports, 4 s of processor time and 300 MB, "
    "although a rank in local mode builds no generator of TRL's"
)

IS_VLLM_AVAILABLE = Patch(
    symbol="trl.import_utils.is_vllm_available",
    looks="(min_version=None)",
    tested="TRL 1.16",
    symptom=_LOADS,
)
GENERATORS = tuple(
    Patch(symbol=f"{module}.{name}.__init__", looks="(self, ...)", tested="TRL 1.16", symptom=_LOADS)
    for module, name in zip(MODULES, ("VLLMClient", "VLLMGeneration"), strict=True)
)
GENERATION = Patch(
    symbol="trl.generation.VLLMGeneration",
    looks="nothing",
    tested="TRL 1.16",
    symptom="trl.generation lacks the class, as on a machine without vLLM",
)
SAMPLE_PRINTER = Patch(
    symbol="trl.trainer.grpo_trainer.print_prompt_completions_sample",
    looks="(prompts, completions, rewards, advantages, step, num_samples=None, extra=None)",
    tested="TRL 1.16",
    symptom="escape sequences that a model has written are the terminal's: they clear it, or write its clipboard",
)


def without_vllm() -> contextlib.AbstractContextManager[None]:
    """Hide vLLM from TRL's modules imported in a `with` block."""
    return IS_VLLM_AVAILABLE.applied(lambda check: functools.wraps(check)(lambda *args, **kwargs: False))


def load_vllm_late() -> None:
    """Let TRL's generators import vLLM when the first of them is made; for TRL imported `without_vllm`."""

    def make(build: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(build)
        def build_with_vllm(self: Any, *args: Any, **kwargs: Any) -> None:
            _load_vllm()
            build(self, *args, **kwargs)

        return build_with_vllm

    GENERATION.apply(lambda _: importlib.import_module(MODULES[1]).VLLMGeneration)
    for generator in GENERATORS:
        generator.apply(make)


@functools.cache
def _load_vllm() -> None:
    for name in MODULES:  # reloads into the same namespaces, where existing functions look names up
        importlib.reload(sys.modules[name])
