"""Embeddings of texts, and what rows are: `/v1/prompt_embeds/encode` and `.../{id}/rows`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from inlay.api.fields import check_depths
from inlay.api.generation.messages import read_texts
from inlay.api.openai.schema.lookup import (
    EncodePromptRequest,
    NearToken,
    RowFacts,
    RowsRequest,
    RowsResponse,
)
from inlay.api.openai.uploads import shown
from inlay.base.errors import InvalidRequestError, PermissionDeniedError
from inlay.http.bodies.embeds import TensorSource
from inlay.http.parsed_request import read_json
from inlay.http.references import store_for, stored_rows
from inlay.http.server import Call, Server
from inlay.http.tables import Table, with_noise
from inlay.messages.card import ModelCard
from inlay.messages.fields import check_length
from inlay.messages.prompt import Buffer, Rows
from inlay.render import Renderer
from inlay.tensors import read, write
from inlay.tensors.neighbours import nearest
from inlay.tensors.tensor import NUMPY_DTYPES

MAX_ROWS = 4096
MAX_SEARCHED_ROWS = 128
"""Rows of one request that are compared with the whole table."""
MAX_NEAREST = 8
MAX_NOISE = 64.0
_MAX_SEED = 2**63 - 1

_encode = msgspec.json.Decoder(EncodePromptRequest)
_rows = msgspec.json.Decoder(RowsRequest)


async def encode_prompt(call: Call) -> None:
    """Store the embeddings of a text, a chat or an upload, with noise if so asked.

    Raises:
        PermissionDeniedError: without --enable-embedding-lookup.
        InvalidRequestError: a field that is not allowed.
        InlayError: as an upload.
    """
    server = call.server
    store = store_for(call)
    server.embeds.require_enabled()
    _require_lookup(server)
    request = await read_json(call, _encode)
    _check(request)
    card = server.card(request.model)
    server.embeds.target(card)
    if request.ref is None:
        ids = await _ids(call, request, card)
        call.memory.check_total([len(ids) * card.hidden_size * 4])
        call.reservation.grow(len(ids) * card.hidden_size * 12)
        table = await server.tables.of(card)
        made = await server.tables.run(table.rows.rows, ids, card.dtype)
    else:
        made = _array(await _uploaded(call, request.ref, card))
        call.reservation.grow(made.size * 12)
    data = await server.tables.run(_file, made, request, card)
    stored = await store.put(
        call.caller.tenant.id,
        data,
        read(data, limits=server.limits.any),
        hold=call.reservation.grow,
    )
    await call.json(shown(stored))


async def show_rows(call: Call) -> None:
    """Answer with the lengths of an upload's rows, and on request the tokens near them.

    Raises:
        PermissionDeniedError: tokens without --enable-embedding-lookup.
        InvalidRequestError: a field that is not allowed.
        NotFoundError: no such upload of the caller.
    """
    server = call.server
    store_for(call)
    server.embeds.require_enabled()
    request = await read_json(call, _rows, empty=RowsRequest())
    if not 0 <= request.nearest <= MAX_NEAREST:
        raise InvalidRequestError(
            f"nearest must be 0 to {MAX_NEAREST}, got {request.nearest}", param="nearest"
        )
    if request.nearest:
        _require_lookup(server)
    card = server.card(request.model)
    id_ = str(call.path_params["id"])
    rows = _array(await _uploaded(call, id_, card))
    count = min(len(rows), MAX_SEARCHED_ROWS if request.nearest else MAX_ROWS)
    call.reservation.grow(count * card.hidden_size * 12)
    table = await server.tables.of(card) if server.settings.enable_embedding_lookup else None
    renderer = await server.renderers.of(card) if request.nearest else None
    facts = await server.tables.run(_facts, rows[:count], request.nearest, table, renderer)
    await call.json(
        RowsResponse(
            id=id_,
            model=card.name,
            num_tokens=len(rows),
            hidden_size=card.hidden_size,
            dtype=card.dtype,
            median_norm=float(np.median([row.norm for row in facts])),
            table_median_norm=None if table is None else table.median_norm,
            rows=facts,
        )
    )


def _require_lookup(server: Server) -> None:
    if not server.settings.enable_embedding_lookup:
        raise PermissionDeniedError(
            "embeddings of texts and nearest tokens are off: start the server with "
            "--enable-embedding-lookup"
        )


def _check(request: EncodePromptRequest) -> None:
    given = [name for name in ("prompt", "messages", "ref") if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            "give exactly one of prompt, messages and ref, got " + (" and ".join(given) or "none"),
            param="prompt",
        )
    if not 0 <= request.noise <= MAX_NOISE or math.isnan(request.noise):
        raise InvalidRequestError(
            f"noise must be 0 to {MAX_NOISE:g}, got {request.noise:g}", param="noise"
        )
    if not 0 <= request.seed <= _MAX_SEED:
        raise InvalidRequestError(f"seed must be 0 to {_MAX_SEED}", param="seed")


async def _ids(call: Call, request: EncodePromptRequest, card: ModelCard) -> Sequence[int]:
    renderer = await call.server.renderers.of(card)
    ids = await call.server.run_prepared(call.memory.json, _tokens, request, renderer)
    if not ids:
        raise InvalidRequestError("the text has no tokens", param="prompt")
    check_length(len(ids), card.limits.max_model_len)
    return ids


def _tokens(request: EncodePromptRequest, renderer: Renderer) -> Sequence[int]:
    if request.messages is None:
        return renderer.encode(request.prompt or "", add_special_tokens=True)
    check_depths(request, "messages")
    messages = read_texts(request.messages, "messages to be encoded are text alone")
    return renderer.chat(messages, add_generation_prompt=True).token_ids()


async def _uploaded(call: Call, id_: str, card: ModelCard) -> Rows:
    source = TensorSource(None, id_, None, "ref")
    found: Mapping[str, Sequence[Rows]] = await stored_rows(call, [source], card)
    prompts = found[id_]
    if len(prompts) != 1:
        raise InvalidRequestError(
            f"the upload is a batch of {len(prompts)} prompts; one is allowed", param="ref"
        )
    return prompts[0]


def _array(rows: Rows) -> npt.NDArray[Any]:
    return np.frombuffer(rows.data.view, NUMPY_DTYPES[rows.dtype]).reshape(rows.shape)


def _file(rows: npt.NDArray[Any], request: EncodePromptRequest, card: ModelCard) -> Buffer:
    if request.noise:
        rows = with_noise(rows, request.noise, request.seed)
    return Buffer(write(rows, "safetensors", table_id=card.embedding_table_id or None))


def _facts(
    rows: npt.NDArray[Any], top: int, table: Table | None, renderer: Renderer | None
) -> list[RowFacts]:
    wide = rows.astype(np.float32)
    norms, largest = np.linalg.norm(wide, axis=1), np.abs(wide).max(axis=1)
    near: list[list[NearToken]] = [[] for _ in norms]
    if table is not None and renderer is not None:
        near = [
            [
                NearToken(
                    token.token_id,
                    renderer.decode((token.token_id,), skip_special_tokens=False),
                    token.distance,
                    token.cosine,
                    token.exact,
                )
                for token in found
            ]
            for found in nearest(rows, table.rows, top, threads=False)
        ]
    return [
        RowFacts(float(norm), float(most), tokens)
        for norm, most, tokens in zip(norms, largest, near, strict=True)
    ]
