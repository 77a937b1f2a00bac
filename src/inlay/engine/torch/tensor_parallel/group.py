"""Collective operations of the ranks of one model.

torch's process groups without its global one, of which a process could have one only. `_Options` of
`ProcessGroupGloo` is private to torch; no public way binds a group to the loopback interface
without changing this process's environment.
"""

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from inlay.engine.settings import EngineSettings
from inlay.engine.torch.tensor_parallel.commands import Command, Reload, encode
from inlay.engine.torch.weights.checkpoint import device_of

_LOOPBACK = "127.0.0.1"


class TensorParallelGroup:
    """The ranks 0 to `size` - 1 of a model, one process each.

    Every rank must call the same collectives in the same order.
    """

    _loaded = False

    def __init__(
        self,
        store: Path,
        rank: int,
        size: int,
        device: torch.device,
        followers: Sequence[Connection] = (),
    ) -> None:
        """Connect the ranks; returns once all are there.

        Args:
            store: file by which they find each other, in a directory that no other user can read.
            rank: of this process.
            size: number of ranks.
            device: of this rank; NCCL connects GPUs, gloo CPUs.
            followers: of rank 0, the connections to the others.

        Raises:
            RuntimeError: another rank is lost.
        """
        self.rank = rank
        self.size = size
        self.device = device
        self._followers = followers
        # torch's stubs leave most of this out.
        torch_groups: Any = dist
        file = torch_groups.FileStore(str(store), size)
        if device.type == "cuda":
            options = torch_groups.ProcessGroupNCCL.Options()
            self._group = torch_groups.ProcessGroupNCCL(file, rank, size, options)
        else:
            options = torch_groups.ProcessGroupGloo._Options()
            loopback = torch_groups.ProcessGroupGloo.create_device(hostname=_LOOPBACK)
            options._devices = [loopback]
            self._group = torch_groups.ProcessGroupGloo(file, rank, size, options)

    @classmethod
    def connect(
        cls,
        settings: EngineSettings,
        rank: int,
        store: Path,
        followers: Sequence[Connection] = (),
    ) -> "TensorParallelGroup":
        """Connect this process as `rank`, on a device of its own. Arguments as for the class."""
        device = device_of(settings.model.device)
        if device.type == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        return cls(store, rank, settings.devices.tensor_parallel_size, device, followers)

    def close(self) -> None:
        """Close the connections and where they are listened for. Nothing may be called afterwards.

        Not left to who drops the last reference: an error of a lost rank holds one in its
        traceback.
        """
        del self._group

    def load(self) -> None:
        """Have all other ranks load the model as this one does, unless it is the first time.

        That they do by themselves.
        """
        if self._loaded:
            self.tell(Reload())
        self._loaded = True

    def tell(self, command: Command) -> None:
        """Give a command to all other ranks, if this is rank 0.

        Raises `OSError` if one is lost.
        """
        if not self._followers:
            return
        data = encode(command)
        for follower in self._followers:
            follower.send_bytes(data)

    def add(self, partial: Tensor) -> Tensor:
        """Replace `partial`, the same shape on all ranks, by the sum of all; return it."""
        self._group.allreduce([partial]).wait()
        return partial

    def share(self, values: Tensor) -> None:
        """Replace `values`, contiguous and of the same shape on all ranks, by those of rank 0."""
        self._group.broadcast(values, 0).wait()

    def share_bytes(self, data: bytes) -> bytes:
        """Return the `data` of rank 0; that of other ranks is not read."""
        size = torch.tensor([len(data)], device=self.device)
        self.share(size)
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else None
        values = torch.empty(int(size), dtype=torch.uint8) if sent is None else sent
        values = values.to(self.device)
        self.share(values)
        return values.cpu().numpy().tobytes()

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each value over the ranks; infinite where it is none on one."""
        found = values.nan_to_num(torch.inf, torch.inf).to(self.device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._group.allreduce([found], options).wait()
        return found

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts [..., n] of all ranks side by side [..., size * n] on rank 0.

        The others get their own back.
        """
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [[torch.empty_like(part) for _ in range(self.size)]] if self.rank == 0 else []
        self._group.gather(parts, [part.contiguous()], options).wait()
        return torch.cat(parts[0], dim=-1) if parts else part
