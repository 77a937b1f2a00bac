"""Background responses that a frontend makes: it takes those that nobody holds."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from inlay.api.openai.responses.input import in_input
from inlay.api.openai.responses.route import Keeping, answer
from inlay.api.openai.schema.responses import Response, ResponsesRequest
from inlay.base import liveness
from inlay.base.errors import NotFoundError, OverloadedError
from inlay.http.asgi import Message
from inlay.http.bodies.accounting import ByteBudget
from inlay.http.callers.auth import Caller
from inlay.http.callers.clients import Client
from inlay.http.errors import internal_error
from inlay.http.inner_call import inner_call
from inlay.http.parsed_request import read_request
from inlay.http.server import Server, preparing_for
from inlay.store.kept.lease import SILENT_SECONDS, Held, LeaseLostError, replace
from inlay_state import conversations
from inlay_state.background import TRIES, Background
from inlay_state.history import history_of, items_in, with_history
from inlay_state.kept import Kept
from inlay_state.records import JOBS, HeldResponse, ResponseRecord, decode_response

_log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder(ResponsesRequest)


class Jobs:
    """Background responses of one frontend.

    Args:
        server: answers them.
        kept: where they are.
        caller_of: returns the caller of an owner; None where it has no key any more.
    """

    def __init__(
        self, server: Server, kept: Kept, caller_of: Callable[[str], Caller | None]
    ) -> None:
        self._server, self.kept, self._caller_of = server, kept, caller_of
        self._budget = ByteBudget(server.settings.max_inflight_bytes)
        self._holder = secrets.token_hex(8)
        self._running: dict[str, tuple[Background, asyncio.Task[None]]] = {}
        self._seen: dict[str, tuple[int, float]] = {}
        self._clients: dict[str, Client] = {}

    def __len__(self) -> int:
        return len(self._running)

    async def close(self) -> None:
        """Let others take them, who go on where they are."""
        running = [task for _, task in self._running.values()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def stop(self, owner: str, id_: str) -> None:
        """Stop making a response, if this frontend does."""
        if (running := self._running.get(f"{owner}.{id_}")) is not None:
            running[0].stop()

    async def scan(self) -> None:
        """Take what nobody holds, or whose holder is silent. Raises `OverloadedError`."""
        storage, now = self.kept.storage, liveness.now()
        seen: dict[str, tuple[int, float]] = {}
        for owner, id_, entry in await self.kept.jobs():
            key = f"{owner}.{id_}"
            if key in self._running:
                continue
            revision, record = await self.kept.find(owner, id_, ResponseRecord)
            if record is None:
                await storage.drop(f"{JOBS}.{id_}", entry)
                continue
            if record.ended:
                await self.end(owner, record)
                continue
            before, since = self._seen.get(key, (revision, now))
            seen[key] = revision, since if before == revision else now
            silent = now - seen[key][1] >= SILENT_SECONDS
            if not record.lease.holder or silent or record.lease.holder == self._holder:
                held = await Held.take(
                    storage, key, revision, record, self._holder, decode_response
                )
                if held is not None:
                    self._begin(owner, held)
        self._seen = seen

    def _begin(self, owner: str, held: HeldResponse) -> None:
        async def attempt(body: bytes, send: Callable[[Message], Awaitable[None]]) -> None:
            await self._attempt(owner, held.record, body, send)

        job = Background(held, owner, self.kept, attempt)
        self._running[held.key] = job, asyncio.create_task(self._run(owner, job, held))

    async def _attempt(
        self,
        owner: str,
        record: ResponseRecord,
        body: bytes,
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer the body of a background response with its stream."""
        caller = self._caller_of(owner)
        if caller is None:
            raise NotFoundError("the API key that asked for it was removed")
        client = self._client(owner, caller)
        call = inner_call(
            self._server,
            "/v1/responses",
            body,
            send,
            request_id=record.id,
            caller=caller,
            client=client,
            budget=self._budget,
        )

        async def keep(response: Response) -> None:
            if record.conversation is not None:
                own = await self.kept.read(record.input)
                await conversations.complete(
                    call, self.kept, owner, record.conversation, record.id, own, response
                )

        preparing_for.set(call.reservation)
        with client, call.reservation, call.ending:
            incoming = await read_request(call, _decoder, in_input)
            history = await history_of(call, self.kept, owner, record.previous, record.conversation)
            if record.conversation is not None:
                # A frontend that was lost may have completed it already.
                own = await items_in(call, self.kept, record.input)
                items = await self._server.run_prepared(
                    history.size, conversations.items_before, history.items, record.id, own
                )
                history = history._replace(items=items)
            whole = await with_history(call, incoming, history)
            await answer(call, whole, keeping_of(record, keep))

    def _client(self, owner: str, caller: Caller) -> Client:
        """Return the client of all background responses of an owner, with its limits.

        Its rate counted when it asked for them.
        """
        share = self._server.clients.share_of(caller)
        client = self._clients.setdefault(
            owner, Client(self._server.clients, f"{owner}/responses", share)
        )
        client.share = share
        return client

    async def _run(self, owner: str, job: Background, held: HeldResponse) -> None:
        try:
            await job.run()
            await self.end(owner, held.record)
        except LeaseLostError:
            _log.warning("response %s is not ours any more", held.record.id)
        except asyncio.CancelledError:
            await self._release(job, held)
            raise
        except Exception:
            _log.exception("response %s failed by a fault of ours", held.record.id)
            await self._count_fault(owner, job, held)
        finally:
            del self._running[held.key]

    async def _release(self, job: Background, held: HeldResponse) -> None:
        try:
            await job.release()
        except OverloadedError:
            _log.info(
                "%s was not released; another frontend takes it after %g s",
                held.record.id,
                SILENT_SECONDS,
            )

    async def _count_fault(self, owner: str, job: Background, held: HeldResponse) -> None:
        if held.record.ended:
            return
        faults = held.record.faults + 1

        def counted(record: ResponseRecord) -> ResponseRecord:
            return replace(record, faults=faults)

        try:
            await held.change(counted)
            if faults >= TRIES:
                await job.fail(internal_error(held.record.id))
                await self.end(owner, held.record)
            await job.release()
        except (LeaseLostError, OverloadedError) as error:
            _log.warning("response %s: its fault was not noted: %r", held.record.id, error)

    async def end(self, owner: str, record: ResponseRecord) -> None:
        """Note that a response needs no frontend any more. Raises `OverloadedError`."""
        if record.conversation is not None:
            await conversations.unlock(self.kept, owner, record.conversation, record.id)
        key = f"{JOBS}.{record.id}"
        revision, entry = await self.kept.storage.find(key)
        if entry is not None:
            await self.kept.storage.drop(key, revision)


def keeping_of(
    record: ResponseRecord, keep: Callable[[Response], Awaitable[None]], *, store: bool = True
) -> Keeping:
    """Return what the route is told of a record."""
    return Keeping(
        id=record.id,
        created_at=record.created_at,
        store=store,
        background=record.background,
        previous=record.previous,
        conversation=record.conversation,
        session=record.session,
        keep=keep,
    )
