"""`/v1/batches`: files of requests, answered in the background."""

import re
from typing import Any

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import read_json
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay_batches.api.pages import batches_of, records_page
from inlay_batches.api.schema import (
    Batch,
    BatchError,
    BatchErrors,
    BatchList,
    BatchRequest,
    BatchUsage,
    InputDetails,
    OutputDetails,
    RequestCounts,
)
from inlay_batches.records import BatchRecord, new_id

_decoder = msgspec.json.Decoder(BatchRequest)
_window = re.compile(r"([1-9][0-9]{0,2})h")
_MOST_HOURS = 720
_METADATA = (16, 64, 512)
_TIMES = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


async def create(call: Call) -> None:
    """Begin a batch."""
    batches = batches_of(call)
    request = await read_json(call, _decoder)
    if request.endpoint not in batches.endpoints:
        raise InvalidRequestError(
            f"endpoint must be one of {', '.join(batches.endpoints)}, got "
            f"{shown_value(request.endpoint)}",
            param="endpoint",
        )
    if request.output_format != "jsonl" and request.endpoint != "/v1/embeddings":
        raise InvalidRequestError(
            f"output_format {request.output_format!r} is for /v1/embeddings", param="output_format"
        )
    hours = _hours(request.completion_window)
    _check_metadata(request.metadata)
    owner = batches.owner(call.caller.tenant.id)
    file = await batches.files.get(owner, request.input_file_id)
    if file.purpose != "batch":
        raise InvalidRequestError(
            f"input_file_id names a file of purpose {file.purpose!r}; it must be 'batch'",
            param="input_file_id",
        )
    now = int(batches.files.now())
    expires = request.output_expires_after
    record = BatchRecord(
        id=new_id("batch_"),
        endpoint=request.endpoint,
        input_file_id=file.id,
        window=request.completion_window,
        metadata=request.metadata,
        output_ttl=None if expires is None else expires.seconds,
        output_format=request.output_format,
        created_at=now,
        expires_at=now + hours * 3600,
        input=file.pieces,
    )
    await call.json(shown(await batches.create(owner, record)))


def _hours(window: str) -> int:
    found = _window.fullmatch(window)
    if found is None or int(found[1]) > _MOST_HOURS:
        raise InvalidRequestError(
            f"completion_window must be whole hours from 1h to {_MOST_HOURS}h, as 24h, got "
            f"{shown_value(window)}",
            param="completion_window",
        )
    return int(found[1])


def _check_metadata(metadata: dict[str, str] | None) -> None:
    most, name, text = _METADATA
    if metadata is None:
        return
    if len(metadata) > most or any(
        len(key) > name or len(value) > text for key, value in metadata.items()
    ):
        raise InvalidRequestError(
            f"metadata may have {most} texts of at most {text} characters, by names of at most "
            f"{name}",
            param="metadata",
        )


async def list_batches(call: Call) -> None:
    """Answer with the caller's batches, newest first."""
    batches = batches_of(call)
    found = await batches.files.all_of(batches.owner(call.caller.tenant.id))
    records = [record for record in found if isinstance(record, BatchRecord)]
    page, more = records_page(call, records, usual=20, most=100)
    await call.json(
        BatchList(
            data=[shown(record) for record in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=more,
        )
    )


async def show(call: Call) -> None:
    """Answer with a batch."""
    batches = batches_of(call)
    owner, id_ = batches.owner(call.caller.tenant.id), str(call.path_params["id"])
    await call.json(shown(await batches.get(owner, id_)))


async def cancel(call: Call) -> None:
    """Cancel a batch: what was done stays."""
    batches = batches_of(call)
    owner, id_ = batches.owner(call.caller.tenant.id), str(call.path_params["id"])
    await call.json(shown(await batches.cancel(owner, id_)))


def shown(record: BatchRecord) -> Batch:
    """Return a batch as clients see it."""
    problems = [
        BatchError(code=each.code, message=each.message, line=each.line, param=each.param)
        for each in record.problems
    ]
    times: dict[str, Any] = {name: record.times.get(name) for name in _TIMES}
    usage, ended = record.usage, record.ended
    matrix = record.matrix_file_id if ended else None
    return Batch(
        id=record.id,
        endpoint=record.endpoint,
        model=record.model,
        errors=BatchErrors(data=problems) if problems else None,
        input_file_id=record.input_file_id,
        completion_window=record.window,
        status=record.status,
        output_file_id=record.output_file_id if ended else None,
        error_file_id=record.error_file_id if ended else None,
        matrix_file_id=msgspec.UNSET if matrix is None else matrix,
        created_at=record.created_at,
        expires_at=record.expires_at,
        request_counts=RequestCounts(record.total, record.completed, record.failed),
        metadata=record.metadata,
        usage=BatchUsage(
            input_tokens=usage.input,
            input_tokens_details=InputDetails(usage.cached),
            output_tokens=usage.output,
            output_tokens_details=OutputDetails(usage.reasoning),
            total_tokens=usage.input + usage.output,
        ),
        **times,
    )
