"""Responses that are kept, and conversations: what a client goes on with by an id.

records.py      responses and conversations as they are kept
kept.py         those of owners, within their bounds
items.py        items of input and output, with ids
history.py      what comes before a request
events.py       events of a background response; one that is made again goes on where it was
background.py   one background response until it has ended
jobs.py         the background responses of one frontend
service.py      the part of a frontend: `/v1/responses` as far as it keeps
api/            the routes
"""

from inlay.extension import Extension

extension = Extension(
    "state",
    section="responses",
    routes="inlay_state.api.routes:ROUTES",
    frontend="inlay_state.service:make",
)
