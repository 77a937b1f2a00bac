"""Anthropic's Messages API: `schema` has its types, `input` makes a chat of a request.

`route` has the handlers, `shape` makes the JSON of messages and events, `errors` that of errors.
"""
