"""Files and models of the images benchmark, and the contenders that turn files into tower inputs.

A file of its own, so that a peer's Python runs it without inlay: `_images.py NAME DIRECTORY FILES
ROUNDS` prints the CPU milliseconds of each round as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path


def transformers(directory: Path) -> Callable[[bytes], object]:
    """Pillow and transformers' own image processor."""
    from PIL import Image
    from transformers import AutoImageProcessor

    process = AutoImageProcessor.from_pretrained(directory, backend="pil", local_files_only=True)

    def run(data: bytes) -> object:
        return process([Image.open(BytesIO(data)).convert("RGB")], return_tensors="pt")

    return run


def vllm(directory: Path) -> Callable[[bytes], object]:
    """vLLM's decoding and its multimodal processor, without its cache."""
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.media import ImageMediaIO

    config = ModelConfig(
        model=str(directory), max_model_len=8192, dtype="float32", mm_processor_cache_gb=0
    )
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    reader = ImageMediaIO()
    prompt = processor.info.get_tokenizer().encode(
        processor.dummy_inputs.get_dummy_text({"image": 1}), add_special_tokens=False
    )

    def run(data: bytes) -> object:
        image = reader.load_bytes(data)
        items = processor.info.parse_mm_data({"image": [image]})
        return processor(prompt, mm_items=items, hf_processor_mm_kwargs={})

    return run


def milliseconds(run: Callable[[bytes], object], files: list[bytes]) -> float:
    """CPU milliseconds of one image."""
    began = time.process_time()
    for data in files:
        run(data)
    return (time.process_time() - began) * 1000 / len(files)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    name, directory, files, rounds = sys.argv[1:]
    contender = {"transformers": transformers, "vllm": vllm}[name](Path(directory))
    read = [path.read_bytes() for path in sorted(Path(files).iterdir())]
    contender(read[0])
    for _ in range(int(rounds)):
        print(json.dumps(milliseconds(contender, read)), flush=True)
        sys.stdin.readline()
