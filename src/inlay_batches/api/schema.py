"""Types of `/v1/files` and `/v1/batches`, as OpenAI's."""

from typing import Annotated, Literal

import msgspec

from inlay.api.schema.described import (
    CachedTokens,
    OutputTokens,
    PromptTokens,
    ReasoningTokens,
    TotalTokens,
)
from inlay.messages.fields import example, field
from inlay_batches.records import Status


class FileObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    """A file.

    Attributes:
        id: by which routes find it.
        bytes: size of its content.
        created_at: Unix time of its upload.
        expires_at: Unix time from which it is gone; null if it stays until it is deleted.
        filename: as its client called it.
        purpose: "batch", "batch_output" or "user_data".
    """

    id: Annotated[str, example("file-5d0f")]
    bytes: Annotated[int, example(98)]
    created_at: Annotated[int, example(1764000000)]
    expires_at: Annotated[int | None, example(1766592000)]
    filename: Annotated[str, example("texts.jsonl")]
    purpose: Annotated[str, example("batch")]
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """Files, a page at a time.

    Attributes:
        data: the files of the page.
        first_id: id of the first of them, or null.
        last_id: id of the last of them, or null: `after` of the next page.
        has_more: there are more after them.
    """

    data: list[FileObject]
    first_id: Annotated[str | None, example("file-5d0f")]
    last_id: Annotated[str | None, example("file-5d0f")]
    has_more: Annotated[bool, example(False)]


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    """A file that is gone."""

    id: Annotated[str, field("id of the file.", "file-5d0f")]
    deleted: Literal[True] = True


class ExpiresAfter(msgspec.Struct, frozen=True):
    """Time for which a file is kept.

    Attributes:
        seconds: from the time when it is made.
        anchor: "created_at".
    """

    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000, examples=[86400])]
    anchor: Annotated[Literal["created_at"], example("created_at")] = "created_at"


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A batch to run.

    Attributes:
        input_file_id: id of a file of purpose "batch", each line of which is `{"custom_id",
            "method": "POST", "url", "body"}`; the url is `endpoint`.
        endpoint: path of the route that answers its lines.
        completion_window: whole hours, as "24h": lines that have not run by then are given up.
        metadata: at most 16 texts of at most 512 characters, by names of at most 64; they come
            back.
        output_expires_after: how long its files are kept; the server's time when absent.
        output_format: "jsonl"; for embeddings also "npy" or "safetensors": the vectors as one
            float32 matrix in the order of the lines, beside lines without them.
    """

    input_file_id: Annotated[str, example("file-5d0f")]
    endpoint: Annotated[str, example("/v1/embeddings")]
    completion_window: Annotated[str, example("24h")] = "24h"
    metadata: Annotated[dict[str, str] | None, example({"job": "harbour"})] = None
    output_expires_after: Annotated[
        ExpiresAfter | None, example({"anchor": "created_at", "seconds": 86400})
    ] = None
    output_format: Literal["jsonl", "npy", "safetensors"] = "jsonl"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a batch's input.

    Attributes:
        code: such as "invalid_json_line" or "duplicate_custom_id".
        message: what came and what is allowed.
        line: number of the line, from 1; null for the whole file.
        param: field of the line, or null.
    """

    code: Annotated[str, example("duplicate_custom_id")]
    message: Annotated[str, example("custom_id is that of line 3")]
    line: Annotated[int | None, example(7)]
    param: Annotated[str | None, example("custom_id")]


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """Errors of a batch's input.

    Attributes:
        data: the first hundred.
    """

    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True):
    """Lines of a batch.

    Attributes:
        total: all of them, once they have been checked.
        completed: answered with status 200.
        failed: answered with an error, or not run.
    """

    total: Annotated[int, example(3)]
    completed: Annotated[int, example(2)]
    failed: Annotated[int, example(1)]


class InputDetails(msgspec.Struct, frozen=True):
    """Part of the positions that came from the prefix cache."""

    cached_tokens: CachedTokens


class OutputDetails(msgspec.Struct, frozen=True):
    """Part of the tokens that are reasoning."""

    reasoning_tokens: ReasoningTokens


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Positions and tokens of all lines so far."""

    input_tokens: PromptTokens
    input_tokens_details: Annotated[InputDetails, field("more about the prompt.")]
    output_tokens: OutputTokens
    output_tokens_details: Annotated[OutputDetails, field("more about the answer.")]
    total_tokens: TotalTokens


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="batch"):
    """A batch. Times are Unix times, and null while it has not come there.

    Attributes:
        id: by which routes find it.
        endpoint: path of the route that answers its lines.
        model: that its lines name, once they have been checked; null where they name none.
        errors: of its input, where it failed.
        input_file_id: its lines.
        completion_window: as its client gave it.
        status: where it is. Lines run while it is "in_progress".
        output_file_id: answers of status 200, once it has ended; null where there is none.
        error_file_id: all other answers, and lines that did not run; null where there is none.
        matrix_file_id: the vectors, where `output_format` asked for a matrix.
        created_at: when it was made.
        in_progress_at: when its lines had been checked.
        expires_at: when lines that have not run are given up.
        finalizing_at: when its last line was done.
        completed_at: when its files were there.
        failed_at: when it failed.
        expired_at: when it expired.
        cancelling_at: when it was cancelled.
        cancelled_at: when its files were there, after that.
        request_counts: its lines, as of the last piece that was written.
        metadata: the client's own, or null.
        usage: of its lines, as of the last piece that was written.
    """

    id: Annotated[str, example("batch_5d0f")]
    endpoint: Annotated[str, example("/v1/embeddings")]
    model: Annotated[str | None, example("my-model")]
    errors: BatchErrors | None
    input_file_id: Annotated[str, example("file-5d0f")]
    completion_window: Annotated[str, example("24h")]
    status: Annotated[Status, example("completed")]
    output_file_id: Annotated[str | None, example("file-5d10")]
    error_file_id: Annotated[str | None, example("file-5d11")]
    matrix_file_id: Annotated[str | msgspec.UnsetType, example("file-5d12")] = msgspec.UNSET
    created_at: Annotated[int, example(1764000000)]
    in_progress_at: Annotated[int | None, example(1764000060)] = None
    expires_at: Annotated[int, example(1764086400)]
    finalizing_at: Annotated[int | None, example(1764000060)] = None
    completed_at: Annotated[int | None, example(1764000060)] = None
    failed_at: Annotated[int | None, example(1764000060)] = None
    expired_at: Annotated[int | None, example(1764000060)] = None
    cancelling_at: Annotated[int | None, example(1764000060)] = None
    cancelled_at: Annotated[int | None, example(1764000060)] = None
    request_counts: RequestCounts
    metadata: Annotated[dict[str, str] | None, example({"job": "harbour"})]
    usage: BatchUsage


class BatchList(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="list"):
    """Batches, newest first, a page at a time.

    Attributes:
        data: the batches of the page.
        first_id: id of the first of them, or null.
        last_id: id of the last of them, or null: `after` of the next page.
        has_more: there are more after them.
    """

    data: list[Batch]
    first_id: Annotated[str | None, example("batch_5d0f")]
    last_id: Annotated[str | None, example("batch_5d0f")]
    has_more: Annotated[bool, example(False)]
