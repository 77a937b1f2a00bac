"""Routes for operators: sleep, caches and adapters of all workers, and the workers themselves.

Each sends commands (`inlay.messages.commands`) and sums the replies; who may ask for them is
decided in `inlay.http.callers`.
"""
