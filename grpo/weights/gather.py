"""Gather of ZeRO-3's shards, in the dtype they are sent in, on the ranks that send them on.

DeepSpeed's own gather works in the trainer's dtype, on every rank, and fills full parameters that most ranks discard.
Here shards are cast first, and exchanged one bucket at a time.
"""

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from grpo.model.four_bit import is_four_bit, matrix_shape


def is_zero3(parameter: torch.Tensor) -> bool:
    """True if DeepSpeed ZeRO-3 partitions this parameter."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the full parameter. `parameter.shape` is empty while ZeRO-3 has it partitioned, and the shape of the
    packed bytes for 4-bit weights."""
    if is_four_bit(parameter):
        return matrix_shape(parameter)
    return torch.Size(parameter.ds_shape) if is_zero3(parameter) else parameter.shape


def gathered(
    tensors: Sequence[torch.Tensor], modifier_rank: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """Gather tensors by DeepSpeed in a `with` block. Collective under ZeRO-3.

    Args:
        modifier_rank: rank whose changes are kept; None: no changes are kept.
    """
    partitioned = [tensor for tensor in tensors if is_zero3(tensor)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank)


def gather_convolutions_with_their_layers(model: nn.Module) -> None:
    """Let ZeRO-3 gather the convolution weights that a recurrent layer reads without calling the convolution.

    DeepSpeed detects this in a forward of its engine (0.19), but not in a forward of the model alone, as in a
    verification.
    """
    for module in model.modules():
        for convolution in module.children():
            weights = [each for each in convolution.parameters(recurse=False) if is_zero3(each)]
            if isinstance(convolution, nn.Conv1d) and weights:
                import deepspeed

                for weight in weights:
                    deepspeed.zero.register_external_parameter(module, weight)


def has_plain_shards(parameter: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True if a ZeRO-3 parameter consists of its shards over `group`, concatenated, with padding after the last.

    False, so left to DeepSpeed's own gather: shards on NVMe; shards quantised, or quantised for each gather
    (`zero_quantized_nontrainable_weights`, `zero_quantized_weights`); a second partition inside the node (hpZ); experts
    partitioned over their own group; and integers, which are not cast.
    """
    shard = parameter.ds_tensor
    return (
        parameter.ds_process_group is group
        and parameter.nvme_swapper is None
        and parameter.ds_secondary_tensor is None
        and parameter.ds_zero_param_process_group is None
        and not hasattr(shard, "ds_quant_scale")
        and not _quantises(parameter)
        and shard.is_floating_point()
    )


def _quantises(parameter: torch.Tensor) -> bool:
    """True if the `deepspeed.zero.Init` that partitioned this parameter holds a quantiser, made only if it is used. The
    parameter's methods are closures over this object (DeepSpeed 0.19)."""
    cells = dict(zip(parameter.all_gather.__code__.co_freevars, parameter.all_gather.__closure__, strict=True))
    return hasattr(cells["self"].cell_contents, "quantizer_module")


def put_rows(place: torch.Tensor, rows: torch.Tensor, first: int) -> None:
    """Copy shards of a parameter into the full one, in at most two copies, with a cast if dtypes differ.

    Args:
        place: the full parameter, flat, [N].
        rows: shards, [R, ceil(N / ranks)], of the ranks from `first` on; elements beyond N are padding.
    """
    shard = rows.shape[1]
    begin = min(first * shard, place.numel())
    space = place[begin : begin + rows.numel()]
    full, rest = divmod(space.numel(), shard)
    space[: full * shard].view(full, shard).copy_(rows[:full])
    if rest:
        space[full * shard :].copy_(rows[full, :rest])


class _Space:
    """Memory reused from bucket to bucket during a weight sync."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def of(self, length: int) -> torch.Tensor:
        """Return [length] elements, uninitialised."""
        if self._memory.numel() < length:
            self.drop()  # first, so that the smaller and the larger one are never held together
            self._memory = self._memory.new_empty(length)
        return self._memory[:length]

    def drop(self) -> None:
        self._memory = self._memory.new_empty(0)


class ShardGather:
    """Gather of ZeRO-3 shards over one process group.

    NCCL: an all-gather. Each of W ranks receives (W-1)/W of a bucket of P bytes, and holds it during a weight sync,
    though only one per node needs it. The numbers favour it (not measured on GPUs yet, `bench.weight_sync` does):

    - A local main receives (W-1)/W P over its own links either way, and the weight sync waits for it. The others
      receive in parallel, over their own links: 7B on 28 ranks, 14.7 GB at 300 GB/s of NVLink, 0.05 s. Their cost is
      the memory of one bucket, 1.05 GiB there.
    - A node receives the other nodes' (N-1)/N P either way. An all-gather's rings use all of its network adapters: 11.4
      GB on 4 nodes, at 8 x 50 GB/s 0.03 s. Sent to one GPU, everything enters by that GPU's adapter: 0.23 s, and 0.30 s
      on 64 nodes, where each rank then keeps 64 connections instead of a ring's two.

    Gloo: every rank sends its shards directly to the receiving ranks, and the others receive nothing. Gloo's all-gather
    uses temporary buffers on both sides, and took four times as long for two ranks.

    Construction is collective over the group, and so is every `gather`, with the same parameters on every rank.

    Args:
        dtype: of the shards as sent.
        receives: this rank needs the full parameters; the others only send.
        all_gather: use an all-gather, the same on every rank; None: chosen by the group's backend.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, dtype: torch.dtype, receives: bool, all_gather: bool | None = None
    ) -> None:
        self.group = group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        uses_nccl = "nccl" in dist.get_backend_config(group)
        self._all_gathers = (uses_nccl if all_gather is None else all_gather) and self._num_ranks > 1
        self._device = torch.device("cuda", torch.cuda.current_device()) if uses_nccl else torch.device("cpu")
        flags = [torch.zeros(1, dtype=torch.int32, device=self._device) for _ in range(self._num_ranks)]
        dist.all_gather(flags, torch.full_like(flags[0], int(receives)), group=group)
        self._receivers = [rank for rank, flag in enumerate(flags) if flag.item()]
        self._received = _Space(dtype, self._device)  # [ranks, shards of a bucket]
        self._sent = _Space(dtype, self._device)  # [shards of a bucket]

    def gather(self, parameters: Sequence[torch.Tensor], places: Sequence[torch.Tensor] | None) -> None:
        """Gather one bucket.

        Args:
            places: flat output tensor for each parameter, [numel], in any dtype and on any device; None on other ranks.
                On CUDA the copies are queued on the current stream.
        """
        shards = [parameter.ds_tensor for parameter in parameters]
        received = self.exchange(shards)
        if places is None:
            return
        begin = 0
        for shard, place in zip(shards, places, strict=True):
            columns = received[:, begin : begin + shard.numel()]
            if self._all_gathers:
                put_rows(place, columns, 0)
            else:
                put_rows(place, columns[: self._rank], 0)
                put_rows(place, shard[None], self._rank)  # its own shard did not travel
                put_rows(place, columns[self._rank :], self._rank + 1)
            begin += shard.numel()

    def exchange(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Exchange shards between ranks; collective.

        Args:
            shards: this rank's, flat, with the same sizes on every rank.

        Returns:
            Received shards, concatenated, [ranks, sum of their sizes]; with point-to-point sends without this rank's
            own row, and with no rows on a non-receiving rank. Valid until the next call.
        """
        length = sum(shard.numel() for shard in shards)
        return self._all_gather(shards, length) if self._all_gathers else self._send_to_receivers(shards, length)

    def release(self) -> None:
        """Free the bucket memory; the next `gather` allocates it again."""
        self._received.drop()
        self._sent.drop()

    def _all_gather(self, shards: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """Return [ranks, length]. Memory is reused in the order of the current stream, which the collective
        respects."""
        received = self._received.of(self._num_ranks * length).view(self._num_ranks, length)
        dist.all_gather_single(received.view(-1), self._cast(shards, length), group=self.group)
        return received

    def _send_to_receivers(self, shards: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """Return [ranks - 1, length], without this rank's own row; no rows on a non-receiving rank."""
        receives = self._rank in self._receivers
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        rows = len(others) if receives else 0
        received = self._received.of(rows * length).view(rows, length)
        ways = [
            dist.P2POp(dist.irecv, row, group=self.group, group_peer=rank)
            for rank, row in zip(others[:rows], received, strict=True)
        ]
        targets = [rank for rank in self._receivers if rank != self._rank]
        if targets:
            mine = self._cast(shards, length)
            ways += [dist.P2POp(dist.isend, mine, group=self.group, group_peer=rank) for rank in targets]
        # In one batch: over NCCL two receiving ranks would otherwise wait for each other's second call.
        for work in dist.batch_isend_irecv(ways) if ways else []:
            work.wait()
        return received

    def _cast(self, shards: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        cast = self._sent.of(length)
        begin = 0
        for shard in shards:
            cast[begin : begin + shard.numel()].copy_(shard)
            begin += shard.numel()
        return cast
