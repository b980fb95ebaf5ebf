"""Data parallel training: the processes that torchrun starts, each with a part of every step's packs.

Every rank has the whole draft and makes the same step from the sum of all ranks' gradients, in the same order: their
weights stay equal without being sent. One process alone is a rank of one, and nothing is sent.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
