"""ASGI app: routing, authentication, and errors as responses."""

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from starlette.routing import Route
from starlette.routing import Router as PathRouter

import inlay
from inlay.api.openai.adapters import AdapterList, LoadLoraAdapterRequest, UnloadLoraAdapterRequest
from inlay.api.openai.admin import Asleep, Awake, CacheReset, IsSleeping
from inlay.api.openai.chat import ChatChunk, ChatCompletion, ChatRequest
from inlay.api.openai.completions import Completion, CompletionChunk, CompletionRequest
from inlay.api.openai.embeddings import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from inlay.api.openai.models import ModelEntry, ModelList
from inlay.api.openai.prompt_embeds import (
    PinRequest,
    PromptEmbeds,
    PromptEmbedsDeleted,
    UploadRequest,
)
from inlay.api.openai.responses import Response, ResponsesRequest
from inlay.api.openai.responses_events import StreamEvent
from inlay.api.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from inlay.digest import Secret
from inlay.errors import InlayError, NotFoundError
from inlay.frontend import openapi
from inlay.frontend.access import caller_of, timeout_of
from inlay.frontend.bodies.admission import Reservation
from inlay.frontend.bodies.body import (
    Message,
    Receive,
    Scope,
    Send,
    check_transfer,
    declared_length,
    discard_body,
    header,
)
from inlay.frontend.cors import Cors
from inlay.frontend.errors import (
    BodyTimeoutError,
    ClientGone,
    MethodNotAllowedError,
    error_headers,
    error_json,
    internal_error,
)
from inlay.frontend.generation.chat import chat_completions
from inlay.frontend.generation.completions import completions
from inlay.frontend.metrics.engine_health import Health
from inlay.frontend.openapi import Operation
from inlay.frontend.request_log import begin_span, log_request
from inlay.frontend.responses.route import responses
from inlay.frontend.routes import adapters, admin, health, info, models, pages, tokenize, uploads
from inlay.frontend.routes.health import Status, Version
from inlay.frontend.server import Call, Server
from inlay.frontend.settings import FrontendSettings
from inlay.frontend.vectors.embeddings import embeddings
from inlay.frontend.vectors.pooling import classify, pooling
from inlay.frontend.vectors.scoring import rerank, score
from inlay.router import Router
from inlay.store import PromptStore, StoredPrompts
from inlay.telemetry import Tracing

Handler: TypeAlias = Callable[[Call], Awaitable[None]]

_log = logging.getLogger(__name__)
_request_id = re.compile(rb"[\x21-\x7e]{1,128}")
_NO_SNIFF = (b"x-content-type-options", b"nosniff")
_KEPT_ALIVE = 64 * 1024
"""Bytes of a refused body that are read to keep the connection; a longer body closes it."""


async def _openapi(call: Call) -> None:
    await call.bytes(
        openapi.document(OPERATIONS, inlay.__version__), (b"content-type", b"application/json")
    )


