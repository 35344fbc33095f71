"""Stand-ins for a model's weights: `save_pretrained` sees names, sizes and dtypes, and reads values shard by shard.

transformers 5 converts a whole state dict before it writes the first shard (fused experts are split), in memory. Here
every parameter is converted by itself, by the same function, when the first tensor that comes out of it is written.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from grpo.export.stored_weights import StoredTensor, StoredWeights
from grpo.weights.names import Conversion, Tensors, conversion_units, some


class PendingTensor:
    """All that `save_pretrained` asks of a tensor: device and size, and `contiguous` when it writes its shard.

    Args:
        load: its values; called once.
    """

    device = torch.device("meta")

    def __init__(self, placeholder: torch.Tensor, load: Callable[[], torch.Tensor]) -> None:
        self.shape = placeholder.shape
        self.dtype = placeholder.dtype
        self.num_bytes = placeholder.numel() * placeholder.element_size()
        self._load = load

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(self.num_bytes, device="meta")

    def contiguous(self) -> torch.Tensor:
        return self._load().contiguous()


class _Unit:
    """Stored tensors that are converted together, and what comes out until it is taken."""

    def __init__(self, stored: StoredWeights, names: list[str], convert: Conversion, dtype: torch.dtype | None) -> None:
        self._stored = stored
        self._names = names
        self._convert = convert
        self._dtype = dtype
        self._converted: Tensors | None = None

    def take(self, name: str) -> torch.Tensor:
        if self._converted is None:
            self._converted = self._convert({n: _cast(self._stored.read(n), self._dtype) for n in self._names})
        return self._converted.pop(name)


def pending_tensors(
    model: PreTrainedModel, stored: StoredWeights, dtype: torch.dtype | None
) -> dict[str, PendingTensor]:
    """What `model.save_pretrained` takes as `state_dict`, with `save_original_format=False`.

    Args:
        model: on the meta device.
        dtype: of floating-point tensors; None: as they are stored.

    Returns:
        Under the names of the checkpoint format; a tied weight comes once.

    Raises:
        ValueError: `stored` is not this model.
    """
    expected = remove_tied_weights_from_state_dict(dict(model.state_dict()), model)
    aliases = model.state_dict().keys() - expected.keys()  # DeepSpeed's whole copies make a tied weight two tensors
    weights = {name: tensor for name, tensor in stored.tensors.items() if name not in aliases}
    _check_weights(model, expected, weights, as_saved=stored.as_saved)
    convert: Conversion = dict if stored.as_saved else functools.partial(revert_weight_conversion, model)
    placeholders = {
        name: _cast(torch.empty(weights[name].shape, dtype=weights[name].dtype, device="meta"), dtype)
        for name in (weights if stored.as_saved else expected)  # DeepSpeed's order is that of its parameter groups
    }
    pending = {}
    for parts in conversion_units(convert, placeholders):
        unit = _Unit(stored, parts, convert, dtype)
        for name, placeholder in convert({part: placeholders[part] for part in parts}).items():
            pending[name] = PendingTensor(placeholder, functools.partial(unit.take, name))
    return pending


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_weights(
    model: PreTrainedModel, expected: Tensors, weights: Mapping[str, StoredTensor], *, as_saved: bool
) -> None:
    if as_saved:
        # Under names that may be older than this transformers, and stay: only the sum can be compared.
        wanted, found = (sum(tensor.shape.numel() for tensor in part.values()) for part in (expected, weights))
        problems = [f"has {found} elements of weights, not {wanted}"] if found != wanted else []
    else:
        both = [name for name in expected if name in weights]
        wrong = {
            "lacks": [name for name in expected if name not in weights],
            "has besides": [name for name in weights if name not in expected],
            "has in another shape": [name for name in both if weights[name].shape != expected[name].shape],
        }
        problems = [f"{what} {some(names)}" for what, names in wrong.items() if names]
    if problems:
        raise ValueError(f"config.json describes a {type(model).__name__}, but the checkpoint {' and '.join(problems)}")
