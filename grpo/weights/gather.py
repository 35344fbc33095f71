"""Puts ZeRO-3's shards together in the dtype in which they travel, on the ranks that send them on.

DeepSpeed's own gather works in the trainer's dtype, on every rank, and fills a whole model's parameters with what most
ranks throw away. Here shards are cast first, and a bucket of them is exchanged at a time.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def is_zero3(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 holds this parameter partitioned."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter; `parameter.shape` is empty while ZeRO-3 has it partitioned."""
    return torch.Size(parameter.ds_shape) if is_zero3(parameter) else parameter.shape


def has_plain_shards(parameter: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether a ZeRO-3 parameter is what its shards over `group` hold, end to end, with padding behind the last.

    Not so, and left to DeepSpeed's own gather: shards on NVMe, shards that are quantised or quantised for each gather
    (`zero_quantized_nontrainable_weights`, `zero_quantized_weights`), a second partition inside the node (hpZ), experts
    that are partitioned over a group of their own, and integers, which are not cast.
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
    """Whether the `deepspeed.zero.Init` that partitioned this parameter holds a quantiser, which it makes for no other
    reason than to use it. The parameter's methods are closures over that object (DeepSpeed 0.19)."""
    cells = dict(zip(parameter.all_gather.__code__.co_freevars, parameter.all_gather.__closure__, strict=True))
    return hasattr(cells["self"].cell_contents, "quantizer_module")


def put_rows(place: torch.Tensor, rows: torch.Tensor, first: int) -> None:
    """Write shards of a parameter into the whole of it, in at most two copies, with a cast where dtypes differ.

    Args:
        place: the whole parameter, flat, [N].
        rows: shards, [R, ceil(N / ranks)], of the ranks from `first` on; what goes beyond N is padding.
    """
    shard = rows.shape[1]
    begin = min(first * shard, place.numel())
    room = place[begin : begin + rows.numel()]
    full, rest = divmod(room.numel(), shard)
    room[: full * shard].view(full, shard).copy_(rows[:full])
    if rest:
        room[full * shard :].copy_(rows[full, :rest])


class ShardGather:
    """The gather of ZeRO-3 shards over one process group.

    Over NCCL an all-gather, which brings each byte into a node once, over all of its network adapters. Over gloo, every
    rank sends its shards straight to the ranks that receive: gloo's all-gather goes through temporary buffers on both
    sides, and was seen to take four times as long for two ranks.

    Constructing one is collective over the group, and so is every `gather`, with the same parameters on every rank.

    Args:
        dtype: in which shards travel.
        receives: whether this rank wants the whole parameters. The others only give.
    """

    def __init__(self, group: dist.ProcessGroup, *, dtype: torch.dtype, receives: bool) -> None:
        self._group = group
        self._dtype = dtype
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._uses_nccl = "nccl" in dist.get_backend_config(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._uses_nccl else torch.device("cpu")
        flags = [torch.zeros(1, dtype=torch.int32, device=self._device) for _ in range(self._num_ranks)]
        dist.all_gather(flags, torch.full_like(flags[0], int(receives)), group=group)
        self._receivers = [rank for rank, flag in enumerate(flags) if flag.item()]
        self._received = torch.empty(0, dtype=dtype, device=self._device)  # [ranks, shards of a bucket], used again
        self._sent = torch.empty(0, dtype=dtype, device=self._device)  # [shards of a bucket]

    def gather(self, parameters: Sequence[torch.Tensor], places: Sequence[torch.Tensor] | None) -> None:
        """Gather one bucket.

        Args:
            places: for each parameter a flat tensor to be filled, [numel], in any dtype and on any device; None where
                the whole is not wanted. On CUDA the copies into them are queued on the current stream.
        """
        shards = [parameter.ds_tensor for parameter in parameters]
        length = sum(shard.numel() for shard in shards)
        if self._num_ranks == 1:
            received = None
        elif self._uses_nccl:
            received = self._all_gather(shards, length)
        else:
            received = self._exchange(shards, length)
        if places is None:
            return
        begin = 0
        for shard, place in zip(shards, places, strict=True):
            if received is None:
                put_rows(place, shard[None], 0)
            elif self._uses_nccl:
                put_rows(place, received[:, begin : begin + shard.numel()], 0)
            else:
                columns = received[:, begin : begin + shard.numel()]
                put_rows(place, columns[: self._rank], 0)
                put_rows(place, shard[None], self._rank)  # its own shard stayed where it is
                put_rows(place, columns[self._rank :], self._rank + 1)
            begin += shard.numel()

    def _all_gather(self, shards: list[torch.Tensor], length: int) -> torch.Tensor:
        """[ranks, length]. Buffers are used again in the order of the current stream, which the collective keeps."""
        self._received = _at_least(self._received, self._num_ranks * length)
        received = self._received[: self._num_ranks * length].view(self._num_ranks, length)
        dist.all_gather_single(received.view(-1), self._cast(shards, length), group=self._group)
        return received

    def _exchange(self, shards: list[torch.Tensor], length: int) -> torch.Tensor:
        """[ranks - 1, length], without this rank's own; nothing on a rank that does not receive."""
        receives = self._rank in self._receivers
        others = [rank for rank in range(self._num_ranks) if rank != self._rank]
        rows = len(others) if receives else 0
        self._received = _at_least(self._received, rows * length)
        received = self._received[: rows * length].view(rows, length)
        waiting = [
            dist.irecv(row, group_src=rank, group=self._group)
            for rank, row in zip(others[:rows], received, strict=True)
        ]
        targets = [rank for rank in self._receivers if rank != self._rank]
        if targets:
            mine = self._cast(shards, length)
            waiting += [dist.isend(mine, group_dst=rank, group=self._group) for rank in targets]
        for work in waiting:
            work.wait()
        return received

    def _cast(self, shards: list[torch.Tensor], length: int) -> torch.Tensor:
        self._sent = _at_least(self._sent, length)
        begin = 0
        for shard in shards:
            self._sent[begin : begin + shard.numel()].copy_(shard)
            begin += shard.numel()
        return self._sent[:length]


def _at_least(buffer: torch.Tensor, length: int) -> torch.Tensor:
    return buffer if buffer.numel() >= length else buffer.new_empty(length)
