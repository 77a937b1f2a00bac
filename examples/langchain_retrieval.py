"""Retrieval with LangChain: its vector store and chat over two models that inlay serves.

    inlay serve sentence-transformers/all-MiniLM-L6-v2 --served-model-name minilm --port 8001
    inlay demo
    pip install langchain-openai
    python examples/langchain_retrieval.py

The sentences of the demo's notes go into a vector store; for each question the nearest two stand
before it. With a model of your own give `--base-url` and `--name`.
"""

import argparse
import re

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from inlay import demo


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--embedding-url", default="http://127.0.0.1:8001/v1")
    parser.add_argument("--embedding-model", default="minilm")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--name", default="inlay-demo", help="served name of the answering model")
    given = parser.parse_args()

    embeddings = OpenAIEmbeddings(
        base_url=given.embedding_url,
        model=given.embedding_model,
        api_key="unused",
        # Else it sends ids of OpenAI's own vocabulary, which mean other words here.
        check_embedding_ctx_length=False,
    )
    chat = ChatOpenAI(base_url=given.base_url, model=given.name, api_key="unused", temperature=0)
    notes = demo.examples().mixed
    store = InMemoryVectorStore(embeddings)
    sentences = [each.strip() for note in notes for each in re.findall(r"[^.]+\.", note.document)]
    store.add_texts(sentences, [{"place": place} for place in range(len(sentences))])
    retriever = store.as_retriever(search_kwargs={"k": 2})
    right = 0
    for note in notes:
        question = note.after.strip()
        nearest = sorted(retriever.invoke(question), key=lambda found: found.metadata["place"])
        found = " ".join(document.page_content for document in nearest)
        said = chat.invoke(f"{note.before}{found}{note.after}").content
        right += said == note.answer
        print(f"{question}  <- {found}  -> {said}")
    print(f"{right} of {len(notes)} right")


if __name__ == "__main__":
    main()
