"""A uvicorn whose inside is another is refused at the start."""

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from inlay.base.errors import InvalidRequestError
from inlay.http import uvicorn_inside
from inlay.http.bounded_http import BoundedHttp


def test_this_uvicorn_has_all_that_is_used() -> None:
    assert uvicorn_inside.missing() == []
    assert uvicorn.__version__.startswith(f"{uvicorn_inside.TESTED}.")
    assert set(uvicorn_inside.OVERRIDDEN) <= set(vars(BoundedHttp))


def test_a_renamed_method_attribute_or_one_that_is_not_called_is_named() -> None:
    class Uncalled:
        """A protocol without callers of its methods, and with one attribute."""

        def __init__(self) -> None:
            self.cycle = None

        def _start_asgi_task(self) -> None:
            """Stand for uvicorn's."""

    found = uvicorn_inside.missing(protocol=Uncalled)
    assert "Uncalled._start_asgi_task" in found
    assert "Uncalled.pipeline" in found
    assert "Uncalled.cycle" not in found
    assert uvicorn_inside.missing(cycle=Uncalled)[0] == "Uncalled.body"
    assert uvicorn_inside.missing(HttpToolsProtocol, RequestResponseCycle, Uncalled)


def test_the_error_names_what_is_missing_and_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_inside, "missing", lambda: ["RequestResponseCycle.flow"])
    with pytest.raises(InvalidRequestError) as raised:
        uvicorn_inside.check()
    assert "RequestResponseCycle.flow" in raised.value.message
    assert f"uvicorn {uvicorn.__version__}" in raised.value.message
    assert "pip install 'uvicorn~=0.54.0'" in raised.value.message
