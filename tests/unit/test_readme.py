"""The README's tables say what the code says."""

import re
from pathlib import Path

import trl

from grpo import GRPOConfig

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_our_fields_has_every_field_with_its_default() -> None:
    ours = {
        name: field.default
        for name, field in GRPOConfig.__dataclass_fields__.items()
        if name not in trl.GRPOConfig.__dataclass_fields__
    }
    ours["vllm_tensor_parallel_size"] = GRPOConfig.__dataclass_fields__["vllm_tensor_parallel_size"].default
    section = README.partition("| field of `GRPOConfig` | default | meaning |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", section, re.MULTILINE))
    assert rows.keys() == ours.keys()
    for name, default in ours.items():
        assert rows[name].strip('"') == (f"{default:g}" if isinstance(default, float) else str(default)), name


def test_every_vllm_field_of_trl_is_in_the_table_of_theirs() -> None:
    theirs = {name for name in trl.GRPOConfig.__dataclass_fields__ if name.startswith("vllm_")}
    section = README.partition("| field | local mode |")[2].partition("\n\n")[0]
    names = set()
    for row in section.splitlines():
        cell = row.split("|")[1] if row.count("|") > 2 else ""
        full = ""
        for name in re.findall(r"`(\w+)`", cell):
            full = name if name.startswith("vllm_") else "vllm_importance_sampling" + name
            names.add(full)
    assert names == theirs


def test_the_map_names_every_file_of_the_package() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Every file")[2]
    for file in sorted(ROOT.glob("grpo/**/*.py")):
        if file.name != "__init__.py":
            assert file.name in section, f"{file.relative_to(ROOT)} is not on the map"
