"""What a model directory must have for its model to be served, looked at before anything is loaded."""

from inlay.engine.settings import EngineSettings
from inlay.render.tokenizer import load_tokenizer
from inlay.tensors.hub import local_directory
from inlay.tensors.table import check_tensors, config_of


def check_model(engine: EngineSettings) -> None:
    """Say at once that a model cannot be served; one that is elsewhere is looked at by its engine.

    Raises:
        InvalidRequestError: there is no model, or no tokenizer (every route has text to read or to write), or its weights
            are missing, cut short or no safetensors files.
    """
    directory = local_directory(engine.model)
    if directory is not None:
        config_of(directory)
        load_tokenizer(directory)
        if engine.engine != "echo":
            check_tensors(directory)


__all__ = ["check_model"]
