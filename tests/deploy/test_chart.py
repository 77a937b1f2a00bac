"""The chart, rendered over a matrix of values by two Helms and checked without a cluster."""

import base64
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inlay.api.app import routes
from inlay.cli.command import Command
from inlay.cli.commands import commands, known_variables
from inlay.cli.reading import parse, read
from inlay.cli.settings import FleetFrontendSettings, WorkerSettings
from inlay.http.callers.auth import is_admin
from inlay.http.callers.keys import read_keys
from inlay.http.settings import FrontendSettings
from inlay.worker.lora_modules import read_modules
from tests.commands import run
from tests.deploy.chart import (
    CHART,
    NAMESPACE,
    VALUES,
    Object,
    Pod,
    named,
    pods,
    render,
    without_made_secrets,
)
from tests.deploy.network import leaves, passes
from tests.deploy.tools import ROOT, TOOLS, helms, tool

pytestmark = pytest.mark.deploy

KUBERNETES = ("1.31", "1.37")
CHECK = ROOT / "tests" / "deploy" / "check_objects.py"

Objects = tuple[Object, ...]


@pytest.fixture(scope="module", params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest) -> str:
    found = helms()
    if request.param not in found:
        pytest.skip(f"{request.param} is not there: make test-deploy fetches it")
    return found[request.param]


@pytest.fixture(scope="module")
def any_helm() -> str:
    found = helms()
    if not found:
        pytest.skip("no Helm is there: make test-deploy fetches it")
    return next(iter(found.values()))


@pytest.fixture(params=VALUES, ids=lambda path: path.stem)
def objects(request: pytest.FixtureRequest, any_helm: str) -> Objects:
    return render(any_helm, request.param)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_finds_nothing_wrong(helm: str, values: Path) -> None:
    assert "[ERROR]" not in run(helm, "lint", "--strict", CHART, "--values", values)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_both_helms_render_the_same(values: Path) -> None:
    found = helms()
    if len(found) < 2:
        pytest.skip("two Helms are needed: make test-deploy fetches them")
    texts = {without_made_secrets(render(helm, values)) for helm in found.values()}
    assert len(texts) == 1


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object_strictly(
    objects: Objects, version: str, tmp_path: Path
) -> None:
    if not (TOOLS / "schemas").exists():
        pytest.skip("Kubernetes' schemas are not there: make test-deploy fetches them")
    file = tmp_path / "objects.json"
    file.write_text(json.dumps(objects))
    path = os.pathsep.join((str(TOOLS / "schemas"), str(ROOT)))
    said = run("env", f"PYTHONPATH={path}", sys.executable, CHECK, file, version)
    assert said == f"{len(objects)} objects\n"


def test_every_pod_is_without_rights(objects: Objects) -> None:
    for pod in pods(objects):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True, pod.owner
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False
        # Else a release named inlay has variables INLAY_..., which inlay refuses.
        assert pod.spec["enableServiceLinks"] is False
        assert "hostNetwork" not in pod.spec
        inner = pod.container["securityContext"]
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["readOnlyRootFilesystem"] is True
        assert inner["capabilities"] == {"drop": ["ALL"]}


def test_inlay_itself_takes_every_setting(objects: Objects, tmp_path: Path) -> None:
    for pod in pods(objects):
        if pod.config is not None:
            settings = settings_of(pod, tmp_path)
            assert settings.fleet.nats_wait >= 60


@pytest.mark.parametrize("name", ["status", "doctor"])
def test_a_pods_own_variables_are_enough_to_look_at_its_fleet(
    objects: Objects, tmp_path: Path, name: str
) -> None:
    for pod in pods(objects):
        if pod.config is not None:
            looking = settings_of(pod, tmp_path, name)
            assert looking.fleet == settings_of(pod, tmp_path).fleet
            assert getattr(looking, "model", None) is None