_ROUTES: tuple[tuple[Operation, Handler], ...] = (
    (
        Operation(
            "POST", "/v1/completions", "Continue a prompt of text, ids, embeddings or a mixture.",
            CompletionRequest, Completion, CompletionChunk, multipart=True,
        ),
        completions,
    ),
    (
        Operation(
            "POST", "/v1/chat/completions", "Answer a chat whose messages may hold embeddings.",
            ChatRequest, ChatCompletion, ChatChunk, multipart=True,
        ),
        chat_completions,
    ),
    (
        Operation(
            "POST", "/v1/responses", "Answer items, which may hold embeddings. Stateless.",
            ResponsesRequest, Response, StreamEvent, multipart=True,
        ),
        responses,
    ),
    (
        Operation(
            "POST", "/v1/embeddings", "Embeddings of texts, ids, chats or prompt_embeds.",
            EmbeddingRequest, EmbeddingResponse, multipart=True,
        ),
        embeddings,
    ),
    (
        Operation(
            "POST", "/pooling", "Embeddings or classes of the same inputs, in vLLM's form.",
            PoolingRequest, PoolingResponse, multipart=True,
        ),
        pooling,
    ),
    (
        Operation(
            "POST", "/classify", "Class probabilities of texts.",
            ClassificationRequest, ClassificationResponse,
        ),
        classify,
    ),
    (Operation("POST", "/v1/score", "Similarity scores of pairs of texts.",
        ScoreRequest, ScoreResponse), score),
    (Operation("POST", "/score", "As /v1/score.", ScoreRequest, ScoreResponse), score),
    (Operation("POST", "/v1/rerank", "Documents ranked by relevance to a query.",
        RerankRequest, RerankResponse), rerank),
    (Operation("POST", "/v2/rerank", "As /v1/rerank, at the path of Cohere's clients.",
        RerankRequest, RerankResponse), rerank),
    (Operation("POST", "/rerank", "As /v1/rerank.", RerankRequest, RerankResponse), rerank),
    (
        Operation(
            "POST", "/v1/prompt_embeds", "Store embeddings: octet-stream, or base64 in JSON.",
            UploadRequest, PromptEmbeds, octets=True,
        ),
        uploads.upload,
    ),
    (
        Operation("POST", "/v1/prompt_embeds/{id}/pin", "Pin or unpin stored embeddings.",
            PinRequest, PromptEmbeds),
        uploads.pin,
    ),
    (Operation("GET", "/v1/prompt_embeds/{id}", "Metadata of stored embeddings.",
        None, PromptEmbeds), uploads.show),
    (Operation("DELETE", "/v1/prompt_embeds/{id}", "Delete stored embeddings.",
        None, PromptEmbedsDeleted), uploads.delete),
    (Operation("GET", "/v1/models", "All models.", None, ModelList), models.list_models),
    (Operation("GET", "/v1/models/{id}", "One model.", None, ModelEntry), models.one_model),
    (Operation("POST", "/tokenize", "Token ids of a text or a chat.",
        TokenizeRequest, TokenizeResponse), tokenize.tokenize),
    (Operation("POST", "/detokenize", "Text of token ids.",
        DetokenizeRequest, DetokenizeResponse), tokenize.detokenize),
    (
        Operation(
            "POST", "/reset_prefix_cache", "Clear the prefix cache of every worker.",
            None, CacheReset, admin=True,
        ),
        admin.reset_prefix_cache,
    ),
    (
        Operation("POST", "/clear_kv_blocks", "As /reset_prefix_cache.",
            None, CacheReset, admin=True),
        admin.reset_prefix_cache,
    ),
    (
        Operation("POST", "/sleep", "Put workers to sleep: `level`, `mode`, `wait`, `model`.",
            None, Asleep, admin=True),
        admin.sleep,
    ),
    (
        Operation("POST", "/wake_up", "Wake workers, or only the `tags` weights or kv_cache.",
            None, Awake, admin=True),
        admin.wake_up,
    ),
    (Operation("GET", "/is_sleeping", "Sleep level of each worker.",
        None, IsSleeping, admin=True), admin.is_sleeping),
    (
        Operation(
            "POST", "/v1/load_lora_adapter", "Load an adapter and serve it as a model.",
            LoadLoraAdapterRequest, admin=True,
        ),
        adapters.load_lora_adapter,
    ),
    (
        Operation(
            "POST", "/v1/unload_lora_adapter", "Unload an adapter after its running requests.",
            UnloadLoraAdapterRequest, admin=True,
        ),
        adapters.unload_lora_adapter,
    ),
    (Operation("GET", "/v1/loras", "All adapters on all workers.",
        None, AdapterList, admin=True), adapters.list_loras),
    (Operation("GET", "/live", "Liveness probe: the process answers.",
        None, Status, open=True), health.live),
    (Operation("GET", "/ready", "Readiness probe: requests are accepted.",
        None, Status, open=True), health.ready),
    (Operation("GET", "/health", "Health of the workers' engines.",
        None, Health, open=True), health.health),
    (Operation("GET", "/ping", "As /health, at SageMaker's path.",
        None, Health, open=True), health.health),
    (Operation("POST", "/ping", "As /health, at SageMaker's path.",
        None, Health, open=True), health.health),
    (Operation("GET", "/load", "Number of running requests.",
        None, info.Load, open=True), info.load),
    (
        Operation(
            "GET", "/tokenizer_info",
            "Tokenizer configuration; admin without --enable-tokenizer-info-endpoint.",
            None, dict[str, Any],
        ),
        info.tokenizer_info,
    ),
    (
        Operation("GET", "/server_info", "Settings, models and machine.",
            None, dict[str, Any], admin=True),
        info.server_info,
    ),
    (Operation("GET", "/version", "inlay's version.", None, Version, open=True), health.version),
    (Operation("GET", "/metrics", "Prometheus metrics.", open=True), health.exposition),
    (Operation("GET", "/openapi.json", "OpenAPI description.", open=True), _openapi),
    (Operation("GET", "/docs", "API reference as a page.", open=True), pages.docs),
    (Operation("GET", "/", "Start page.", open=True), pages.home),
)  # fmt: skip

OPERATIONS = tuple(operation for operation, _ in _ROUTES)
"""All operations, as `/openapi.json` describes them."""


