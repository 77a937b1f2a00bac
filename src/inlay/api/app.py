"""Routes of all APIs, and the ASGI app that serves them."""

from typing import Any

from inlay.api import examples, parameters
from inlay.api.admin import adapters, fleet
from inlay.api.admin import workers as admin
from inlay.api.admin.fleet import WorkerList
from inlay.api.admin.schema import (
    AdapterList,
    Asleep,
    Awake,
    CacheReset,
    DrainStarted,
    IsSleeping,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from inlay.api.anthropic import models as anthropic_models
from inlay.api.anthropic.errors import ANTHROPIC
from inlay.api.anthropic.route import count_tokens, messages
from inlay.api.anthropic.schema import (
    Event,
    Message,
    MessagesInput,
    MessagesRequest,
    ModelInfo,
    ModelPage,
    TokenCount,
)
from inlay.api.listed import by_version
from inlay.api.openai import lookup, models, tokenize, uploads
from inlay.api.openai.chat.route import chat_completions
from inlay.api.openai.completions.route import completions
from inlay.api.openai.decisions.route import decisions
from inlay.api.openai.embeddings import tei
from inlay.api.openai.embeddings.cohere import embed, embed_v1
from inlay.api.openai.embeddings.file_answer import FILE_TYPE
from inlay.api.openai.embeddings.route import classify, embeddings, pooling
from inlay.api.openai.embeddings.scoring import rerank, rerank_v2, score
from inlay.api.openai.encode import encode
from inlay.api.openai.responses.route import count_input
from inlay.api.openai.responses.route import responses as create_response
from inlay.api.openai.schema.chat import ChatChunk, ChatCompletion
from inlay.api.openai.schema.cohere import EmbedFloatsResponse, EmbedRequest, EmbedResponse
from inlay.api.openai.schema.completions import Completion, CompletionChunk, CompletionRequest
from inlay.api.openai.schema.decisions import Decision, DecisionRequest
from inlay.api.openai.schema.embeddings import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
)
from inlay.api.openai.schema.encode import EncodeRequest, EncodeResponse
from inlay.api.openai.schema.lookup import EncodePromptRequest, RowsRequest, RowsResponse
from inlay.api.openai.schema.models import ModelEntry, ModelList
from inlay.api.openai.schema.prompt_embeds import (
    PinRequest,
    PromptEmbeds,
    PromptEmbedsDeleted,
    Stored,
    UploadRequest,
)
from inlay.api.openai.schema.responses import InputTokens, Response, ResponsesRequest
from inlay.api.openai.schema.responses_events import StreamEvent
from inlay.api.openai.schema.scoring import (
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from inlay.api.openai.schema.tei import (
    EmbedInputsRequest,
    Prediction,
    PredictRequest,
    RankedText,
    RankRequest,
    ServedInfo,
    SimilarityRequest,
    SparseValue,
)
from inlay.api.openai.schema.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from inlay.api.openai.schema.transcriptions import (
    Transcription,
    TranscriptionEvent,
)
from inlay.api.openai.transcriptions.route import transcriptions, translations
from inlay.api.schema.chat import ChatRequest
from inlay.api.schema.described import CHAT, QUESTION
from inlay.api.schema.unserved import reason_for
from inlay.extension import merged, parts
from inlay.http import info, pages
from inlay.http.app import App, Routes
from inlay.http.frontend_part import FrontendAccess, OpenShared
from inlay.http.info import Status, Version
from inlay.http.metrics.engine_health import Health
from inlay.http.openapi import Operation
from inlay.http.server import IMAGES, OCTETS, Server
from inlay.http.settings import FrontendSettings
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.store import PromptStore, StoredPrompts
from inlay.store.settings import BatchSettings, ResponseSettings
from inlay.telemetry import Tracing

_ANSWERS: Routes = (
    (
        Operation(
            "POST", "/v1/completions", "Continue a prompt of text, ids, embeddings or a mixture.",
            CompletionRequest, Completion, CompletionChunk, parameters.GENERATION, multipart=True,
            examples=examples.COMPLETIONS,
        ),
        completions,
    ),
    (
        Operation(
            "POST", "/v1/chat/completions", "Answer a chat whose messages may hold embeddings.",
            ChatRequest, ChatCompletion, ChatChunk, parameters.GENERATION, multipart=True,
            examples=examples.CHATS,
        ),
        chat_completions,
    ),
    (
        Operation(
            "POST", "/v1/responses", "Answer items, which may hold embeddings.",
            ResponsesRequest, Response, StreamEvent, parameters.GENERATION, multipart=True,
            examples={"question": {"input": QUESTION}},
        ),
        create_response,
    ),
    (
        Operation(
            "POST", "/v1/responses/input_tokens", "Number of positions of a prompt of items.",
            ResponsesRequest, InputTokens, multipart=True,
            examples={"question": {"input": QUESTION}},
        ),
        count_input,
    ),
    (
        Operation(
            "POST", "/v1/decisions", "Probabilities of the options of questions about one state.",
            DecisionRequest, Decision, parameters=parameters.GENERATION, multipart=True,
            examples=examples.DECISIONS,
        ),
        decisions,
    ),
    (
        Operation(
            "POST", "/v1/messages", "Answer messages in Anthropic's form. Stateless.",
            MessagesRequest, Message, Event, (parameters.VERSION, *parameters.GENERATION),
            multipart=True, errors=ANTHROPIC, examples=examples.MESSAGES,
        ),
        messages,
    ),
    (
        Operation(
            "POST", "/v1/messages/count_tokens", "Number of positions of a prompt of messages.",
            MessagesInput, TokenCount, parameters=(parameters.VERSION,), multipart=True,
            errors=ANTHROPIC, examples={"question": {"messages": CHAT}},
        ),
        count_tokens,
    ),
    (
        Operation(
            "POST", "/v1/embeddings", "Embeddings of texts, ids, chats or prompt_embeds.",
            EmbeddingRequest, EmbeddingResponse, multipart=True, examples=examples.EMBEDDINGS,
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
            "POST", "/classify", "Class probabilities of texts, ids, chats or prompt_embeds.",
            ClassificationRequest, ClassificationResponse, multipart=True,
        ),
        classify,
    ),
    (Operation("POST", "/v1/audio/transcriptions", "Text of a sound: a form with a `file`.",
        response=Transcription, event=TranscriptionEvent,
        answers=("text/plain",)), transcriptions),
    (Operation("POST", "/v1/audio/translations", "English text of a sound: a form with a `file`.",
        response=Transcription,
        answers=("text/plain",)), translations),
    (Operation("POST", "/v1/score", "Similarity scores of pairs of texts.",
        ScoreRequest, ScoreResponse, examples=examples.SCORES), score),
    (Operation("POST", "/score", "As /v1/score.", ScoreRequest, ScoreResponse), score),
    (Operation("POST", "/v1/rerank", "Documents ranked by relevance to a query.",
        RerankRequest, RerankResponse, examples=examples.RERANK), rerank),
    (Operation("POST", "/v2/rerank", "As /v1/rerank, at the path of Cohere's clients.",
        RerankRequest, RerankResponse), rerank_v2),
    (Operation("POST", "/rerank", "As /v1/rerank; with `texts` as text-embeddings-inference does.",
        RankRequest, RerankResponse | list[RankedText]), tei.rank),
    (Operation("POST", "/embed", "Vectors of texts, as text-embeddings-inference gives them.",
        EmbedInputsRequest, list[list[float]], errors=tei.TEI), tei.embed),
    (Operation("POST", "/embed_all", "Vectors of the tokens of texts, likewise.",
        EmbedInputsRequest, list[list[list[float]]], errors=tei.TEI), tei.embed_all),
    (Operation("POST", "/embed_sparse", "Sparse vectors of texts, likewise.",
        EmbedInputsRequest, list[list[SparseValue]], errors=tei.TEI), tei.embed_sparse),
    (Operation("POST", "/predict", "Classes of texts, likewise.",
        PredictRequest, list[Prediction | list[Prediction]], errors=tei.TEI), tei.predict),
    (Operation("POST", "/similarity", "Likeness of a text with others, likewise.",
        SimilarityRequest, list[float], errors=tei.TEI), tei.similarity),
    (Operation("POST", "/", "As /embed, or /predict of a model without vectors, likewise.",
        EmbedInputsRequest, list[list[float]], errors=tei.TEI), tei.first),
    (Operation("GET", "/info", "The first model of vectors or scores, likewise.",
        None, ServedInfo, errors=tei.TEI), tei.describe),
    (Operation("POST", "/v2/embed", "Vectors of texts, as Cohere's clients ask.",
        EmbedRequest, EmbedResponse), embed),
    (Operation("POST", "/v1/embed", "As /v2/embed; without types the vectors are a list.",
        EmbedRequest, EmbedFloatsResponse | EmbedResponse), embed_v1),
)  # fmt: skip
_REST: Routes = (
    (Operation("POST", "/v1/encode", "Rows of images and audio, which a chat takes as embeddings.",
        EncodeRequest, EncodeResponse, examples={"picture": {"input": examples.PIXEL}}), encode),
    (
        Operation(
            "POST", "/v1/prompt_embeds", "Store embeddings, vectors or an image.",
            UploadRequest, Stored, parameters=(parameters.UPLOAD_MODEL,),
            files=(OCTETS, IMAGES + "*", FILE_TYPE.decode()),
        ),
        uploads.upload,
    ),
    (
        Operation("POST", "/v1/prompt_embeds/encode", "Store the embeddings of a text or a chat.",
            EncodePromptRequest, PromptEmbeds, examples={"text": {"prompt": QUESTION}}),
        lookup.encode_prompt,
    ),
    (
        Operation("POST", "/v1/prompt_embeds/{id}/rows", "Rows of stored embeddings.",
            RowsRequest, RowsResponse, parameters=(parameters.STORED,)),
        lookup.show_rows,
    ),
    (
        Operation("POST", "/v1/prompt_embeds/{id}/pin", "Pin or unpin a stored prompt.",
            PinRequest, Stored, parameters=(parameters.STORED,)),
        uploads.pin,
    ),
    (Operation("GET", "/v1/prompt_embeds/{id}", "Metadata of a stored prompt.",
        None, Stored, parameters=(parameters.STORED,)), uploads.show),
    (Operation("DELETE", "/v1/prompt_embeds/{id}", "Delete a stored prompt.",
        None, PromptEmbedsDeleted, parameters=(parameters.STORED,)), uploads.delete),
    (Operation("GET", "/v1/models", "All models.", None, ModelList,
        parameters=(parameters.ASKS_ANTHROPIC, *parameters.PAGES), otherwise=ModelPage),
        by_version(models.list_models, anthropic_models.list_models)),
    (Operation("GET", "/v1/models/{id}", "One model.", None, ModelEntry,
        parameters=(parameters.MODEL_NAME, parameters.ASKS_ANTHROPIC), otherwise=ModelInfo),
        by_version(models.one_model, anthropic_models.one_model)),
    (Operation("POST", "/tokenize", "Token ids of a text or a chat.",
        TokenizeRequest, TokenizeResponse,
        examples={"text": {"prompt": QUESTION, "return_token_strs": True}}), tokenize.tokenize),
    (Operation("POST", "/detokenize", "Text of token ids.",
        DetokenizeRequest, DetokenizeResponse, examples={"ids": {"tokens": [1, 2, 3]}}),
        tokenize.detokenize),
    (Operation("GET", "/workers", "State and load of each worker, and what waits.",
        None, WorkerList, admin=True), fleet.list_workers),
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
        Operation(
            "POST", "/sleep",
            "Put workers to sleep.", None, Asleep, parameters=parameters.SLEEP, admin=True,
        ),
        admin.sleep,
    ),
    (
        Operation("POST", "/wake_up", "Wake workers, or only parts of them.",
            None, Awake, parameters=parameters.WAKE, admin=True),
        admin.wake_up,
    ),
    (Operation("GET", "/is_sleeping", "Sleep level of each worker.", None, IsSleeping,
        parameters=(parameters.ONE_MODEL, parameters.ONE_WORKER), admin=True), admin.is_sleeping),
    (
        Operation("POST", "/drain", "Have one `worker` of a fleet drain and end, as with SIGTERM.",
            None, DrainStarted, parameters=(parameters.DRAINED,), admin=True),
        admin.drain,
    ),
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
        None, Status, open=True), info.live),
    (Operation("GET", "/ready", "Readiness probe: requests are accepted.",
        None, Status, open=True), info.ready),
    (Operation("GET", "/health", "Health of the workers' engines.",
        None, Health, open=True), info.health),
    (Operation("GET", "/ping", "As /health, at SageMaker's path.",
        None, Health, open=True), info.health),
    (Operation("POST", "/ping", "As /health, at SageMaker's path.",
        None, Health, open=True), info.health),
    (Operation("GET", "/load", "Number of running requests.",
        None, info.Load, open=True), info.load),
    (
        Operation(
            "GET", "/tokenizer_info",
            "Tokenizer configuration; admin without --enable-tokenizer-info-endpoint.",
            None, dict[str, Any], parameters=(parameters.TOKENIZER_MODEL,),
        ),
        info.tokenizer_info,
    ),
    (
        Operation("GET", "/server_info", "Settings, models and machine.",
            None, dict[str, Any], parameters=(parameters.CONFIG_FORMAT,), admin=True),
        info.server_info,
    ),
    (Operation("GET", "/version", "inlay's version.", None, Version, open=True), info.version),
    (Operation("GET", "/metrics", "Prometheus metrics.", open=True), info.exposition),
    (Operation("GET", "/docs", "API reference as a page.", open=True), pages.docs),
    (Operation("GET", "/start", "Requests to try, as a page.", open=True), pages.start),
    (Operation("GET", "/fleet", "The workers, as a page.", open=True), pages.fleet),
    (Operation("GET", "/web/{name}", "Files of the pages.",
        parameters=(parameters.FILE,), open=True), pages.asset),
    (Operation("GET", "/", "The playground, a page.", open=True), pages.home),
)  # fmt: skip