def test_a_pod_is_given_longer_than_it_drains(objects: Objects, tmp_path: Path) -> None:
    for pod in pods(objects):
        if pod.config is None:
            continue
        settings, grace = settings_of(pod, tmp_path), pod.spec["terminationGracePeriodSeconds"]
        if isinstance(settings, FleetFrontendSettings):
            sleep = int(pod.container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert grace == math.ceil(settings.frontend.drain_timeout) + sleep + 15
        else:
            assert grace == math.ceil(settings.drain_timeout) + 15


def test_the_start_is_given_time_by_the_size_of_the_model(any_helm: str) -> None:
    objects = render(any_helm, CHART.parents[1] / "recipes" / "deepseek-r1.yaml")
    (worker,) = [pod for pod in pods(objects) if "worker" in pod.owner]
    probe = worker.container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300 + 10 * 689


def test_every_probe_asks_a_port_that_is_there(objects: Objects) -> None:
    for pod in pods(objects):
        ports = [port["name"] for port in pod.container.get("ports", [])]
        assert len(set(ports)) == len(ports)
        assert all(len(port) <= 15 for port in ports)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = pod.container.get(kind)
            if probe is not None:
                asked = probe.get("tcpSocket") or probe["httpGet"]
                assert asked["port"] in ports, (pod.owner, kind)


def test_every_member_is_asked_whether_it_is_frozen(objects: Objects, tmp_path: Path) -> None:
    for pod in pods(objects):
        if pod.config is None:
            continue
        asked = pod.container["livenessProbe"]["httpGet"]
        assert asked["path"] == "/live"
        settings = settings_of(pod, tmp_path)
        if isinstance(settings, WorkerSettings):
            ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
            assert ports[asked["port"]] == settings.health_port


def test_what_is_mounted_is_there_and_what_is_there_is_mounted(objects: Objects) -> None:
    made = {
        kind: {name: found.get("data", {}) for name, found in named(objects, kind).items()}
        for kind in ("Secret", "ConfigMap")
    }
    for pod in pods(objects):
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        claims = {"data"} if pod.owner.endswith("-nats") else set()
        mounts = pod.container.get("volumeMounts", [])
        every = [*mounts, *(mount for first in pod.spec.get("initContainers", [])
                            for mount in first["volumeMounts"])]  # fmt: skip
        assert _names(every) == set(volumes) | (claims & _names(mounts))
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        for volume in volumes.values():
            secret = volume.get("secret")
            if secret and secret["secretName"] in made["Secret"]:
                data = made["Secret"][secret["secretName"]]
                assert {item["key"] for item in secret.get("items", [])} <= set(data)
            if "configMap" in volume:
                assert volume["configMap"]["name"] in made["ConfigMap"]


def test_selectors_choose_the_pods_they_mean(objects: Objects) -> None:
    labels = [pod.labels for pod in pods(objects)]
    for found in objects:
        spec = found.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if not selector or found["kind"] in ("ServiceMonitor",):
            continue
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= of.items() for of in labels), found["metadata"]["name"]


def test_the_network_lets_through_what_members_need_and_no_more(
    objects: Objects, tmp_path: Path
) -> None:
    policies = list(named(objects, "NetworkPolicy").values())
    if not policies:
        pytest.skip("these values turn policies off")
    members = [pod for pod in pods(objects) if pod.config is not None]
    own = [pod for pod in pods(objects) if pod.owner.startswith("StatefulSet")]
    frontends = [pod for pod in members if "frontend" in pod.owner]
    workers = [pod for pod in members if "frontend" not in pod.owner]
    for nats in own:
        assert all(passes(policies, member, nats, 4222) for member in members)
        assert not any(passes(policies, member, nats, 6222) for member in members)
    for worker in workers:
        settings = settings_of(worker, tmp_path)
        assert isinstance(settings, WorkerSettings)
        for frontend in frontends:
            if settings.transport_dial:
                port = settings_of(frontend, tmp_path).transport_port
                assert passes(policies, worker, frontend, port)
                continue
            ranks = 1 if settings.engine.devices.data_parallel_rank is not None else None
            count = ranks or settings.engine.devices.data_parallel_size
            for port in range(settings.transport_port, settings.transport_port + count):
                assert passes(policies, frontend, worker, port)
                assert all(passes(policies, other, worker, port) for other in workers)
            assert not passes(policies, frontend, worker, settings.transport_port - 1)
        for port in (8000, 22):
            assert not any(passes(policies, nats, worker, port) for nats in own)