class _Endpoint:
    """The handlers of one path, by method."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.operations: dict[str, tuple[Operation, Handler]] = {}

    def find(self, scope: Scope) -> tuple[Operation, Handler]:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        found = self.operations.get(method)
        if found is None:
            raise MethodNotAllowedError(scope["method"], scope["path"], frozenset(self.operations))
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["inlay.call"]
        operation, handler = self.find(scope)
        scope["inlay.route"] = self.path
        server = call.server
        call.quiet = operation.open
        if not operation.open:
            begin_span(call, self.path)
        call.caller = caller_of(server, operation, scope)
        if operation.method == "GET" or operation.admin or operation.open:
            await handler(call)
            return
        call.timeout = timeout_of(scope["headers"], server.settings)
        peer = scope.get("client")
        client = call.reservation.client = server.clients.of(call.caller, peer[0] if peer else "")
        with client, server.inflight, call.reservation:
            await _in_time(call, handler)


async def _in_time(call: Call, handler: Handler) -> None:
    """Run `handler`. Raises `DeadlineExceededError` if the call's time is up before it answers."""
    call.clock = asyncio.timeout(call.remaining)
    try:
        async with call.clock:
            await handler(call)
    except TimeoutError as error:
        if call.clock.expired():
            raise call.too_late() from error
        raise


def _endpoints() -> list[Route]:
    endpoints: dict[str, _Endpoint] = {}
    for operation, handler in _ROUTES:
        endpoint = endpoints.setdefault(operation.path, _Endpoint(operation.path))
        endpoint.operations[operation.method] = (operation, handler)
    # A model's name may hold slashes.
    return [
        Route(path.replace("{id}", "{id:path}"), endpoint) for path, endpoint in endpoints.items()
    ]


_PATHS = _endpoints()


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    meant = "/v1" + scope["path"].removeprefix(scope.get("root_path", ""))
    hint = ""
    if any(path.path_regex.match(meant) for path in _PATHS):
        hint = f": did you mean {meant}? A base_url ends in /v1"
    raise NotFoundError(f"{scope['method']} {scope['path']} does not exist{hint}")


class App:
    """ASGI app of a frontend, made by `build_app`.

    Attributes:
        server: state that its endpoints share.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._cors = Cors(server.settings.allowed_origins)
        self._route = PathRouter(_PATHS, redirect_slashes=False, default=_no_route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; see the ASGI specification. Other scopes are ignored."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = self.server
        given = header(scope["headers"], b"x-request-id")
        named = given is not None and _request_id.fullmatch(given) is not None
        request_id = given if named and given is not None else uuid.uuid4().hex.encode()
        added = [(b"x-request-id", request_id), _NO_SNIFF, *self._cors.headers(scope["headers"])]
        status = 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        preflight = self._cors.preflight(scope["method"], scope["headers"])
        if preflight is not None:
            await tagged({"type": "http.response.start", "status": 204, "headers": preflight})
            await tagged({"type": "http.response.body", "body": b""})
            return
        call = Call(server, scope, receive, tagged, request_id.decode(), Reservation(server.budget))
        scope["inlay.call"] = call
        failed: BaseException | None = None
        try:
            check_transfer(scope["headers"])
            await self._route(scope, receive, tagged)
        except ClientGone as error:
            failed = error
            server.metrics.left()
        except InlayError as error:
            failed = error
            server.metrics.failed(error)
            await _refuse(call, error)
        except Exception as error:
            failed = error
            _log.exception("request %s to %s failed", call.request_id, scope["path"])
            if status:
                raise
            await _refuse(call, internal_error(call.request_id))
        finally:
            route = scope.get("inlay.route", "other")
            if not isinstance(failed, ClientGone):
                server.metrics.answered(route, status)
            log_request(call, route, status, failed or call.failed)
            # An error holds the frames it passed through, with the request's memory. Kept here,
            # they would live, uncounted, until the garbage collector finds them.
            failed = call.failed = None


async def _refuse(call: Call, error: InlayError) -> None:
    """Answer with an error, and read the rest of the body so that the client sees the answer."""
    headers = call.scope["headers"]
    body = error_json(error)
    own = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error_headers(error),
    ]
    declared = declared_length(headers)
    unread = not call.body_read and (declared or header(headers, b"transfer-encoding") is not None)
    slow = isinstance(error, BodyTimeoutError)
    if unread and (declared is None or declared > _KEPT_ALIVE or slow):
        own.append((b"connection", b"close"))
    await call.send({"type": "http.response.start", "status": error.status, "headers": own})
    await call.send({"type": "http.response.body", "body": body, "more_body": bool(unread)})
    if unread:
        if not slow:
            await discard_body(call.receive)
        await call.send({"type": "http.response.body", "body": b""})


def build_app(
    router: Router,
    settings: FrontendSettings,
    *,
    secret: Secret,
    store: PromptStore | StoredPrompts | None = None,
    tracing: Tracing | None = None,
) -> App:
    """Return the HTTP server as an ASGI app.

    Args:
        router: finds models and sends requests; the caller starts and closes its plane.
        settings: of the frontend.
        secret: of the namespace, for row digests; the workers must have the same.
        store: store of uploaded embeddings, made with the same secret and closed with the app;
            None disables references.
        tracing: makes spans, closed with the app; None for no spans.

    Raises:
        InvalidRequestError: a file named in the settings cannot be read.
    """
    return App(Server(router, settings, secret, store, tracing))