def refused(kind: type, name: str) -> str:
    """Return the reason why a field of a type of requests is refused."""
    return reason_for(kind, name).text


def routes() -> Routes:
    """Return all routes, with those of extensions.

    Raises:
        InvalidRequestError: two have one method and path.
    """
    given = parts("routes")
    everyone: list[tuple[str, Routes]] = [("inlay", (*_ANSWERS, *_REST))]
    everyone += [(f"extension {name!r}", some) for name, some in given]
    merged(
        "route",
        (
            (giver, {f"{each.method} {each.path}": each for each, _ in some})
            for giver, some in everyone
        ),
    )
    return (*_ANSWERS, *(route for _, some in given for route in some), *_REST)


def build_app(
    router: Router,
    settings: FrontendSettings,
    *,
    secret: Secret,
    store: PromptStore | StoredPrompts | None = None,
    tracing: Tracing | None = None,
    batches: BatchSettings | None = None,
    responses: ResponseSettings | None = None,
    open_shared: OpenShared | None = None,
) -> App:
    """Return the HTTP server as an ASGI app.

    Args:
        router: finds models and sends requests; the caller starts and closes its plane.
        settings: of the frontend.
        secret: of the namespace, for row digests; the workers must have the same.
        store: store of uploaded embeddings, made with the same secret and closed with the app;
            None disables references.
        tracing: makes spans, closed with the app; None for no spans.
        batches: settings of files and batches; off if None.
        responses: settings of kept responses; off if None.
        open_shared: opens storage in the fleet; None where there is none.

    Raises:
        InvalidRequestError: a file named in the settings cannot be read, or an extension's part
            cannot be as they say.
    """
    server, served = Server(router, settings, secret, store, tracing), routes()
    access = FrontendAccess(
        server, served, batches or BatchSettings(), responses or ResponseSettings(), open_shared
    )
    for name, make in parts("frontend"):
        part = make(access)
        if part is not None:
            server.parts[name] = part
    return App(server, served, refused)