def test_pods_of_other_engines_have_memory_to_share(objects: Objects) -> None:
    for pod in pods(objects):
        if pod.config is None or yaml.safe_load(pod.config).get("engine") != "vllm":
            continue
        (mount,) = [
            mount for mount in pod.container["volumeMounts"] if mount["mountPath"] == "/dev/shm"
        ]
        (volume,) = [one for one in pod.spec["volumes"] if one["name"] == mount["name"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert volume["emptyDir"]["sizeLimit"].endswith("Gi")


def test_traces_reach_their_collector_and_nothing_else_is_open(any_helm: str) -> None:
    objects = render(any_helm, ROOT / "tests" / "deploy" / "values" / "everything.yaml")
    policies = list(named(objects, "NetworkPolicy").values())
    members = [pod for pod in pods(objects) if pod.config is not None]
    for pod in members:
        assert "otlp-traces-endpoint: http://collector:4318/" in (pod.config or "")
        assert leaves(policies, pod, 4318)
        assert not leaves(policies, pod, 4317)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"frontend": {"config": {"router-polcy": "kv"}}}, "router-polcy"),
        ({"frontend": {"config": {"router-policy": "best"}}}, "router-policy"),
        ({"frontend": {"config": {"api-key": ["sk-1"]}}}, "api-key"),
        ({"frontend": {"replicas": "two"}}, "replicas"),
        ({"workers": [{"model": {"path": "m"}}]}, "name"),
        ({"workers": [{"name": "Upper", "model": {"path": "m"}}]}, "name"),
        ({"workers": [{"name": "a", "model": {"path": "m"}, "config": {"nats": ["x"]}}]}, "nats"),
        ({"workers": [{"name": "a", "model": {"pth": "m"}}]}, "pth"),
        ({"workers": [{"name": "a", "model": {}}]}, "model.path is needed"),
        ({"workers": [{"name": "a", "autoscaling": {"minReplicas": -1}}]}, "minReplicas"),
        (
            {
                "workers": [
                    {
                        "name": "a",
                        "model": {"path": "m"},
                        "autoscaling": {"enabled": True, "kind": "hpa", "minReplicas": 0},
                    }
                ]
            },
            "minReplicas 0 needs kind keda",
        ),
        ({"workers": [{"name": "a", "env": [{"name": "INLAY_PORT", "value": "1"}]}]}, "env"),
        (
            {
                "workers": [
                    {
                        "name": "a",
                        "model": {"path": "m/graph.yaml"},
                        "config": {"stage": "s"},
                        "autoscaling": {"enabled": True, "prometheus": "http://p"},
                    }
                ]
            },
            "modelName is needed",
        ),
        ({"nats": {"replicas": 2}}, "replicas"),
        ({"nats": {"external": {"urls": ["nats://user:word@host"]}}}, "urls"),
        ({"netwrkPolicy": {}}, "netwrkPolicy"),
        (
            {
                "workers": [
                    {"name": "a", "model": {"path": "m"}},
                    {"name": "a", "model": {"path": "other"}},
                ]
            },
            "two pools have the name a",
        ),
        (
            {"workers": [{"name": "a", "model": {"path": "m"}, "config": {"engine": "sglang"}}]},
            "there is no image for engine sglang",
        ),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_values_that_make_no_sense_are_refused(
    helm: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(AssertionError, match=re.escape(said)):
        run(helm, "template", "inlay", CHART, "--values", file)


def rendered(helm: str, directory: Path, **values: Any) -> Objects:
    """The objects of a release with these values."""
    directory.mkdir(exist_ok=True)
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return render(helm, file)


def one(objects: Objects, owner: str) -> Pod:
    """The pod that this object makes."""
    (found,) = [pod for pod in pods(objects) if pod.owner == owner]
    return found


VOLUME = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}


def test_a_volume_of_all_pools_is_mounted_into_workers_and_frontends(
    any_helm: str, tmp_path: Path
) -> None:
    nfs = {"nfs": {"server": "files", "path": "/models"}}
    pools = [
        {"name": "a", "model": {"path": "m"}},
        {"name": "b", "model": {"path": "other", "volume": nfs}},
    ]
    objects = rendered(
        any_helm, tmp_path, workerDefaults={"model": {"volume": VOLUME}}, workers=pools
    )
    for name, source in (("a", VOLUME), ("b", nfs)):
        for owner, volume in (
            ("Deployment inlay-frontend", f"model-{name}"),
            (f"Deployment inlay-worker-{name}", "model"),
        ):
            pod = one(objects, owner)
            assert {"name": volume, **source} in pod.spec["volumes"]
            mount = {"name": volume, "mountPath": f"/models/{name}", "readOnly": True}
            assert mount in pod.container["volumeMounts"]
    # Nothing is fetched from the hub.
    policy = named(objects, "NetworkPolicy")["inlay-frontend"]
    assert not leaves([policy], one(objects, "Deployment inlay-frontend"), 443)


