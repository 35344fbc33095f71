"""Puts ZeRO-3's shards together in the dtype in which they travel, on the ranks that send them on.

DeepSpeed's own gather works in the trainer's dtype, on every rank, and fills a whole model's parameters with what most
ranks throw away. Here shards are cast first, and a bucket of them is exchanged at a time.
"""

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from grpo.model.four_bit import is_four_bit, matrix_shape


def is_zero3(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed ZeRO-3 holds this parameter partitioned."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the whole parameter; `parameter.shape` is empty while ZeRO-3 has it partitioned, and that of bytes where
    they hold four bits."""
    if is_four_bit(parameter):
        return matrix_shape(parameter)
    return torch.Size(parameter.ds_shape) if is_zero3(parameter) else parameter.shape


def gathered(
    tensors: Sequence[torch.Tensor], modifier_rank: int | None = None
) -> contextlib.AbstractContextManager[None]:
    """DeepSpeed's own gather: all of them whole in here. Collective under ZeRO-3.

    Args:
        modifier_rank: the rank whose changes are kept; None: nobody's.
    """
    partitioned = [tensor for tensor in tensors if is_zero3(tensor)]
    if not partitioned:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned, modifier_rank=modifier_rank)


def gather_convolutions_with_their_layers(model: nn.Module) -> None:
    """Let ZeRO-3 gather what a recurrent layer reads of its convolution, which it does not call.

    In a forward of its engine DeepSpeed finds that out by itself (0.19), in one of the model alone, as a verification's
    is, it does not.
    """
    for module in model.modules():
        for convolution in module.children():
            weights = [each for each in convolution.parameters(recurse=False) if is_zero3(each)]
            if isinstance(convolution, nn.Conv1d) and weights:
                import deepspeed

                for weight in weights:
                    deepspeed.zero.register_external_parameter(module, weight)


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
    space = place[begin : begin + rows.numel()]
    full, rest = divmod(space.numel(), shard)
    space[: full * shard].view(full, shard).copy_(rows[:full])
    if rest:
        space[full * shard :].copy_(rows[full, :rest])


class _Space:
    """Memory that is used again from bucket to bucket, for as long as a weight sync goes on."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def of(self, length: int) -> torch.Tensor:
        """[length], with whatever stood there."""
        if self._memory.numel() < length:
            self.drop()  # first, so that the smaller one and the larger one are never held together
            self._memory = self._memory.new_empty(length)
        return self._memory[:length]

    def drop(self) -> None:
        self._memory = self._memory.new_empty(0)


class ShardGather:
    """The gather of ZeRO-3 shards over one process group.

    Over NCCL an all-gather: each of W ranks receives (W-1)/W of a bucket of P bytes, and holds it for as long as a
    weight sync goes on, though one a node needs it. It is kept, by these numbers (not measured on GPUs yet,
    `bench.weight_sync` does):

    - Whoever else receives, a local main takes in (W-1)/W P over its own links, and the weight sync waits for it. The
      others receive meanwhile, over links of their own: 7B on 28 ranks, 14.7 GB at 300 GB/s of NVLink, 0.05 s. What it
      costs them is the memory of one bucket, 1.05 GiB there.
    - A node takes in the other nodes' (N-1)/N P either way. An all-gather's rings enter it at all of its adapters:
      11.4 GB on 4 nodes, at 8 x 50 GB/s 0.03 s. Sent to one GPU it all comes in over that one's adapter: 0.23 s, and
      0.30 s on 64 nodes, where each rank then keeps 64 connections in place of a ring's two.

    Over gloo, every rank sends its shards straight to the ranks that receive, and the others receive nothing: gloo's
    all-gather goes through temporary buffers on both sides, and was seen to take four times as long for two ranks.

    Constructing one is collective over the group, and so is every `gather`, with the same parameters on every rank.

    Args:
        dtype: in which shards travel.
        receives: whether this rank wants the whole parameters. The others only give.
        all_gather: which of the two ways, the same on every rank; None: the one of the group's backend.
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
            places: for each parameter a flat tensor to be filled, [numel], in any dtype and on any device; None where
                the whole is not wanted. On CUDA the copies into them are queued on the current stream.
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
                put_rows(place, shard[None], self._rank)  # its own shard stayed where it is
                put_rows(place, columns[self._rank :], self._rank + 1)
            begin += shard.numel()

    def exchange(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """What of `gather` crosses between ranks; collective.

        Args:
            shards: this rank's, flat, with the same sizes on every rank.

        Returns:
            Shards as they arrive, end to end, [ranks, sum of their sizes]; without this rank's own row where they are
            sent to those who receive, and without any on a rank that does not. Valid until the next call.
        """
        length = sum(shard.numel() for shard in shards)
        return self._all_gather(shards, length) if self._all_gathers else self._send_to_receivers(shards, length)

    def release(self) -> None:
        """Drop the memory that buckets were put together in; the next `gather` takes it anew."""
        self._received.drop()
        self._sent.drop()

    def _all_gather(self, shards: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """[ranks, length]. Memory is used again in the order of the current stream, which the collective keeps."""
        received = self._received.of(self._num_ranks * length).view(self._num_ranks, length)
        dist.all_gather_single(received.view(-1), self._cast(shards, length), group=self.group)
        return received

    def _send_to_receivers(self, shards: Sequence[torch.Tensor], length: int) -> torch.Tensor:
        """[ranks - 1, length], without this rank's own; nothing on a rank that does not receive."""
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
        # Together: over NCCL two ranks that both receive would wait, one by one, for each other's second call.
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
