"""OpenAI's API, with the additions of vLLM, TEI and inlay. `inlay.api.app` lists the routes."""