def test_a_pool_without_an_image_gets_one_with_its_engine(any_helm: str, tmp_path: Path) -> None:
    pools = [
        {"name": "cpu", "model": {"path": "m"}},
        {"name": "gpu", "model": {"path": "m"}, "gpus": {"count": 1}},
        {"name": "vllm", "model": {"path": "m"}, "config": {"engine": "vllm"}},
        {"name": "own", "model": {"path": "m"}, "image": {"repository": "mine", "tag": "1"}},
    ]
    digest = "sha256:" + "0" * 64
    image = {"repository": "registry.example/inlay", "tag": "2", "digest": digest}
    objects = rendered(any_helm, tmp_path, image=image, workers=pools)
    found = {
        name: one(objects, f"Deployment inlay-worker-{name}").container["image"]
        for name in ("cpu", "gpu", "vllm", "own")
    }
    assert found == {
        "cpu": "registry.example/inlay-worker:2",
        "gpu": "registry.example/inlay-cuda:2",
        "vllm": "registry.example/inlay-vllm:2",
        "own": "mine:1",
    }
    assert one(objects, "Deployment inlay-frontend").container["image"].endswith(digest)


EXTRAS = ROOT / "tests" / "deploy" / "values" / "extras.yaml"


def test_what_users_add_to_pods_is_there(any_helm: str) -> None:
    objects = render(any_helm, EXTRAS)
    for owner in ("Deployment inlay-frontend", "Deployment inlay-worker-old"):
        pod, spec = one(objects, owner), one(objects, owner).spec
        # Beside those of all pods, whose place they take.
        assert (pod.labels["tier"], pod.labels["team"]) == ("gold", "models")
        annotations = pod.template["metadata"]["annotations"]
        assert annotations["sidecar.example/inject"] == "false"
        assert annotations["owner"] == "models"
        assert [found["name"] for found in spec["initContainers"]] == ["fetch"]
        assert [found["name"] for found in spec["containers"][1:]] == ["proxy"]
        assert pod.container["envFrom"] == [{"configMapRef": {"name": "proxies"}}]
        assert (spec["schedulerName"], spec["dnsPolicy"]) == ("gangs", "None")
        assert spec["dnsConfig"] == {"nameservers": ["10.0.0.10"]}
        deployment = named(objects, "Deployment")[owner.split()[1]]["spec"]
        assert deployment["strategy"] == {"type": "Recreate"}
        assert deployment["revisionHistoryLimit"] == 2
    old = one(objects, "Deployment inlay-worker-old")
    assert old.spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert old.container["resources"]["claims"] == [{"name": "gpu"}]
    accounts = named(objects, "ServiceAccount")
    for owner, name, role in (
        ("Deployment inlay-frontend", "inlay", "inlay"),
        ("Deployment inlay-worker-old", "inlay-worker-old", "models"),
    ):
        assert one(objects, owner).spec["serviceAccountName"] == name
        assert accounts[name]["metadata"]["annotations"] == {"iam.example/role": role}
    new = one(objects, "Deployment inlay-worker-new")
    assert new.spec["serviceAccountName"] == "there-already"
    assert "there-already" not in accounts
    assert {"more", "inlay-text"} <= set(named(objects, "ConfigMap"))
    (monitor,) = named(objects, "ServiceMonitor").values()
    assert monitor["spec"]["endpoints"][0]["relabelings"][0]["targetLabel"] == "node"
    assert monitor["spec"]["endpoints"][0]["metricRelabelings"][0]["action"] == "keep"
    (rules,) = named(objects, "PrometheusRule").values()
    (_, alerting) = rules["spec"]["groups"]
    for rule in alerting["rules"]:
        url = rule["annotations"]["runbook_url"]
        assert url == f"https://docs.example/runbooks#{rule['alert'].lower()}"


