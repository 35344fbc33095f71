"""Open files, free space at the output path, and local files for a node without network."""

import importlib.util
import json
import os
import resource
import tempfile
from pathlib import Path

from grpo.ops.doctor.records import Finding
from grpo.preflight.model import has_tokenizer, local_model

GIB = 1 << 30
FEW_FILES = 8192  # NCCL, gloo and vLLM hold sockets to every peer; 1024 is the usual default
LITTLE_BYTES, NO_BYTES = 50 * GIB, GIB
FEW_INODES = 10_000


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    shown = "unlimited" if soft == unlimited else str(soft)
    if soft == unlimited or soft >= FEW_FILES:
        return Finding.passed("open files", shown)
    enough = hard == unlimited or hard >= FEW_FILES
    fix = f"ulimit -n {65536 if hard == unlimited else min(hard, 65536)} before the launcher"
    if not enough:
        fix = "raise nofile in /etc/security/limits.conf (a service: LimitNOFILE), and with it ulimit -n"
    return Finding.warn("open files", f"{shown}, hard limit {hard}", fix)


def nearest_folder(path: Path) -> Path:
    """Return `path`, or the nearest existing folder above it."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def check_space(output_dir: Path) -> Finding:
    """Check free bytes and inodes at the output path, and that this node may write there."""
    folder = nearest_folder(output_dir.absolute())
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(65536))  # an exhausted quota shows here, not in statvfs
    except OSError as error:
        message = f"{folder}: cannot be written: {error.strerror}"
        return Finding.fail("output path", message, "give another --output-dir, or free space")
    stat = os.statvfs(folder)
    free, inodes = stat.f_bavail * stat.f_frsize, stat.f_favail
    message = f"{folder}: {free / GIB:.0f} GiB free"
    if stat.f_files:  # 0 on file systems without a fixed number, like btrfs
        message += f", {inodes:,} inodes"
    if free < NO_BYTES or (stat.f_files and inodes < FEW_INODES // 10):
        return Finding.fail("output path", message, "free space, or give another --output-dir")
    if free < LITTLE_BYTES or (stat.f_files and inodes < FEW_INODES):
        return Finding.warn("output path", message, "a checkpoint takes about 16 bytes per parameter: free space")
    return Finding.passed("output path", message)


# -- without network ----------------------------------------------------------------------------------------------


def missing_model_files(folder: Path) -> list[str]:
    """Missing files of a checkpoint folder: configuration, tokenizer, weights, shards named in its index."""
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    if not has_tokenizer(folder):
        missing.append("a tokenizer")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        missing += sorted(shard for shard in shards if not (folder / shard).exists())
    elif not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        missing.append("weights")
    return missing


def missing_kernels(folder: Path) -> list[str]:
    """Missing packages for linear attention; without them transformers falls back to plain torch (5.17)."""
    config = json.loads((folder / "config.json").read_text())
    kinds = config.get("text_config", config).get("layer_types") or ()
    packages = {"flash-linear-attention": "fla", "causal-conv1d": "causal_conv1d"}
    if "linear_attention" not in kinds:
        return []
    return [name for name, module in packages.items() if importlib.util.find_spec(module) is None]


def check_model(model: str, *, has_gpus: bool = False) -> Finding:
    """Check that this node can load `model`, a folder or a Hub name, without network, and has its kernels."""
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        is_folder = local_model(model, "--model") is not None
    except ValueError as error:
        return Finding.fail("model", str(error), "mount or copy it on this node, or mend the path")
    found = str(Path(model) / "config.json") if is_folder else try_to_load_from_cache(model, "config.json")
    if isinstance(found, str):
        folder = Path(found).parent
        lacks = missing_model_files(folder)
        if not lacks and has_gpus and (kernels := missing_kernels(folder)):
            message = f"{model} has linear attention, and without {' and '.join(kernels)} transformers trains it by "
            message += "plain torch: more than ten times slower in these layers on an H100, as its authors say"
            return Finding.warn("model", message, f"pip install {' '.join(kernels)}")
        if not lacks:
            return Finding.passed("model", f"{model}: complete in {folder}")
        if is_folder:
            return Finding.fail("model", f"{model} lacks {', '.join(lacks)}", "copy the rest of it")
        where = f"lacks {', '.join(lacks)} in {folder}"
    else:
        where = f"is not in the cache in {constants.HF_HUB_CACHE}"
    return _absent("model", f"{model} {where}", f"hf download {model}")


def check_dataset(dataset: str, config: str | None = None) -> Finding:
    """Check that this node can load `dataset`, a path or a Hub name, without network.

    Args:
        config: name of the data set's configuration; None if it has only one.
    """
    if Path(dataset).expanduser().exists():
        return Finding.passed("dataset", f"{dataset}: a local path")
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1:
        return Finding.fail("dataset", f"{dataset}: there is no such path", "mount or copy it on this node")
    from huggingface_hub import is_offline_mode

    where = ""
    if is_offline_mode():
        import datasets

        try:  # offline it uses the files `load_dataset` has prepared before, not downloaded ones
            prepared = datasets.load_dataset_builder(dataset, name=config).cache_dir
            return Finding.passed("dataset", f"{dataset}: prepared in {prepared}")
        except (OSError, ValueError):
            where = f" is not prepared in {datasets.config.HF_DATASETS_CACHE}"
    names = f"'{dataset}'" + (f", '{config}'" if config else "")
    return _absent("dataset", f"{dataset}{where}", f'python -c "import datasets; datasets.load_dataset({names})"')


def _absent(check: str, what: str, command: str) -> Finding:
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        fix = f"with network and the same HF_HOME: {command}"
        return Finding.fail(check, f"HF_HUB_OFFLINE is set, and {what}", fix)
    return Finding.passed(check, f"{what}: will be downloaded")
