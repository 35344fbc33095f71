"""DeepSpeed's files of ZeRO-1, 2 and 3 for another number of ranks: the same elements, in a new partition.

The output files are DeepSpeed's own format, as if written by that many ranks, so a resume loads them like any other.
DeepSpeed's universal checkpoint (0.19) is not used: with it every rank reads the whole model three times over, all
ZeRO-3 sub-groups share one `step` tensor, which is then incremented once for each, and the settings of the first
parameter group apply to all. Tests compare both.
"""

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grpo.checkpoints.pickles import load_mapped
from grpo.ops.reshape.partitions import dealt, flat_padding, flat_size, part_size, sub_groups

OPTIMIZER = "optimizer_state_dict"
MASTERS_3 = "fp32_flat_groups"
MASTERS_2 = "single_partition_of_fp32_groups"
BASE = "base_optimizer_state"
SUB_GROUP_SIZE = int(1e9)  # DeepSpeed's default
_OPTIM_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"


def partition_file(rank: int) -> str:
    """Name of a rank's file of model states under ZeRO-3."""
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def reshape_zero(source: Path, target: Path, *, before: int, ranks: int) -> None:
    """Write the files of `ranks` ranks into `target`, one after the other.

    Host memory: one new rank's weights and moments, 12 bytes per parameter over `ranks`.

    Args:
        source: the folder named in `latest`.
        before: number of ranks at the time of writing.

    Raises:
        ValueError: the files are of an unknown kind.
    """
    files = sorted(path.name for path in source.glob("*_optim_states.pt"))
    found = {int(match[2]): match for name in files if (match := _OPTIM_FILE.fullmatch(name))}
    if sorted(found) != list(range(before)) or len(files) != before:
        names = ", ".join(files) or "none"
        raise ValueError(f"{source} has not one optimizer file of each of {before} ranks, but: {names}")
    if (source / "offloaded_tensors").exists():
        raise ValueError(f"{source} has optimizer states offloaded to NVMe, which cannot be dealt out anew")
    states = [load_mapped(source / found[rank][0]) for rank in range(before)]
    prefix = found[0][1] or ""
    target.mkdir(parents=True, exist_ok=True)
    is_zero3 = MASTERS_3 in states[0][OPTIMIZER]
    layout = Zero3(source, states, before) if is_zero3 else Zero2(source, states, before)
    for rank in range(ranks):
        torch.save(layout.optimizer(rank, ranks), target / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if is_zero3 or rank == 0:
            name = partition_file(rank) if is_zero3 else _WHOLE_MODEL_FILE
            torch.save(layout.model(rank, ranks), target / name)


class Zero3:
    """ZeRO-3's files of `before` ranks."""

    def __init__(self, source: Path, states: list[dict[str, Any]], before: int) -> None:
        self.states = states
        self.models = [load_mapped(source / partition_file(rank)) for rank in range(before)]
        shapes: list[Mapping[str, torch.Size]] = self.models[0]["param_shapes"]
        self.shapes = {name: shape for group in shapes for name, shape in group.items()}
        self.sizes = {name: shape.numel() for name, shape in self.shapes.items()}
        zero = states[0][OPTIMIZER]
        # The optimizer's groups, by the numbers of their sub-groups.
        self.groups = [list(group["params"]) for group in zero[OPTIMIZER]["param_groups"]]
        self.names = [[name for number in group for name in shapes[number]] for group in self.groups]
        self.limit = int(_zero_settings(states[0]).get("sub_group_size", SUB_GROUP_SIZE))
        self.place: dict[str, tuple[int, int]] = {}  # sub-group, and offset in it, of a rank's part
        for number, group in enumerate(shapes):
            offset = 0
            for name in group:
                self.place[name] = (number, offset)
                offset += part_size(self.sizes[name], before)
            if any(state[OPTIMIZER][MASTERS_3][number].numel() != offset for state in states):
                raise ValueError(f"{source}: sub-group {number} has not the {offset} elements of its parameters' parts")
        if self._layout(before) != [list(group) for group in shapes]:
            raise ValueError(
                f"{source}: sub-groups are not formed as DeepSpeed 0.19 does with sub_group_size {self.limit}"
            )
        if whole := [name for name in self.shapes if self.models[0]["module"].get(name, torch.empty(0)).numel()]:
            raise ValueError(f"{source}: {whole[0]} is whole beside its parts")

    def _layout(self, ranks: int) -> list[list[str]]:
        return [each for names in self.names for each in sub_groups(names, self.sizes, self.limit, ranks)]

    def optimizer(self, rank: int, ranks: int) -> dict[str, Any]:
        """Build the optimizer file of a rank of `ranks`."""
        zero = self.states[0][OPTIMIZER]
        inner = zero[OPTIMIZER]
        masters: list[torch.Tensor] = []
        state: dict[int, dict[str, Any]] = {}
        param_groups = []
        for group, numbers, names in zip(inner["param_groups"], self.groups, self.names, strict=True):
            first = inner["state"].get(numbers[0], {}) if numbers else {}
            size = zero[MASTERS_3][numbers[0]].numel() if numbers else 0
            mine = sub_groups(names, self.sizes, self.limit, ranks) if names else []
            param_groups.append({**group, "params": list(range(len(masters), len(masters) + len(mine)))})
            for sub_group in mine:
                if first:
                    state[len(masters)] = {
                        key: self._dealt(key, sub_group, rank, ranks) if _is_flat(key, value, size) else _own(value)
                        for key, value in first.items()
                    }
                masters.append(self._dealt(None, sub_group, rank, ranks))
        dealt = {OPTIMIZER: {**inner, "state": state, "param_groups": param_groups}, MASTERS_3: masters}
        return {**self.states[0], OPTIMIZER: {**zero, "partition_count": ranks, **dealt}}

    def _dealt(self, key: str | None, names: list[str], rank: int, ranks: int) -> torch.Tensor:
        """Return a rank's part of a sub-group: of the optimizer's state `key`, or of the master weights."""
        found = []
        for name in names:
            number, offset = self.place[name]
            parts = [flat[offset:] for flat in _flats(self.states, key, number, MASTERS_3, OPTIMIZER)]
            found.append(dealt(self.sizes[name], rank, ranks, parts=parts, size_of=part_size))
        return torch.cat(found)

    def model(self, rank: int, ranks: int) -> dict[str, Any]:
        """Build the model file of a rank of `ranks`, with its parts of frozen parameters."""
        first = self.models[0]
        shapes = [OrderedDict((name, self.shapes[name]) for name in group) for group in self._layout(ranks)]
        changes: dict[str, Any] = {"param_shapes": shapes, "dp_world_size": ranks}
        if first.get("frozen_param_fragments"):
            changes["frozen_param_fragments"] = {
                name: reparted([model["frozen_param_fragments"][name] for model in self.models], shape, rank, ranks)
                for name, shape in first["frozen_param_shapes"].items()
            }
        return {**first, **changes}


class Zero2:
    """ZeRO-1's and ZeRO-2's files of `before` ranks."""

    def __init__(self, source: Path, states: list[dict[str, Any]], before: int) -> None:
        self.before = before
        self.states = states
        self.whole = load_mapped(source / _WHOLE_MODEL_FILE)
        self.shapes: list[Mapping[str, torch.Size]] = self.whole["param_shapes"]
        zero = states[0][OPTIMIZER]
        if not isinstance(zero[BASE], dict):
            raise ValueError(f"{source} was saved with DeepSpeed's elastic_checkpoint, which is not known here")
        if _zero_settings(states[0]).get("round_robin_gradients"):
            raise ValueError(f"{source} was saved with round_robin_gradients: its order belongs to {before} ranks")
        self.paddings = zero.get("param_alignment_paddings") or [[0] * len(group) for group in self.shapes]
        self.totals = [
            sum(shape.numel() for shape in group.values()) + sum(padding)
            for group, padding in zip(self.shapes, self.paddings, strict=True)
        ]
        for rank, state in enumerate(states):
            expected = [flat_padding(total, before, rank) for total in self.totals]
            sizes = [flat_size(total, before) - pad for total, pad in zip(self.totals, expected, strict=True)]
            found = [masters.numel() for masters in state[OPTIMIZER][MASTERS_2]]
            padding = list(state[OPTIMIZER]["group_paddings"])
            if found != sizes or padding != expected:
                raise ValueError(
                    f"{source}: rank {rank} holds {found} elements of its groups, and {padding} of padding, not "
                    f"{sizes} and {expected}"
                )

    def optimizer(self, rank: int, ranks: int) -> dict[str, Any]:
        """Build the optimizer file of a rank of `ranks`."""
        zero = self.states[0][OPTIMIZER]
        base = zero[BASE]
        state: dict[int, dict[str, Any]] = {}
        for number, values in base["state"].items():
            size = flat_size(self.totals[number], self.before)
            state[number] = {
                key: self._dealt(key, number, rank, ranks) if _is_flat(key, value, size) else value
                for key, value in values.items()
            }
        groups = range(len(self.totals))
        paddings = [flat_padding(total, ranks, rank) for total in self.totals]
        masters = [self._dealt(None, number, rank, ranks) for number in groups]
        changes = {
            BASE: {**base, "state": state},
            MASTERS_2: [flat[: flat.numel() - paddings[number]].clone() for number, flat in enumerate(masters)],
            "group_paddings": paddings,
            "partition_count": [ranks for _ in zero["partition_count"]],
            "param_slice_mappings": [self._slices(number, rank, ranks) for number in groups],
        }
        return {**self.states[0], OPTIMIZER: {**zero, **changes}}

    def _dealt(self, key: str | None, number: int, rank: int, ranks: int) -> torch.Tensor:
        parts = _flats(self.states, key, number, MASTERS_2, BASE)
        return dealt(self.totals[number], rank, ranks, parts=parts, size_of=flat_size)

    def _slices(self, number: int, rank: int, ranks: int) -> OrderedDict[str, Any]:
        """Map the rank's slices to parameters: length and start."""
        from deepspeed.utils.tensor_fragment import fragment_address

        size = flat_size(self.totals[number], ranks)
        left, right = rank * size, (rank + 1) * size
        found, start = OrderedDict(), 0
        for (name, shape), padding in zip(self.shapes[number].items(), self.paddings[number], strict=True):
            first, last = max(start, left), min(start + shape.numel(), right)
            if first < last:
                found[name] = fragment_address(numel=last - first, start=first - left)
            start += shape.numel() + padding
        return found

    def model(self, rank: int, ranks: int) -> dict[str, Any]:
        """Build the model file, which is whole."""
        return {**self.whole, "dp_world_size": ranks}


def _flats(states: list[dict[str, Any]], key: str | None, number: int, masters: str, inner: str) -> list[torch.Tensor]:
    """Return each old rank's flat tensor of a group: the optimizer's state `key`, or the master weights.

    Args:
        masters, inner: keys in the file of the weights, and of the optimizer inside DeepSpeed's.
    """
    optimizers = [state[OPTIMIZER] for state in states]
    if key is None:
        return [zero[masters][number] for zero in optimizers]
    return [zero[inner]["state"][number][key] for zero in optimizers]


def reparted(parts: list[torch.Tensor], shape: torch.Size, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of a parameter, from ZeRO-3's old `parts`."""
    return dealt(shape.numel(), rank, ranks, parts=[part.view(-1) for part in parts], size_of=part_size)


def _own(value: Any) -> Any:
    """Copy a tensor: a `step` shared by sub-groups would be incremented once for each."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_flat(name: str, value: Any, size: int) -> bool:
    """True if an optimizer state has one element per weight of a rank (`step` has only one).

    Raises:
        ValueError: it has another number of elements.
    """
    if not isinstance(value, torch.Tensor) or value.numel() == 1 != size:
        return False
    if value.numel() != size:
        raise ValueError(
            f"the optimizer's state {name!r} has {value.numel()} elements for {size} of weights: grpo reshape knows "
            "optimizers like Adam, which keep one for each weight"
        )
    return value.dim() > 0


def _zero_settings(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return (state.get("ds_config") or {}).get("zero_optimization") or {}
