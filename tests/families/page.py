"""`docs/models.md`, from a dry run of each family's names: `python -m tests.families.page`. Minutes.

The trainer's model is made without weights, and vLLM's small, in this process and without an engine; the question is
the one that a job asks its engines before the first weight sync.
"""

import argparse
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.families.families import FAMILIES, TRAINED, Family

if TYPE_CHECKING:
    from grpo.weights.wire_format import WireFormat

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
STAND_IN = ROOT / "tests" / "support" / "torchvision_stand_in"
TABLE = "| checkpoint | class | stays frozen | |\n|---|---|---|---|\n"


def placed(family: Family, folder: Path) -> "tuple[Any, WireFormat]":
    """The trainer's model of a family, and what vLLM's says of the names of its weights.

    Raises:
        Exception: transformers' or vLLM's, where one of them does not make it.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from grpo.model.text_part import is_hybrid, is_multimodal, model_without_weights
    from grpo.weights.reload import CountedReload
    from grpo.weights.source import GatheredSource

    class Engine(CountedReload):
        """Without a transport."""

        def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
            self.model, self.model_config = model, model_config
            record_metadata_for_reloading(model)

        def init_transfer_engine(self, init_info: Any) -> None: ...
        def receive_weights(self, update_info: Any) -> None: ...
        def shutdown(self) -> None: ...

    config = CONFIG_MAPPING[family.model_type](**family.settings)
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if is_multimodal(config):
        names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config.architectures = [names[family.model_type]]
    config.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    model = model_without_weights(config)
    source = GatheredSource(model, wire_dtype=torch.bfloat16, bucket_bytes=2**20)
    more: dict[str, Any] = {"language_model_only": True} if is_multimodal(config) else {}
    if is_hybrid(config):
        more["enable_prefix_caching"] = False
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        enforce_eager=True,
        enable_chunked_prefill=False,
        **more,
    )
    vllm_config = arguments.create_engine_config()
    with set_current_vllm_config(vllm_config):
        _form_group()
        with set_default_torch_dtype(torch.bfloat16), torch.device("cpu"):
            engine = Engine(initialize_model(vllm_config), vllm_config.model_config)
        return model, engine.wire_format(source.question)


def _form_group() -> None:
    """Of this process alone, anew for each model: whether there is one for experts depends on it."""
    import torch.distributed as dist
    from vllm.distributed import (
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_distributed_environment(1, 0, local_rank=0, backend="gloo")
    destroy_model_parallel()
    ensure_model_parallel_initialized(1, 1)


def line_of(family: Family) -> str:
    """The family's line in the table."""
    from grpo.config.refusals import WITHOUT_RELOAD
    from grpo.model.text_part import tower_paths

    if family.reason:
        return f"| {family.models} | `{family.model_type}` | | not looked at: {family.reason} |"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, answer = placed(family, Path(folder))
    towers = ", ".join(f"`{path.rpartition('.')[2]}`" for path in tower_paths(model))
    if type(model).__name__ in WITHOUT_RELOAD:
        result = f"refused before anything is loaded: {WITHOUT_RELOAD[type(model).__name__]}"
    elif answer.unplaced:
        short = sorted({name.rpartition(".layers.")[2].partition(".")[2] or name for name in answer.unplaced})
        result = (
            f"refused at start (GRPO-505): vLLM's class has no place for {', '.join(f'`{each}`' for each in short)}"
        )
    else:
        test = TRAINED.get(family.model_type)
        result = f"trained and verified (`{test}`)" if test else "names have their places"
    return f"| {family.models} | `{type(model).__name__}` | {towers} | {result} |"


def prepare() -> None:
    """This process, and those in which vLLM looks at its classes: no GPU, and torchvision's stand-in."""
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": f"{ROOT}:{STAND_IN}",
    }
    spec = importlib.util.spec_from_file_location("torchvision_stand_in", STAND_IN / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def page_with(lines: Sequence[str]) -> str:
    """The page with this table."""
    head, _, rest = PAGE.read_text().partition(TABLE)
    return f"{head}{TABLE}{chr(10).join(lines)}\n\n{rest.partition(chr(10) * 2)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page says otherwise")
    args = parser.parse_args()
    prepare()
    lines = []
    for family in FAMILIES:
        lines.append(line_of(family))
        print(lines[-1], flush=True)
    if not args.check:
        PAGE.write_text(page_with(lines))
    elif page_with(lines) != PAGE.read_text():
        parser.error(f"{PAGE} says otherwise: write it anew, without --check")


if __name__ == "__main__":
    main()