def test_all_pods_may_have_an_account_that_is_there_already(any_helm: str, tmp_path: Path) -> None:
    pool = {"name": "a", "model": {"path": "m"}}
    objects = rendered(any_helm, tmp_path, serviceAccount={"name": "mine"}, workers=[pool])
    assert named(objects, "ServiceAccount") == {}
    found = {pod.spec["serviceAccountName"] for pod in pods(objects)}
    assert found == {"mine"}


def test_a_pool_says_its_share_of_a_change_of_the_model(any_helm: str, tmp_path: Path) -> None:
    objects = render(any_helm, EXTRAS)
    found = {
        name: settings_of(one(objects, f"Deployment inlay-worker-{name}"), tmp_path)
        for name in ("old", "new")
    }
    assert (found["old"].weight, found["old"].min_workers) == (None, None)
    assert (found["new"].weight, found["new"].min_workers) == (0.05, 2)


def test_adapters_are_a_file_that_changes_without_a_restart(any_helm: str, tmp_path: Path) -> None:
    pool = {"name": "a", "model": {"path": "m", "volume": VOLUME}}
    adapters = [{"name": "one", "path": "/models/a/one"}, {"name": "two", "path": "s3://b/two"}]
    sources = ["file:///models/", "s3://b/"]
    found = []
    for number in (1, 2):
        more = {"adapters": adapters[:number], "adapterSources": sources}
        objects = rendered(any_helm, tmp_path / str(number), workers=[{**pool, **more}])
        pod = one(objects, "Deployment inlay-worker-a")
        settings = settings_of(pod, tmp_path)
        assert settings.engine.adapters.enable_lora
        assert settings.engine.adapters.allowed_lora_sources == sources
        data = named(objects, "ConfigMap")["inlay-worker-a"]["data"]
        path = Path(settings.adapters_file)
        mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}
        # A directory: Kubernetes never changes a single mounted file.
        assert "subPath" not in mounts[str(path.parent)]
        file = tmp_path / path.name
        file.write_text(data[path.name])
        assert [order.name for order in read_modules(file)] == ["one", "two"][:number]
        found.append(pod.template)
        assert leaves(list(named(objects, "NetworkPolicy").values()), pod, 443)
    assert found[0] == found[1]


def test_requests_wait_for_a_pool_that_may_be_empty(any_helm: str, tmp_path: Path) -> None:
    scaled = {"enabled": True, "prometheus": "http://p", "minReplicas": 0}
    pool = {"name": "a", "model": {"path": "m", "gigabytes": 20}, "autoscaling": scaled}
    objects = rendered(any_helm, tmp_path, workers=[pool])
    (found,) = named(objects, "ScaledObject").values()
    assert found["spec"]["minReplicaCount"] == 0
    settings = settings_of(one(objects, "Deployment inlay-frontend"), tmp_path)
    assert settings.router.router_absent_wait == 300 + 10 * 20


