"""The processes of a model's other ranks: their start and end, and the steps that they run."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.base.parent import end_with_parent
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.checks import check_ranks
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.self_check.judgement import following
from inlay.engine.torch.tensor_parallel.commands import (
    Allocate,
    Command,
    Forward,
    Logits,
    Reload,
    Scrub,
    decode,
)
from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.engine.torch.weights.checkpoint import device_of
from inlay.engine.weights import directory_of
from inlay.tensors.checkpoint import config_of

_END_SECONDS = 5.0
"""Time for a rank to end by itself; one that computes is killed then."""


def load(settings: EngineSettings, undo: ExitStack) -> CausalModel:
    """Load the model, with `tensor_parallel_size` - 1 more processes that have their share of it.

    Raises:
        InvalidRequestError: an unsupported model, dtype, context length or number of ranks.
        EngineError: a rank has ended.
    """
    size = settings.devices.tensor_parallel_size
    if size == 1:
        return CausalModel.load(settings)
    directory = directory_of(settings.model.model, settings.model.revision)
    check_ranks(settings, config_of(directory), "generate")
    devices = torch.cuda.device_count()
    if device_of(settings.model.device).type == "cuda" and devices < size:
        raise InvalidRequestError(
            f"--tensor-parallel-size {size}: each rank has a GPU of its own, and there are "
            f"{devices}",
            param="tensor_parallel_size",
        )
    store = Path(undo.enter_context(TemporaryDirectory(prefix="inlay-ranks-"))) / "store"
    ended = undo.enter_context(ExitStack())
    followers = [undo.enter_context(_follower(settings, rank, store)) for rank in range(1, size)]
    for rank, connection in enumerate(followers, 1):
        try:
            connection.recv_bytes()
        except EOFError as error:
            raise EngineError(f"rank {rank} of the model ended as it began") from error
    group = TensorParallelGroup.connect(settings, 0, store, followers)
    ended.callback(group.close)
    return CausalModel.load(settings, group)


@contextmanager
def _follower(settings: EngineSettings, rank: int, store: Path) -> Iterator[Connection]:
    """A process of another rank until the block ends; yields the connection to it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=follow,
        args=(settings, rank, store, theirs, os.getpid()),
        name=f"inlay-rank-{rank}",
        daemon=True,
    )
    with theirs:
        process.start()
    try:
        yield ours
    finally:
        ours.close()
        process.join(_END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def follow(
    settings: EngineSettings, rank: int, store: Path, commands: Connection, parent: int
) -> None:
    """Load this rank's share of the model and run commands until rank 0 is gone.

    Args:
        settings: of the engine.
        rank: of this process.
        store: where the ranks meet.
        commands: from rank 0, which gets an empty message when this process is there.
        parent: id of rank 0's process, with which this one ends.
    """
    # Ctrl-C in a terminal is for the server, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One that waits for another in a sum reads no commands, and one that is stopped does nothing.
    end_with_parent(signal.SIGKILL, parent)
    commands.send_bytes(b"")
    group = TensorParallelGroup.connect(settings, rank, store)
    try:
        follower = _Follower(settings, group)
    except InvalidRequestError:
        # Rank 0 finds the same, and says so.
        return
    while True:
        try:
            data = commands.recv_bytes()
        except (EOFError, OSError):
            return
        follower.run(decode(data))


class _Follower:
    """A model and its pages, as rank 0 has them."""

    def __init__(self, settings: EngineSettings, group: TensorParallelGroup) -> None:
        self._settings, self._group = settings, group
        self._allocated: Pages | None = None
        self._model: CausalModel = CausalModel.load(settings, group)

    def run(self, command: Command) -> None:
        if isinstance(command, Reload):
            # Freed first: there may be no room for both.
            self._allocated = None
            del self._model
            self._model = CausalModel.load(self._settings, self._group)
            return
        model = self._model
        match command:
            case Allocate(num_pages, page_size):
                # Freed first: there may be no room for both.
                self._allocated = None
                self._allocated = model.new_pages(num_pages, page_size)
            case Scrub(page_ids):
                model.scrub(self._pages, page_ids)
            case Forward(batch, window, forced):
                positions = len(batch.positions)
                with following(model, positions) if forced else nullcontext():
                    model.hidden(model.upload(batch), self._pages, largest_window=window)
            case Logits(rows):
                model.logits(
                    torch.empty(rows, model.hidden_size, dtype=model.dtype, device=model.device)
                )

    @property
    def _pages(self) -> Pages:
        if self._allocated is None:
            raise EngineError("a rank has no pages yet")
        return self._allocated
