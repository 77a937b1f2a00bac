"""Routes of files and batches."""

from inlay.http.app import Routes
from inlay.http.openapi import Operation, Parameter
from inlay.http.paging import list_parameters
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

_FILE = Parameter("id", "id of a file.", "file-5d0f", place="path")
_BATCH = Parameter("id", "id of a batch.", "batch_5d0f", place="path")
_FILES = (
    Parameter("purpose", "files of this purpose only.", "batch"),
    *list_parameters("file-5d0f", "by time.", 10_000, 10_000),
)
_BATCHES = list_parameters("batch_5d0f", "", 20, 100)

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
        None, BatchList, parameters=_BATCHES), batches.list_batches),
    (Operation("POST", "/v1/batches/{id}/cancel", "Cancel a batch; what was done stays.",
        None, Batch, parameters=(_BATCH,)), batches.cancel),
    (Operation("GET", "/v1/batches/{id}", "A batch and its progress.",
        None, Batch, parameters=(_BATCH,)), batches.show),
)  # fmt: skip
