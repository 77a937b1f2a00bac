"""Write the chart's values.schema.json: `make reference`.

Its shape is that of values.yaml: a key that is not there is refused, and a value has the type of
its default. The options under every `config` are those of inlay's settings classes, so that Helm
refuses a misspelt one before anything is installed. Here stands only what a default does not say.
"""

import json
import re
import typing
from pathlib import Path
from typing import Any

import yaml

from inlay.cli.commands import commands
from inlay.cli.options import Option

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "inlay"
SCHEMA = CHART / "values.schema.json"

_PORT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 65535}
_AT_LEAST_ONE: dict[str, Any] = {"type": "integer", "minimum": 1}
_NOT_NEGATIVE: dict[str, Any] = {"type": "number", "minimum": 0}
_SIZE: dict[str, Any] = {"type": "string", "pattern": "^[0-9]+([KMGT]i?)?$"}
_OBJECTS: dict[str, Any] = {"type": "array", "items": {"type": "object"}}
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string", "minLength": 1}}
_SEVERAL: dict[str, Any] = {"type": ["integer", "string"], "pattern": "^[0-9]+%$"}
_ENV: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name"],
        "properties": {
            # The chart's own and inlay's come from elsewhere: two of a name would hide one.
            "name": {"type": "string", "not": {"pattern": "^(INLAY_.*|POD_IP)$"}},
            "value": {"type": "string"},
            "valueFrom": {"type": "object"},
        },
        "additionalProperties": False,
    },
}

_BY_PATH: dict[str, dict[str, Any]] = {
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
    "runAsUser": _AT_LEAST_ONE,
    "fleet.name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,32}$"},
    "fleet.logFormat": {"enum": ["text", "json"]},
    "fleet.logLevel": {"enum": ["debug", "info", "warning", "error"]},
    "nats.replicas": {"enum": [1, 3, 5]},
    "nats.persistence.size": {"type": "string", "pattern": "^[0-9]+[MGT]i?$"},
    "nats.metrics.port": _PORT,
    "nats.maxPayload": {"type": "integer", "minimum": 65536, "maximum": 67108864},
    "nats.external.urls": {
        "type": "array",
        "items": {"type": "string", "pattern": "^(nats|tls|ws|wss)://[^@]+$"},
    },
    "nats.external.replicas": {"type": "integer", "minimum": 1, "maximum": 5},
    "transport.port": {"type": "integer", "minimum": 2, "maximum": 65535},
    "frontend.replicas": {"type": "integer", "minimum": 0},
    "frontend.drainTimeout": _NOT_NEGATIVE,
    "frontend.preStopSeconds": {"type": "integer", "minimum": 0},
    "frontend.readinessFailureSeconds": _AT_LEAST_ONE,
    "frontend.cacheSize": _SIZE,
    "frontend.autoscaling.kind": {"enum": ["hpa", "keda"]},
    "frontend.autoscaling.minReplicas": _AT_LEAST_ONE,
    "frontend.autoscaling.maxReplicas": _AT_LEAST_ONE,
    "frontend.autoscaling.cpuPercent": {"type": "integer", "minimum": 1, "maximum": 100},
    "frontend.service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "frontend.service.port": _PORT,
    "frontend.tls.certManager.dnsNames": _STRINGS,
    "routes.paths": {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "^/"}},
    "routes.hosts": _STRINGS,
    "routes.gateway.requestTimeout": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
    "pool.replicas": {"type": "integer", "minimum": 0},
    "pool.engineArguments": _STRINGS,
    "pool.model.path": {"type": "string"},
    "pool.model.gigabytes": {"type": "number", "exclusiveMinimum": 0},
    "pool.gpus.count": {"type": "integer", "minimum": 0},
    "pool.ranks": {"type": "integer", "minimum": 1, "maximum": 64},
    "pool.nodes": {"type": "integer", "minimum": 1, "maximum": 1024},
    "pool.drainTimeout": _NOT_NEGATIVE,
    "pool.startupSeconds": {"type": "integer", "minimum": 0},
    "pool.cacheSize": _SIZE,
    "pool.sharedMemory": {"type": "string", "pattern": "^([0-9]+([KMGT]i?)?)?$"},
    "pool.extraPorts": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "port"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z0-9-]{1,15}$"},
                "port": _PORT,
            },
            "additionalProperties": False,
        },
    },
    "pool.adapters": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "path"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "path": {"type": "string", "minLength": 1},
                "sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            },
            "additionalProperties": False,
        },
    },
    "pool.adapterSources": _STRINGS,
    "pool.weight": {"type": ["number", "null"], "minimum": 0, "maximum": 1e6},
    "pool.minWorkers": {"type": "integer", "minimum": 0},
    "pool.autoscaling.pollingSeconds": _AT_LEAST_ONE,
    "pool.autoscaling.firstTokenSeconds": _NOT_NEGATIVE,
    "pool.autoscaling.betweenTokensSeconds": _NOT_NEGATIVE,
    "pool.autoscaling.placesFree": {"type": "number", "minimum": 0, "maximum": 0.95},
    "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    "pool.autoscaling.kind": {"enum": ["hpa", "keda"]},
    "pool.autoscaling.minReplicas": {"type": "integer", "minimum": 0},
    "pool.autoscaling.maxReplicas": _AT_LEAST_ONE,
    "pool.autoscaling.waiting": _AT_LEAST_ONE,
    "pool.autoscaling.cooldownSeconds": {"type": "integer", "minimum": 0},
}
"""Path of a value, `pool` for each worker pool; what it may be beyond its default's type."""

