"""`inlay serve MODEL` without `--task`."""

import re

import httpx
from openai import OpenAI

from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.parts import running


def test_an_encoder_is_served_with_the_task_its_files_say_and_the_log_says_which() -> None:
    with running("serve", tiny_embedding("bert"), "--port", 0, until=" positions; makes ") as part:
        said = "".join(part.said)
        assert (
            "serving with --task embed: the model has modules.json of sentence-transformers" in said
        )
        assert "makes vectors of 48" in said
        url = re.findall(r" at (http://\S+)", said)[-1]
        with OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            (model,) = client.models.list().data
            found = client.embeddings.create(model=model.id, input="hello world")
            assert len(found.data[0].embedding) == 48


def test_a_classifier_is_served_as_one() -> None:
    with running(
        "serve", tiny_scoring("distilbert", 3), "--port", 0, until=" positions; makes "
    ) as part:
        said = "".join(part.said)
        assert (
            "serving with --task score: its architecture is DistilBertForSequenceClassification"
            in said
        )
        assert "makes 3 classes" in said
        url = re.findall(r" at (http://\S+)", said)[-1]
        answer = httpx.post(url + "/classify", json={"input": "hello"}, timeout=180)
        assert answer.json()["data"][0]["num_classes"] == 3
