"""Files of clients, and batches of requests in them, answered in the background.

records.py          files and batches as they are kept
storage of both is `inlay.store.kept`
files.py            files of owners, their bounds
lines.py, validate.py   lines of an input file, all checked before one runs
runner.py           one batch until it has ended
answering.py        a line, answered as a request over HTTP; work.py: what a runner needs of it
matrix.py           vectors as one matrix
service.py          the batches of one frontend
api/                /v1/files, /v1/batches
run_batch.py        `inlay run-batch`
"""

from inlay.extension import Extension

extension = Extension(
    "batches",
    routes="inlay_batches.api.routes:ROUTES",
    frontend="inlay_batches.service:make",
    commands="inlay_batches.commands:COMMANDS",
)
