"""Routes of files and batches."""

from typing import Any

from inlay.http.app import Routes
from inlay.http.openapi import Operation, Parameter
from inlay.http.server import OCTETS
from inlay_batches.api import batches, files
from inlay_batches.api.schema import (
    Batch,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)

_TEXT: dict[str, Any] = {"type": "string"}
_FILE = Parameter("id", "id of a file.", _TEXT, "file-5d0f", "path")
_BATCH = Parameter("id", "id of a batch.", _TEXT, "batch_5d0f", "path")
_AFTER = Parameter("after", "id of the last entry of the page before.", _TEXT, "file-5d0f")


def _limit(usual: int, most: int) -> Parameter:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": usual}
    return Parameter("limit", "entries of a page.", schema, 10)


_FILES = (
    Parameter("purpose", "files of this purpose only.", _TEXT, "batch"),
    _limit(10_000, 10_000),
    Parameter("order", "by time.", {"enum": ["asc", "desc"], "default": "desc"}, "asc"),
    _AFTER,
)

ROUTES: Routes = (
    (Operation("POST", "/v1/files", "Keep a file: a form with `file` and `purpose`.",
        None, FileObject), files.upload),
    (Operation("GET", "/v1/files", "The caller's files.", None, FileList, parameters=_FILES),
        files.list_files),
    (Operation("GET", "/v1/files/{id}/content", "The bytes of a file.",
        parameters=(_FILE,), answers=(OCTETS,)), files.content),
    (Operation("GET", "/v1/files/{id}", "What is known of a file.",
        None, FileObject, parameters=(_FILE,)), files.show),
    (Operation("DELETE", "/v1/files/{id}", "Remove a file.",
        None, FileDeleted, parameters=(_FILE,)), files.delete),
    (Operation("POST", "/v1/batches", "Answer a file of requests in the background.",
        BatchRequest, Batch), batches.create),
    (Operation("GET", "/v1/batches", "The caller's batches, newest first.",
        None, BatchList, parameters=(_limit(20, 100), _AFTER)), batches.list_batches),
    (Operation("POST", "/v1/batches/{id}/cancel", "Cancel a batch; what was done stays.",
        None, Batch, parameters=(_BATCH,)), batches.cancel),
    (Operation("GET", "/v1/batches/{id}", "A batch and its progress.",
        None, Batch, parameters=(_BATCH,)), batches.show),
)  # fmt: skip
