"""Types of `/v1/files` and `/v1/batches`, as OpenAI's."""

from typing import Annotated, Literal

import msgspec

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

    id: str
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
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
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="file"):
    """A file that is gone."""

    id: str
    deleted: Literal[True] = True


class ExpiresAfter(msgspec.Struct, frozen=True):
    """Time for which a file is kept.

    Attributes:
        seconds: from the time when it is made.
        anchor: "created_at".
    """

    seconds: Annotated[int, msgspec.Meta(ge=3600, le=2_592_000)]
    anchor: Literal["created_at"] = "created_at"


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

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    output_format: Literal["jsonl", "npy", "safetensors"] = "jsonl"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """An error of a batch's input.

    Attributes:
        code: such as "invalid_json_line" or "duplicate_custom_id".
        message: what came and what is allowed.
        line: number of the line, from 1; null for the whole file.
        param: field of the line, or null.
    """

    code: str
    message: str
    line: int | None
    param: str | None


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

    total: int
    completed: int
    failed: int


class InputDetails(msgspec.Struct, frozen=True):
    """Part of the positions that came from the prefix cache."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True):
    """Part of the tokens that are reasoning."""

    reasoning_tokens: int


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Positions and tokens of all lines so far."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


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

    id: str
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    matrix_file_id: str | msgspec.UnsetType = msgspec.UNSET
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
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
    first_id: str | None
    last_id: str | None
    has_more: bool
