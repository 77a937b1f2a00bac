"""Files that a request enters: a bound, so that its way does not grow unnoticed."""

import pytest
from benchmarks.request_path import own_files, traced

from tests.serving import free_port


@pytest.mark.parametrize(("name", "most", "often"), [("completions", 18, 6), ("chat", 28, 10)])
async def test_a_streamed_request_enters_few_files_on_its_way_to_the_router(
    name: str, most: int, often: int
) -> None:
    way_in, _ = await traced(name, free_port())
    files = own_files(way_in)
    assert "router/router.py" in files, files
    assert len(files) <= most, "\n".join(files)
    returned = {file: way_in[file] for file in files if way_in[file] > 2}
    assert len(returned) <= often, returned
