"""The chart, rendered by a real Helm."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.commands import run
from tests.deploy.tools import ROOT

CHART = ROOT / "deploy" / "helm" / "inlay"
RELEASE = "inlay"
"""The name that makes Kubernetes set INLAY_ variables for the release's Services."""
NAMESPACE = "models"

VALUES = sorted(
    [
        *(ROOT / "tests" / "deploy" / "values").glob("*.yaml"),
        *(ROOT / "deploy" / "recipes").glob("*.yaml"),
    ]
)

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod that a rendered object makes.

    Attributes:
        owner: kind and name of that object.
        template: labels and spec.
        config: text of the config file that is mounted for inlay, if any.
    """

    owner: str
    template: Object = field(hash=False)
    config: str | None

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        """Its spec."""
        return dict(self.template["spec"])

    @property
    def container(self) -> Object:
        """Its own container, which comes before those that users add."""
        return dict(self.spec["containers"][0])


class _Strict(yaml.SafeLoader):
    """As Kubernetes reads it: a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"{node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


@cache
def render(helm: str, values: Path) -> tuple[Object, ...]:
    """The objects of a release; all tests share them."""
    arguments = ("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", values)
    text = run(helm, *arguments)
    return tuple(document for document in yaml.load_all(text, _Strict) if document)


def named(objects: tuple[Object, ...], kind: str) -> dict[str, Object]:
    """Objects of a kind by name."""
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def pods(objects: tuple[Object, ...]) -> Iterator[Pod]:
    """The pods that the objects make."""
    configs = named(objects, "ConfigMap")
    for found in objects:
        spec = found.get("spec", {})
        match found["kind"]:
            case "Deployment" | "StatefulSet":
                template = spec["template"]
            case "LeaderWorkerSet":
                template = spec["leaderWorkerTemplate"]["workerTemplate"]
            case "Pod":
                template = found
            case _:
                continue
        mounted = [
            configs[volume["configMap"]["name"]]["data"].get("inlay.yaml")
            for volume in template["spec"].get("volumes", [])
            if "configMap" in volume
        ]
        owner = f"{found['kind']} {found['metadata']['name']}"
        yield Pod(owner, template, next(iter(mounted), None))


def without_made_secrets(objects: tuple[Object, ...]) -> str:
    """The objects as text, apart from the passwords that each rendering makes anew."""
    kept = [
        {**found, "data": sorted(found["data"])} if found["kind"] == "Secret" else found
        for found in objects
    ]
    return json.dumps(sorted(kept, key=lambda found: hashlib.sha256(_name(found)).digest()))


def _name(found: Object) -> bytes:
    return f"{found['kind']} {found['metadata']['name']}".encode()