def test_every_query_of_scaling_is_promql(any_helm: str, tmp_path: Path) -> None:
    objects = render(any_helm, EXTRAS)
    (scaled,) = named(objects, "ScaledObject").values()
    triggers = scaled["spec"]["triggers"]
    assert len(triggers) == 4
    assert (scaled["spec"]["pollingInterval"], scaled["spec"]["cooldownPeriod"]) == (30, 600)
    assert scaled["spec"]["fallback"] == {"failureThreshold": 3, "replicas": 4}
    for trigger in triggers:
        assert trigger["authenticationRef"] == {"name": "prometheus"}
    rules = [
        {"record": f"query:{number}", "expr": trigger["metadata"]["query"]}
        for number, trigger in enumerate(triggers)
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", file)
    # Two workers, first tokens all within 4 to 8 s where 2 are the target: some four for each.
    series = 'namespace="models", model_name="chat"'
    case = {
        "interval": "30s",
        "input_series": [
            {"series": f'inlay:worker_well{{{series}, engine="a"}}', "values": "1x20"},
            {"series": f'inlay:worker_well{{{series}, engine="b"}}', "values": "1x20"},
            {
                "series": f'vllm:time_to_first_token_seconds_bucket{{{series}, le="4"}}',
                "values": "0x20",
            },
            {
                "series": f'vllm:time_to_first_token_seconds_bucket{{{series}, le="8"}}',
                "values": "0+10x20",
            },
            {
                "series": f'vllm:time_to_first_token_seconds_bucket{{{series}, le="+Inf"}}',
                "values": "0+10x20",
            },
            # 24 of 32 places are taken, and each of two frontends shows both workers: 24 of 24 with
            # a quarter free; with 12 that wait half as many more are needed.
            *(
                {"series": f'{name}{{{series}, engine="{engine}", pod="{pod}"}}', "values": values}
                for engine in "ab"
                for pod in ("f1", "f2")
                for name, values in (
                    ("inlay:worker_places", "16x20"),
                    ("vllm:num_requests_running", "12x20"),
                    ("vllm:num_requests_waiting", "0x20"),
                )
            ),
            *(
                {
                    "series": f'inlay:router_requests_waiting{{{series}, pod="{pod}"}}',
                    "values": "0x9 6x11",
                }
                for pod in ("f1", "f2")
            ),
        ],
        "promql_expr_test": [
            *(
                {
                    "expr": triggers[3]["metadata"]["query"],
                    "eval_time": time,
                    "exp_samples": [{"labels": "{}", "value": times}],
                }
                for time, times in (("4m", 1), ("8m", 1.5))
            ),
            {
                "expr": triggers[1]["metadata"]["query"],
                "eval_time": "5m",
                "exp_samples": [{"labels": "{}", "value": 0}],
            },
            {
                "expr": triggers[2]["metadata"]["query"],
                "eval_time": "5m",
                "exp_samples": [{"labels": "{}", "value": 7.8 / 2}],
            },
        ],
    }
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        yaml.safe_dump({"rule_files": [], "evaluation_interval": "30s", "tests": [case]})
    )
    run(tool("promtool"), "test", "rules", tests)


@pytest.mark.parametrize(
    ("sizes", "pods", "others"),
    [({}, 2, 0), ({"ranks": 2}, 1, 0), ({"nodes": 2}, 1, 0), ({}, 2, 1), ({"ranks": 2}, 2, 3)],
)
def test_each_query_asks_for_pods_of_its_own_pool(
    any_helm: str, tmp_path: Path, sizes: dict[str, int], pods: int, others: int
) -> None:
    """Pods are wanted as KEDA and Kubernetes reckon them, of a pool beside pods of another.

    Every engine has 12 of 16 places taken, and first tokens take 3.9 s.
    """
    ranks = max(sizes.values(), default=1)
    engines = range(ranks * (pods + others))
    targets = {"waiting": 4, "running": 8 * ranks, "firstTokenSeconds": 3.9, "placesFree": 0.25}
    scaled = {"enabled": True, "prometheus": "http://p", "modelName": "chat", **targets}
    pool = {"name": "a", "model": {"path": "m", "volume": VOLUME}, "autoscaling": scaled, **sizes}
    (found,) = named(rendered(any_helm, tmp_path, workers=[pool]), "ScaledObject").values()
    waiting, *rest = found["spec"]["triggers"]
    assert waiting.get("metricType", "AverageValue") == "AverageValue"

    series = f'namespace="{NAMESPACE}", model_name="chat"'
    buckets = f"vllm:time_to_first_token_seconds_bucket{{{series}"
    case = {
        "interval": "30s",
        "input_series": [
            {"series": f'{buckets}, le="2"}}', "values": "0x20"},
            {"series": f'{buckets}, le="4"}}', "values": "0+10x20"},
            {"series": f'{buckets}, le="+Inf"}}', "values": "0+10x20"},
            {"series": f"inlay:router_requests_waiting{{{series}}}", "values": "0x20"},
            *(
                {"series": f'{name}{{{series}, engine="{engine}"}}', "values": f"{value}x20"}
                for engine in engines
                for name, value in (
                    ("inlay:worker_well", 1),
                    ("inlay:worker_places", 16),
                    ("vllm:num_requests_running", 12),
                    ("vllm:num_requests_waiting", 0),
                )
            ),
        ],
        "promql_expr_test": [
            {
                "expr": trigger["metadata"]["query"],
                "eval_time": "5m",
                "exp_samples": [{"labels": "{}", "value": _asked(trigger, pods, times)}],
            }
            for trigger, times in zip(rest, (1.5, 1, 1), strict=True)
        ],
    }
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        yaml.safe_dump({"rule_files": [], "evaluation_interval": "30s", "tests": [case]})
    )
    run(tool("promtool"), "test", "rules", tests)


