"""What a text chat enters of the code, by the trace of `python -m benchmarks.house`."""

import pytest
from benchmarks._house_trace import files, traced_chat


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_text_chat_enters_few_files_and_none_of_media_or_extensions() -> None:
    found = traced_chat()
    frontend, worker = files(found.frontend), files(found.worker)
    assert len(frontend) <= 45, sorted(frontend)
    assert len(worker) <= 40, sorted(worker)
    assert len([file for file in frontend if "/router/" in file]) <= 7, sorted(frontend)
    alien = ("/media/", "/image", "/audio", "/pictures", "/sounds", "inlay_")
    assert not [file for file in {*frontend, *worker} if any(part in file for part in alien)]
