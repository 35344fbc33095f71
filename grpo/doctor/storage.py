"""Open files, room at the output path, and the caches that a node without network must hold already."""

import json
import os
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

from grpo.doctor.records import Finding, Status

GIB = 1 << 30
FEW_FILES = 8192  # NCCL, gloo and vLLM hold sockets to every peer; 1024 is the usual default
LITTLE_BYTES, NO_BYTES = 50 * GIB, GIB
FEW_INODES = 10_000


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    shown = "unlimited" if soft == unlimited else str(soft)
    if soft == unlimited or soft >= FEW_FILES:
        return Finding(check="open files", status=Status.PASS, message=shown)
    enough = hard == unlimited or hard >= FEW_FILES
    fix = f"ulimit -n {65536 if hard == unlimited else min(hard, 65536)} before the launcher"
    if not enough:
        fix = "raise nofile in /etc/security/limits.conf (a service: LimitNOFILE), and with it ulimit -n"
    return Finding(check="open files", status=Status.WARN, message=f"{shown}, hard limit {hard}", fix=fix)


def nearest_folder(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def check_room(output_dir: Path) -> Finding:
    """Free bytes and inodes at the output path, and whether this node may write there."""
    folder = nearest_folder(output_dir.absolute())

    def finding(status: Status, message: str, fix: str = "") -> Finding:
        return Finding(check="output path", status=status, message=f"{folder}: {message}", fix=fix)

    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(65536))  # a quota that is used up shows here, not in statvfs
    except OSError as error:
        return finding(Status.FAIL, f"cannot be written: {error.strerror}", "give another --output-dir, or free room")
    stat = os.statvfs(folder)
    free, inodes = stat.f_bavail * stat.f_frsize, stat.f_favail
    message = f"{free / GIB:.0f} GiB free"
    if stat.f_files:  # 0 on file systems that have no fixed number, like btrfs
        message += f", {inodes:,} inodes"
    if free < NO_BYTES or (stat.f_files and inodes < FEW_INODES // 10):
        return finding(Status.FAIL, message, "free room, or give another --output-dir")
    if free < LITTLE_BYTES or (stat.f_files and inodes < FEW_INODES):
        return finding(Status.WARN, message, "a checkpoint takes about 14 bytes per parameter: free room")
    return finding(Status.PASS, message)


def sees_file(path: Path, text: str) -> bool:
    """Whether the file that another node wrote is here. Lists the folder: NFS clients believe an old listing."""
    try:
        return path.name in os.listdir(path.parent) and path.read_text() == text
    except OSError:
        return False


# -- caches -------------------------------------------------------------------------------------------------------


def is_offline(env: Mapping[str, str]) -> bool:
    return env.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def hub_folder(env: Mapping[str, str], home: Path) -> tuple[Path, Path]:
    """The caches of hub downloads and of prepared data sets, as huggingface_hub and datasets place them."""
    root = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface").expanduser()
    hub = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or root / "hub"
    datasets = env.get("HF_DATASETS_CACHE") or root / "datasets"
    return Path(hub).expanduser(), Path(datasets).expanduser()


def missing_model_files(folder: Path) -> list[str]:
    """Files that a checkpoint folder lacks: its configuration, a tokenizer, weights, shards that its index names."""
    missing = [] if (folder / "config.json").exists() else ["config.json"]
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("a tokenizer")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        missing += sorted(shard for shard in shards if not (folder / shard).exists())
    elif not [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        missing.append("weights")
    return missing


def check_model_cache(model: str, env: Mapping[str, str], home: Path) -> Finding:
    """Whether this node can load `model`, a folder or a name on the hub, without network."""
    if Path(model).is_dir():
        snapshots = [Path(model)]
    else:
        hub, _ = hub_folder(env, home)
        snapshots = sorted((hub / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
    lacks = [missing_model_files(snapshot) for snapshot in snapshots]
    complete = [snapshot for snapshot, missing in zip(snapshots, lacks, strict=True) if not missing]
    if complete:
        return Finding(check="model", status=Status.PASS, message=f"{model}: complete in {complete[0]}")
    if Path(model).is_dir():
        return Finding(
            check="model", status=Status.FAIL, message=f"{model} lacks {', '.join(lacks[0])}", fix="copy the rest of it"
        )
    what = f"lacks {', '.join(lacks[-1])}" if lacks else "is not in the cache"
    return _absent("model", model, f"{what} in {hub_folder(env, home)[0]}", f"hf download {model}", env)


def check_dataset_cache(dataset: str, env: Mapping[str, str], home: Path) -> Finding:
    """Whether this node can load `dataset`, a path or a name on the hub, without network."""
    if Path(dataset).exists():
        return Finding(check="dataset", status=Status.PASS, message=f"{dataset}: a local path")
    _, datasets = hub_folder(env, home)
    # Offline, `load_dataset` looks for what it has prepared before, not for the download; it may write the folder's
    # name in snake case.
    found = [path for path in datasets.glob("*") if _plain(path.name) == _plain("___".join(dataset.split("/")))]
    if found and any(found[0].glob("*/*/*")):
        return Finding(check="dataset", status=Status.PASS, message=f"{dataset}: prepared in {found[0]}")
    command = f"python -c \"import datasets; datasets.load_dataset('{dataset}')\""
    return _absent("dataset", dataset, f"is not prepared in {datasets}", command, env)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _absent(check: str, name: str, where: str, command: str, env: Mapping[str, str]) -> Finding:
    if is_offline(env):
        fix = f"with network and the same HF_HOME: {command}"
        return Finding(check=check, status=Status.FAIL, message=f"HF_HUB_OFFLINE is set, and {name} {where}", fix=fix)
    return Finding(check=check, status=Status.PASS, message=f"{name} {where}: will be downloaded")
