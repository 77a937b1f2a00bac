"""Engines of stages: images and speech."""

from collections.abc import Mapping

from inlay.base import extras
from inlay.engine.spec import ELSEWHERE, HERE, EngineSpec
from inlay_stages.options import StageOptions

_IMAGES = frozenset({"task image", *StageOptions.model_fields})

ENGINES: Mapping[str, EngineSpec] = {
    "diffusers": EngineSpec(
        task="image",
        generate="inlay_stages.engines.diffusers.engine:DiffusersEngine",
        environment="inlay.engine.torch.threads:engine_environment",
        library="diffusers",
        missing=f"diffusers {HERE} {extras.install('torch', 'diffusers')}",
        options=_IMAGES | {"enable_lora"},
    ),
    "vllm-omni": EngineSpec(
        task="image",
        generate="inlay_stages.engines.vllm_omni.engine:VllmOmniEngine",
        environment="inlay_stages.engines.vllm_omni.environment:environment",
        library="vllm_omni",
        title="vLLM-Omni",
        missing=f"vLLM-Omni {ELSEWHERE}",
        options=_IMAGES - {"part"} | {"engine_arguments"},
        hints={
            "part": "; it runs whole pipelines",
            "tensor_parallel_size": "; after -- it is vLLM-Omni's own",
        },
    ),
    "speech": EngineSpec(
        task="image",
        generate="inlay_stages.engines.speech.engine:SpeechEngine",
        environment="inlay.engine.torch.threads:engine_environment",
        library="torch",
        missing=f"torch {HERE} {extras.install('torch')}",
        options=frozenset({"task image", "part"}),
    ),
}
