"""Shapes of the custom resources that the chart makes, for strict checks without a cluster.

They hold the fields that the chart uses, as the projects' own definitions name them, and refuse all
others: a misspelt field of a custom resource is dropped by some servers without a word.
"""

from typing import Any

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
LABELS: dict[str, Any] = {"type": "object", "additionalProperties": STRING}
SELECTOR: dict[str, Any] = {
    "type": "object",
    "required": ["matchLabels"],
    "properties": {"matchLabels": LABELS},
    "additionalProperties": False,
}


def fields(required: str = "", /, **properties: dict[str, Any]) -> dict[str, Any]:
    """An object of these properties and no others; `required` names are separated by spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(items: dict[str, Any]) -> dict[str, Any]:
    """A list of at least one."""
    return {"type": "array", "items": items, "minItems": 1}


_RELABELING = fields(
    sourceLabels=listed(STRING),
    separator=STRING,
    targetLabel=STRING,
    regex=STRING,
    modulus=INTEGER,
    replacement=STRING,
    action=STRING,
)
_ENDPOINT = fields(
    "port",
    port=STRING,
    path=STRING,
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    scheme={"enum": ["http", "https"]},
    tlsConfig=fields(insecureSkipVerify={"type": "boolean"}),
    authorization=fields("credentials", credentials=fields("name key", name=STRING, key=STRING)),
    relabelings=listed(_RELABELING),
    metricRelabelings=listed(_RELABELING),
)
_RULE: dict[str, Any] = {
    **fields(
        "expr",
        alert=STRING,
        record=STRING,
        expr=STRING,
        labels=LABELS,
        annotations=LABELS,
        **{"for": STRING},
    ),
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
}
_TRIGGER = fields(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=fields(
        "serverAddress query threshold",
        serverAddress={"type": "string", "pattern": "^https?://"},
        query=STRING,
        # KEDA's metadata are strings, numbers and switches too.
        threshold=STRING,
        ignoreNullValues={"enum": ["true", "false"]},
    ),
    authenticationRef=fields("name", name=STRING, kind=STRING),
)

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): fields(
        "selector endpoints", selector=SELECTOR, endpoints=listed(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): fields(
        "selector podMetricsEndpoints", selector=SELECTOR, podMetricsEndpoints=listed(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(
        "groups",
        groups=listed(fields("name rules", name=STRING, interval=STRING, rules=listed(_RULE))),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        "scaleTargetRef triggers",
        scaleTargetRef=fields("name", apiVersion=STRING, kind=STRING, name=STRING),
        minReplicaCount=INTEGER,
        maxReplicaCount=INTEGER,
        idleReplicaCount=INTEGER,
        cooldownPeriod=INTEGER,
        pollingInterval=INTEGER,
        fallback=fields(
            "failureThreshold replicas",
            failureThreshold=INTEGER,
            replicas=INTEGER,
            behavior=STRING,
        ),
        advanced=fields(horizontalPodAutoscalerConfig={"type": "object"}),
        triggers=listed(_TRIGGER),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): fields(
        "parentRefs rules",
        parentRefs=listed({"type": "object", "required": ["name"]}),
        hostnames=listed(STRING),
        rules=listed(
            fields(
                "matches backendRefs",
                matches=listed(
                    fields(path=fields("type value", type={"const": "PathPrefix"}, value=STRING))
                ),
                timeouts=fields(request=STRING, backendRequest=STRING),
                backendRefs=listed(fields("name port", name=STRING, port=INTEGER)),
            )
        ),
    ),
    ("cert-manager.io/v1", "Certificate"): fields(
        "secretName issuerRef dnsNames",
        secretName=STRING,
        issuerRef={"type": "object", "required": ["name"]},
        dnsNames=listed(STRING),
        privateKey=fields(rotationPolicy={"enum": ["Always", "Never"]}),
    ),
    # Its pods are checked as pods beside this.
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): fields(
        "leaderWorkerTemplate",
        replicas=INTEGER,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=fields(
            "size workerTemplate",
            size=INTEGER,
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            workerTemplate={"type": "object"},
        ),
    ),
}
"""(apiVersion, kind) to the schema of `spec`."""