def _asked(trigger: Object, pods: int, times: float) -> float:
    """The value of a query by which a pool of so many ready pods becomes so many times as large."""
    average = trigger.get("metricType", "AverageValue") == "AverageValue"
    return float(trigger["metadata"]["threshold"]) * times * (pods if average else 1)


def test_an_hpa_asks_for_what_rules_record(any_helm: str, tmp_path: Path) -> None:
    targets = {"firstTokenSeconds": 2, "betweenTokensSeconds": 0.05, "placesFree": 0.25}
    scaled = {"enabled": True, "kind": "hpa", **targets}
    pool = {"name": "a", "model": {"path": "m"}, "autoscaling": scaled}
    (found,) = named(
        rendered(any_helm, tmp_path, workers=[pool]), "HorizontalPodAutoscaler"
    ).values()
    asked = {
        each["external"]["metric"]["name"]: each["external"]["target"]
        for each in found["spec"]["metrics"]
    }
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text())["groups"]
    recorded = [rule["record"] for group in rules for rule in group["rules"] if "record" in rule]
    # Kubernetes knows no colons in names: an adapter takes each as one of `_`.
    names = {name.removeprefix("model:").replace(":", "_") for name in recorded}
    assert set(asked) - names == {"inlay_router_requests_waiting"}
    assert asked["inlay_first_token_seconds_p95"] == {"type": "Value", "value": "2000m"}
    assert asked["inlay_between_tokens_seconds_p95"] == {"type": "Value", "value": "50m"}
    assert asked["inlay_places_taken_ratio"] == {"type": "Value", "value": "750m"}


def test_every_container_asks_for_cpu_and_memory(objects: Objects) -> None:
    for pod in pods(objects):
        if "helm.sh/hook" in pod.template["metadata"].get("annotations", {}):
            continue
        for container in (*pod.spec.get("initContainers", []), pod.container):
            requests = container["resources"]["requests"]
            assert set(requests) >= {"cpu", "memory"}, (pod.owner, container["name"])


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("tls://nats-2", 4222),
        ("nats://nats-2:4333", 4333),
        ("tls://10.0.0.7", 4222),
        ("wss://nats.example", 443),
    ],
)
def test_the_way_to_nats_of_ones_own_is_open_and_no_other(
    any_helm: str, tmp_path: Path, url: str, port: int
) -> None:
    objects = rendered(
        any_helm,
        tmp_path,
        nats={"enabled": False, "external": {"urls": [url]}},
        workers=[{"name": "a", "model": {"path": "m", "volume": VOLUME}}],
    )
    policies = list(named(objects, "NetworkPolicy").values())
    for owner in ("Deployment inlay-frontend", "Deployment inlay-worker-a"):
        pod = one(objects, owner)
        opened = [at for at in (2, 7, 80, 443, 4222, 4333) if leaves(policies, pod, at)]
        assert opened == [port]


def test_the_pod_of_helm_test_reaches_frontends_though_clients_are_named(
    any_helm: str, tmp_path: Path
) -> None:
    clients = [{"podSelector": {"matchLabels": {"app": "proxy"}}}]
    objects = rendered(any_helm, tmp_path, networkPolicy={"clients": clients})
    (test,) = [pod for pod in pods(objects) if pod.owner == "Pod inlay-test"]
    frontend = one(objects, "Deployment inlay-frontend")
    policies = list(named(objects, "NetworkPolicy").values())
    # It has no policy of its own: all that it sends leaves.
    outside = {"podSelector": {"matchLabels": test.labels}, "egress": [{}]}
    policies.append({"spec": {**outside, "policyTypes": ["Egress"]}})
    assert passes(policies, test, frontend, 8000)


