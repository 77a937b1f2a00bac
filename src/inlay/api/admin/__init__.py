"""Routes for operators: sleep, caches and adapters of all workers."""
