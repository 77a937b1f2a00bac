"""Files and batches of one frontend: what it keeps, and the batches that it runs."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from blake3 import blake3
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inlay.base import liveness
from inlay.base.errors import NotFoundError, OverloadedError, RateLimitedError
from inlay.http.bodies.accounting import ByteBudget
from inlay.http.callers.auth import Caller
from inlay.http.frontend_part import FrontendAccess
from inlay.http.metrics.collectors import Collected
from inlay.store.kept.lease import SILENT_SECONDS, Held, LeaseLostError, replace
from inlay.store.kept.place import KeptPlace
from inlay.store.kept.rounds import rounds
from inlay_batches.answering import ServerWork, endpoints_of
from inlay_batches.files import Files
from inlay_batches.records import BatchRecord, HeldBatch, LineProblem, decode, decode_batch, encode
from inlay_batches.runner import BatchRunner, Pace, cancelled

NAME = "batches"
KIND = "files"
"""Name of the storage in a fleet."""

SCAN_SECONDS = 3.0
SWEEP_SECONDS = 60.0
ORPHAN_SECONDS = 3600.0
"""Age of a content that no record names and that is removed: far more than writing one takes."""

CALLERS_SECONDS = 1.0
"""Age at which the callers that have a key are looked up again."""

MAX_FAULTS = 3
"""Times that a batch may fail by a fault of ours before it is given up."""

_TRIES = 8

_log = logging.getLogger(__name__)


def make(access: FrontendAccess) -> "Batches | None":
    """Return the part of a frontend; None where it is off.

    Raises:
        InvalidRequestError: the settings cannot be.
    """
    return None if access.batches.batch_store == "off" else Batches(access)


class Batches:
    """`FrontendPart` of files and batches.

    Attributes:
        files: all files, once it has started.
        settings: of files and batches.
        endpoints: that batches may ask, by path.
    """

    files: Files

    def __init__(self, access: FrontendAccess) -> None:
        self.settings = settings = access.batches
        self._server = access.server
        self._place = KeptPlace(
            settings.batch_store,
            "--batch-store",
            KIND,
            max_bytes=settings.batch_store_bytes,
            key_file=settings.batch_store_key_file,
            open_shared=access.open_shared,
        )
        self.endpoints = endpoints_of(access.routes)
        self._owner_key = blake3(b"batch owners", key=access.server.secret.store).digest()
        self._budget = ByteBudget(access.server.settings.max_inflight_bytes)
        self._holder = secrets.token_hex(8)
        self._running: dict[str, tuple[BatchRunner, asyncio.Task[None]]] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._callers: dict[str, Caller] = {}
        self._callers_at = float("-inf")
        self._statuses: Counter[str] = Counter()
        self._takeovers = self._ended = 0
        access.server.metrics.registry.register(Collected(self._metrics))

    async def start(self) -> None:
        """Open the storage, and run what is to be run. Raises as the storage."""
        settings, total = self.settings, self._place.max_bytes
        self.files = Files(
            *await self._place.open(),
            max_bytes=total,
            owner_bytes=settings.files_tenant_bytes or total,
            ttl=settings.files_ttl,
        )
        self._task = asyncio.create_task(rounds(self._scan, SCAN_SECONDS, self._wake))
        self._sweeper = asyncio.create_task(rounds(self._sweep, SWEEP_SECONDS))

    async def close(self) -> None:
        """Let others take its batches, which go on where they are."""
        tasks = [task for task in (self._task, self._sweeper) if task is not None]
        for task in tasks:
            task.cancel()
        running = list(self._running.values())
        for _, task in running:
            task.cancel()
        await asyncio.gather(*tasks, *(task for _, task in running), return_exceptions=True)
        self._place.close()

    def owner(self, tenant: str) -> str:
        """Return the digest of a tenant, by which its files are found."""
        return blake3(tenant.encode(), key=self._owner_key).hexdigest(16)

    def _caller_of(self, owner: str) -> Caller | None:
        now = liveness.now()
        if now - self._callers_at >= CALLERS_SECONDS:
            found = self._server.keys.callers()
            self._callers = {self.owner(id_): caller for id_, caller in found.items()}
            self._callers_at = now
        return self._callers.get(owner)

    # What clients ask.

    async def create(self, owner: str, record: BatchRecord) -> BatchRecord:
        """Begin a batch.

        Raises:
            RateLimitedError: the owner has too many.
            OverloadedError: the storage does not answer.
        """
        await self._check_active(owner, record.id)
        if not await self.files.storage.swap(f"{owner}.{record.id}", encode(record), 0):
            raise OverloadedError("the batch could not be kept; send it again", retry_after=1)
        # Another frontend may have counted the same: whoever looks last sees what both began.
        try:
            await self._check_active(owner, record.id)
        except (RateLimitedError, OverloadedError):
            with suppress(OverloadedError):
                await self._withdraw(owner, record.id)
            raise
        self._wake.set()
        return record

    async def _check_active(self, owner: str, id_: str) -> None:
        """Check that an owner may have the batch `id_` besides its others."""
        active = sum(
            isinstance(each, BatchRecord) and not each.ended and each.id != id_
            for each in await self.files.all_of(owner)
        )
        if active >= self.settings.max_batches_per_tenant:
            raise RateLimitedError(
                f"you have {active} batches under way, which is the limit "
                "(--max-batches-per-tenant)",
                retry_after=60,
            )

    async def _withdraw(self, owner: str, id_: str) -> None:
        """Remove a batch; whoever runs it already loses its lease."""
        for _ in range(_TRIES):
            revision, record = await self.files.find(owner, id_)
            if record is None or await self.files.storage.drop(f"{owner}.{id_}", revision):
                return

    async def get(self, owner: str, id_: str) -> BatchRecord:
        """Return a batch.

        Raises:
            NotFoundError: there is no such batch of this owner.
            OverloadedError: the storage does not answer.
        """
        _, record = await self.files.find(owner, id_)
        if not isinstance(record, BatchRecord):
            raise NotFoundError(f"batch {id_[:80]!r} does not exist", param="batch_id")
        return record

    async def cancel(self, owner: str, id_: str) -> BatchRecord:
        """Cancel a batch; one that has ended stays as it is. Raises as `get`."""
        for _ in range(_TRIES):
            revision, record = await self.files.find(owner, id_)
            if not isinstance(record, BatchRecord):
                break
            changed = cancelled(record, self.files.now())
            if changed == record:
                return record
            if await self.files.storage.swap(f"{owner}.{id_}", encode(changed), revision):
                self._wake.set()
                if (found := self._running.get(f"{owner}.{id_}")) is not None:
                    found[0].look()
                return changed
        return await self.get(owner, id_)

    # What it runs.

    async def _scan(self) -> None:
        storage, now = self.files.storage, liveness.now()
        seen: dict[str, tuple[int, float]] = {}
        statuses: Counter[str] = Counter()
        for key, revision, kept in await storage.list():
            record = decode(key, kept)
            if not isinstance(record, BatchRecord):
                continue
            statuses[record.status] += 1
            if record.ended or key in self._running:
                continue
            before, since = self._seen.get(key, (revision, now))
            seen[key] = revision, since if before == revision else now
            silent = now - seen[key][1] >= SILENT_SECONDS
            if not record.lease.holder or silent or record.lease.holder == self._holder:
                held = await Held.take(storage, key, revision, record, self._holder, decode_batch)
                if held is not None:
                    self._takeovers += bool(record.lease.holder)
                    self._begin(held)
        self._seen, self._statuses = seen, statuses

    def _begin(self, held: HeldBatch) -> None:
        owner = held.key.partition(".")[0]
        record = held.record
        work = ServerWork(
            self._server,
            self.endpoints[record.endpoint],
            record,
            owner,
            self._caller_of,
            self.files,
            self._budget,
            self.settings.max_batch_lines,
        )
        pace = Pace(inflight=self.settings.batch_max_inflight)
        runner = BatchRunner(held, self.files.contents, work, pace)
        task = asyncio.create_task(self._run(runner, held))
        self._running[held.key] = runner, task

    async def _run(self, runner: BatchRunner, held: HeldBatch) -> None:
        try:
            await runner.run()
            self._ended += 1
        except LeaseLostError:
            _log.warning("batch %s went to another frontend", held.record.id)
        except asyncio.CancelledError:
            await self._release(runner)
            raise
        except Exception:
            _log.exception("batch %s failed by a fault of ours", held.record.id)
            await self._count_fault(runner, held)
        finally:
            del self._running[held.key]

    async def _release(self, runner: BatchRunner) -> None:
        try:
            await runner.release()
        except (LeaseLostError, OverloadedError):
            _log.info(
                "a batch was not released; another frontend takes it after %g s", SILENT_SECONDS
            )

    async def _count_fault(self, runner: BatchRunner, held: HeldBatch) -> None:
        def counted(record: BatchRecord) -> BatchRecord:
            record = replace(record, faults=held.record.faults + 1)
            if record.faults < MAX_FAULTS:
                return record
            problem = LineProblem("server_error", "the server failed to run the batch")
            ended = replace(record, problems=(*record.problems, problem), input=())
            return ended.at("failed", self.files.now())

        try:
            await held.change(counted)
            if not held.record.ended:
                await runner.release()
        except (LeaseLostError, OverloadedError) as error:
            _log.warning("batch %s: its fault was not noted: %r", held.record.id, error)

    async def _sweep(self) -> None:
        await self.files.sweep(self.settings.files_ttl, ORPHAN_SECONDS)

    def _metrics(self) -> Iterator[Metric]:
        batches = GaugeMetricFamily("inlay:batches", "Batches by status.", labels=["status"])
        for status, count in self._statuses.items():
            batches.add_metric([status], count)
        yield batches
        yield GaugeMetricFamily(
            "inlay:batches_running", "Batches that this frontend runs.", value=len(self._running)
        )
        yield CounterMetricFamily(
            "inlay:batch_takeovers", "Batches taken from a silent frontend.", value=self._takeovers
        )
