"""Data parallel training: the processes that torchrun starts, each with a part of every step's packs.

With `train.parallel = "ddp"` every rank has the whole draft and makes the same step from the sum of all ranks'
gradients, in the same order: their weights stay equal without being sent. With "fsdp" (FSDP2) a rank keeps a part of
every trained weight, of its gradient and of the optimiser's state, and the weights are gathered for each pass. One
process alone is a rank of one, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftmill.compute import has_cuda

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all: number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """Finds the others as torchrun's environment says; without torchrun there are none."""
        found = cls(rank=int(os.environ.get("RANK", "0")), size=int(os.environ.get("WORLD_SIZE", "1")))
        if found.size > 1:
            import torch.distributed as dist

            if has_cuda():
                import torch

                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if has_cuda() else "gloo")
        return found

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Makes each tensor, in place, the sum over all ranks; all of them have to call it."""
        if self.size > 1:
            import torch.distributed as dist

            for tensor in tensors:
                dist.all_reduce(tensor)

    def shard(self, model: Any, forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Cuts the trained parameters of a model into the ranks' parts; an optimiser has to be made after that.

        What is not trained stays whole on every rank. On a GPU the gathered weights are bfloat16, as autocast has them,
        and gradients are summed in float32.

        Args:
            forward: what is called with the model first; its result has to be a tuple, in which FSDP finds the tensors
                that a backward pass begins with.

        Returns:
            `forward` without its first argument, for which the weights are gathered, until its backward pass is done.
        """
        from functools import partial

        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if device.type == "cuda" else {}
        fully_shard(
            model,
            mesh=init_device_mesh(device.type, (self.size,)),
            reshard_after_forward=False,  # one pass reads all of them, and its backward pass begins with the last
            mp_policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False),
            ignored_params={p for p in model.parameters() if not p.requires_grad},
        )
        model.set_gradient_divide_factor(1.0)  # a step's loss is the sum of the ranks' already
        model.set_force_sum_reduction_for_comms(True)
        model.of_ranks = partial(forward, model)
        register_fsdp_forward_method(model, "of_ranks")
        return model.of_ranks  # type: ignore[no-any-return]

    def any(self, here: object, device: torch.device) -> bool:
        """Whether `here` is true on any rank."""
        if self.size == 1:  # asked before every step: a GPU is not to be waited for
            return bool(here)
        import torch

        found = torch.tensor(float(bool(here)), device=device)
        self.add([found])
        return bool(found)

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.size > 1:
            import torch.distributed as dist

            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            import torch.distributed as dist

            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that the ranks may have parts of; if they do, all of them have to ask for it."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def here(tensor: Any) -> int:
    """How many of a tensor's values this rank has."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel()


def part(value: Tensor, like: Any) -> Tensor:
    """What this rank has of a whole tensor, where it has a part of the tensor `like`; else all of it."""
    if not hasattr(like, "full_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """The whole weights in a model of which ranks may have parts, for passes with no gradient."""
    sharded = hasattr(model, "unshard")
    if sharded:
        model.unshard()
    yield
    if sharded:
        model.reshard()