_BY_NAME: dict[str, dict[str, Any]] = {
    "env": _ENV,
    "maxUnavailable": _SEVERAL,
    "maxSkew": _AT_LEAST_ONE,
    "revisionHistoryLimit": {"type": "integer", "minimum": 0},
    "interval": {"type": "string", "pattern": "^[0-9]+(s|m)$"},
}
"""The same for a key of that name anywhere."""

_MADE_BY_THE_CHART = {
    "frontend": {"host", "port", "ssl-certfile", "ssl-keyfile", "api-key-file", "transport-port"},
    "worker": {"model", "transport-port", "transport-bind", "transport-dial", "engine-arguments"}
    | {"health-port", "weight", "min-workers", "adapters-file"},
    "both": {
        "namespace",
        "nats",
        "nats-wait",
        "secret-file",
        "transport-host",
        "log-format",
        "log-level",
    }
    | {"nats-replicas", "nats-creds", "nats-nkey-seed", "drain-timeout", "otlp-traces-endpoint"}
    | {"nats-user", "nats-password-file"}
    | {"nats-tls-ca", "nats-tls-cert", "nats-tls-key", "data-parallel-size", "data-parallel-rank"},
}
"""Options that have a value of the chart's own, which computes other things from them too."""


def chart_schema() -> str:
    """The file's text."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    defaults = values.pop("workerDefaults")
    root = _schema(values, "")
    pool = _schema(defaults, "pool")
    named = {"name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?$"}}
    root["properties"]["workerDefaults"] = pool
    root["properties"]["workers"] = {
        "type": "array",
        "items": {**pool, "required": ["name"], "properties": {**named, **pool["properties"]}},
    }
    # Set by Helm where a chart is a part of another.
    root["properties"]["global"] = {"type": "object"}
    root["properties"]["frontend"]["properties"]["config"] = _config("frontend")
    pool["properties"]["config"] = _config("worker")
    root["properties"]["workers"]["items"]["properties"]["config"] = pool["properties"]["config"]
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "inlay", **root}
    return json.dumps(whole, indent=1) + "\n"


def _schema(value: Any, path: str) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    for known in (_BY_PATH.get(re.sub(r"^pool\.image\.", "image.", path)), _BY_NAME.get(name)):
        if known is not None:
            return known
    if isinstance(value, dict):
        if not value or name in ("resources", "labels"):
            return {"type": "object"}
        inner = {key: _schema(below, f"{path}.{key}".lstrip(".")) for key, below in value.items()}
        return {"type": "object", "properties": inner, "additionalProperties": False}
    if isinstance(value, list):
        return _OBJECTS
    if isinstance(value, bool):
        return {"type": "boolean"}
    return {"type": "integer" if isinstance(value, int) else "string"}


def _config(name: str) -> dict[str, Any]:
    """The options of `inlay NAME` that may stand under `config`."""
    command = next(command for command in commands() if command.name == name)
    made = _MADE_BY_THE_CHART[name] | _MADE_BY_THE_CHART["both"]
    options = {
        option.key: _option(option)
        for option in command.options.by_name.values()
        if not option.secret and option.key not in made
    }
    return {"type": "object", "properties": options, "additionalProperties": False}


def _option(option: Option) -> dict[str, Any]:
    if option.kind == "switch":
        return {"type": "boolean"}
    element = option.element
    if typing.get_origin(element) is typing.Literal:
        one: dict[str, Any] = {"enum": list(typing.get_args(element))}
    elif option.takes_integers:
        one = {"type": ["integer", "string"], "pattern": "^([0-9]+[kKmMgGtT]?|auto)$"}
    elif element is float:
        one = {"type": "number"}
    elif element is int:
        one = {"type": "integer"}
    else:
        one = {"type": "string"}
    return {"type": "array", "items": one} if option.kind == "list" else one


def main() -> None:
    """Write the file."""
    SCHEMA.write_text(chart_schema(), encoding="utf-8")


if __name__ == "__main__":
    main()
