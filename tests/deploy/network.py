"""Whether the chart's network policies let one pod reach another."""

from typing import Literal

from tests.deploy.chart import Object, Pod

Way = Literal["ingress", "egress"]


def passes(policies: list[Object], source: Pod, target: Pod, port: int) -> bool:
    """Return True if the policies let `source` connect to that TCP port of `target`.

    Raises:
        AssertionError: no policy chooses one of them, so that it is open to all.
    """
    return _allowed(policies, source, target, target, port, "egress") and _allowed(
        policies, target, source, target, port, "ingress"
    )


def leaves(policies: list[Object], source: Pod, port: int) -> bool:
    """Return True if the policies let `source` connect to that TCP port of any machine."""
    return any(
        "to" not in rule and any(_on(found, port, source) for found in rule.get("ports", []))
        for policy in policies
        if _chosen(policy["spec"]["podSelector"], source)
        for rule in policy["spec"]["egress"]
    )


def _allowed(
    policies: list[Object], subject: Pod, other: Pod, target: Pod, port: int, way: Way
) -> bool:
    specs = [policy["spec"] for policy in policies]
    ours = [spec for spec in specs if _chosen(spec["podSelector"], subject)]
    assert ours, subject.owner
    peers = "from" if way == "ingress" else "to"
    return any(
        (peers not in rule or any(_chosen(peer["podSelector"], other) for peer in rule[peers]))
        and ("ports" not in rule or any(_on(found, port, target) for found in rule["ports"]))
        for spec in ours
        for rule in spec[way]
    )


def _on(found: Object, port: int, target: Pod) -> bool:
    if found.get("protocol", "TCP") != "TCP":
        return False
    first = found["port"]
    if isinstance(first, str):
        names = {one["name"]: one["containerPort"] for one in target.container.get("ports", [])}
        first = names.get(first, -1)
    last: int = found.get("endPort") or first
    return int(first) <= port <= last


def _chosen(selector: Object, pod: Pod) -> bool:
    expressions = selector.get("matchExpressions", [])
    return selector.get("matchLabels", {}).items() <= pod.labels.items() and all(
        pod.labels.get(one["key"]) in one["values"] for one in expressions
    )