def test_paths_that_leave_the_cluster_are_those_of_clients(any_helm: str, tmp_path: Path) -> None:
    values = {
        "ingress": {"enabled": True},
        "gateway": {"enabled": True, "parentRefs": [{"name": "g"}]},
    }
    objects = rendered(any_helm, tmp_path, routes=values)
    (ingress,) = named(objects, "Ingress").values()
    shown = [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]]
    (route,) = named(objects, "HTTPRoute").values()
    matches = route["spec"]["rules"][0]["matches"]
    assert [match["path"]["value"] for match in matches] == shown
    settings = FrontendSettings()
    for operation, _ in routes():
        path = operation.path
        is_shown = any(path == prefix or path.startswith(prefix + "/") for prefix in shown)
        # Of `/` the prefix would be all paths.
        asks = not operation.open and not is_admin(operation, settings) and path != "/"
        assert is_shown == asks, path


def test_scaling_asks_for_the_name_that_the_engine_has(
    any_helm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = {"enabled": True, "prometheus": "http://p", "running": 2}
    cases = {
        "hub": {"path": "Qwen/Qwen3-0.6B"},
        "volume": {"path": "Qwen/Qwen3-0.6B", "volume": VOLUME},
        "called": {"path": "Qwen/Qwen3-0.6B"},
    }
    pools = [
        {"name": name, "model": model, "autoscaling": {**scaled, "kind": kind}}
        for kind in ("keda", "hpa")
        for name, model in ((f"{base}-{kind}", model) for base, model in cases.items())
    ]
    for pool in pools:
        if str(pool["name"]).startswith("called"):
            pool["config"] = {"served-model-name": ["chat", "little"]}
    objects = rendered(any_helm, tmp_path, workers=pools)
    for pool in pools:
        owner = f"inlay-worker-{pool['name']}"
        pod = one(objects, f"Deployment {owner}")
        # The directory that the volume has there.
        here = Pod(pod.owner, pod.template, (pod.config or "").replace("/models/", f"{tmp_path}/"))
        settings = settings_of(here, tmp_path)
        if "volume" in str(pool["name"]):
            Path(settings.engine.model.model).mkdir(parents=True)
        (name, *_) = settings.engine.model.names
        kind = {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler"}[
            str(pool["name"]).rpartition("-")[2]
        ]
        asked = json.dumps(named(objects, kind)[owner]["spec"])
        assert re.findall(r'model_name(?:=\\"|": ")([^"\\]+)', asked)
        assert set(re.findall(r'model_name(?:=\\"|": ")([^"\\]+)', asked)) == {name}


def test_a_made_secret_has_what_members_read(any_helm: str, tmp_path: Path) -> None:
    objects = render(any_helm, ROOT / "tests" / "deploy" / "values" / "plain.yaml")
    (secret,) = named(objects, "Secret").values()
    data = {key: base64.b64decode(value) for key, value in secret["data"].items()}
    assert len(bytes.fromhex(data["root-secret"].decode())) == 32
    assert data["nats-password"].decode().isalnum()
    file = tmp_path / "keys.yaml"
    file.write_bytes(data["keys.yaml"])
    file.chmod(0o600)
    keys = read_keys(file)
    assert len(keys) == 2


def settings_of(pod: Pod, directory: Path, other: str | None = None) -> Any:
    """The settings that `inlay` itself reads from the pod's file, environment and words.

    With `other`, those of another command that is run in the pod without words.
    """
    container, (name, *words) = pod.container, pod.container["args"]
    if other is not None:
        name, words = other, []
    command: Command = next(command for command in commands() if command.name == name)
    file = directory / "inlay.yaml"
    file.write_text(pod.config or "")
    variables = {
        "POD_IP": "10.1.2.3",
        "NATS_PASSWORD": "word",
        "LWS_LEADER_ADDRESS": "leader.example",
    }
    environ: dict[str, str] = {}
    for given in container["env"]:
        value = given.get("value")
        if value is None:
            value = "0" if "worker-index" in str(given) else variables.get(given["name"], "x")
        environ[given["name"]] = _expanded(value, variables)
    environ["INLAY_CONFIG"] = str(file)
    # The image's entry point is inlay itself.
    assert "command" not in container
    parsed = parse(command, [_expanded(word, variables) for word in words])
    return read(command, parsed, environ, known_variables())


def _expanded(text: str, variables: dict[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it; a name that is nowhere is an error here."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


def _names(mounts: list[Object]) -> set[str]:
    return {mount["name"] for mount in mounts}
