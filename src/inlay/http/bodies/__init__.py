"""Contents of request bodies: from the socket to checked rows of embeddings.

`inlay.http.parsed_request` passes what the connection receives of a body of 64 KiB or more, up to
256 KiB at a time, to a `base64_extractor.Base64Extractor`, which decodes large base64 strings as
they arrive and keeps the rest as the body. Decoded bytes go into a `memory.Room`: with one worker
this is a part of its shared memory, so that the rows of an engine request lie there before it is
sent and are not copied. Parts of a multipart body go the same way.
`base64_extractor.parse_extracted` then parses the JSON with nonces in place of the strings, or the
body is reassembled for the full parser.

Invariants:
- Bytes are reserved (`accounting.Reservation`) before they are held, and counted for the client.
- The number of objects, strings and keys is bounded before a JSON parser runs (`structure`).
- The result is always the one that the JSON parser gives for the whole body.
"""
