"""Pods of rendered objects, run as containers the way a kubelet runs them.

Image, command, arguments, environment, user, group, rights, volumes with their owners and modes,
limits of memory, probes, `preStop` and grace come from the YAML. The pods share a network that has
nothing but itself: each has an address of the loopback, and each Service is a name for one.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.commands import run
from tests.deploy.chart import Object, Pod, named, pods
from tests.deploy.containers import BASE, LIMITS, logs, podman

_PAUSE = "inlay-pods"
_WITHIN = 240.0


class Kubelet:
    """The containers of a release's pods; use `running`.

    Args:
        objects: of the release.
        directory: for what is mounted.
    """

    def __init__(self, objects: tuple[Object, ...], directory: Path) -> None:
        self._objects = objects
        self._directory = directory
        self.pods = {pod.owner: pod for pod in pods(objects)}
        self._replaced = dict.fromkeys(self.pods, 0)
        directory.mkdir()
        self._hosts = directory / "hosts"
        self._point_services()

    def start(self, owner: str) -> None:
        """Start the pod that this object makes, named as `Deployment inlay-frontend`."""
        pod = self.pods[owner]
        # A pod that has ended is replaced.
        run(*podman(), "rm", "--ignore", self.name(owner))
        for first in pod.spec.get("initContainers", []):
            run(*self._command(pod, first, "--rm"))
        run(*self._command(pod, pod.container, "--detach", "--name", self.name(owner)))

    def _command(self, pod: Pod, container: Object, *more: str) -> list[str]:
        """The words that run a container of the pod."""
        environment = self._environment(pod, container)
        words = [*podman(), "run", "--pull", "never", *more]
        words += ["--network", f"container:{_PAUSE}", *LIMITS, *_rights(pod.spec, container)]
        words += [f"--env={name}={value}" for name, value in environment.items()]
        words += [f"--volume={mount}" for mount in self._mounts(pod, container)]
        words += [f"--volume={self._hosts}:/etc/hosts:ro"]
        command: list[str] = container.get("command", [])
        if command:
            entry = [_expanded(word, environment) for word in command]
            words += ["--entrypoint", json.dumps(entry)]
        arguments = [_expanded(word, environment) for word in container.get("args", [])]
        return [*words, container["image"], *arguments]

    def replace(self, owner: str) -> None:
        """Roll the pod out again: the new one is ready and has the Service before the old one ends.

        Raises:
            AssertionError: as `wait`; or the old one had to be killed.
        """
        old = self.name(owner)
        self._replaced[owner] += 1
        self.start(owner)
        self.wait(owner, "startupProbe")
        self._point_services()
        self._end(owner, old)
        (found,) = json.loads(run(*podman(), "container", "inspect", old))
        assert found["State"]["ExitCode"] == 0, logs(old)

    def name(self, owner: str) -> str:
        """The container's name."""
        return f"inlay-pod-{owner.split()[-1]}-{self._replaced[owner]}"

    def names(self) -> list[str]:
        """All containers there are or have been."""
        return [
            f"inlay-pod-{owner.split()[-1]}-{number}"
            for owner, last in self._replaced.items()
            for number in range(last + 1)
        ]

    def _address(self, owner: str) -> str:
        return f"127.0.{self._replaced[owner] + 1}.{list(self.pods).index(owner) + 1}"

    def _point_services(self) -> None:
        """Name the addresses of the Services; every pod reads the one file."""
        lines = ["127.0.0.1 localhost"]
        for name, service in named(self._objects, "Service").items():
            wanted = service["spec"]["selector"].items()
            (owner,) = [one for one, pod in self.pods.items() if wanted <= pod.labels.items()]
            lines.append(f"{self._address(owner)} {name}")
        self._hosts.write_text("\n".join(lines) + "\n")

    def wait(self, owner: str, probe: str) -> None:
        """Return once the pod's probe of this kind is answered.

        Raises:
            AssertionError: the container ended, or it takes minutes.
        """
        found = self.pods[owner].container[probe]
        ports = {
            port["name"]: port["containerPort"] for port in self.pods[owner].container["ports"]
        }
        asked = found.get("httpGet") or found["tcpSocket"]
        script = (
            "import sys, socket, ssl, urllib.request as u\n"
            "host, port, url = sys.argv[1:]\n"
            "socket.create_connection((host, int(port)), 5).close()\n"
            "url and u.urlopen(url, timeout=5, context=ssl._create_unverified_context())"
        )
        where = (self._address(owner), ports[asked["port"]])
        scheme = asked.get("scheme", "HTTP").lower()
        url = f"{scheme}://{where[0]}:{where[1]}{asked['path']}" if "path" in asked else ""
        deadline = time.monotonic() + _WITHIN
        while self.execute(owner, "python3", "-c", script, *where, url).returncode != 0:
            assert self.state(owner)["Running"], self.log(owner)
            assert time.monotonic() < deadline, self.log(owner)
            time.sleep(0.5)

    def execute(self, owner: str, *words: object) -> "subprocess.CompletedProcess[str]":
        """A command in the container."""
        return _execute(self.name(owner), *words)

    def stop(self, owner: str) -> None:
        """End the pod as its deletion does: `preStop`, SIGTERM, and SIGKILL after its grace."""
        self._end(owner, self.name(owner))

    def _end(self, owner: str, name: str) -> None:
        pod, began = self.pods[owner], time.monotonic()
        before = pod.container.get("lifecycle", {}).get("preStop")
        if before is not None:
            done = _execute(name, *before["exec"]["command"])
            assert done.returncode == 0, done.stderr
        left = pod.spec["terminationGracePeriodSeconds"] - (time.monotonic() - began)
        run(*podman(), "stop", "--time", max(1, int(left)), name, within=600)

    def state(self, owner: str) -> Object:
        """The container's state, as podman tells it."""
        (found,) = json.loads(run(*podman(), "container", "inspect", self.name(owner)))
        return dict(found["State"])

    def ended(self, owner: str) -> Object:
        """Its state once it has ended by itself."""
        run(*podman(), "wait", self.name(owner), within=_WITHIN)
        return self.state(owner)

    def log(self, owner: str) -> str:
        """The end of what it wrote."""
        return logs(self.name(owner))

    def _environment(self, pod: Pod, container: Object) -> dict[str, str]:
        fields = {
            "status.podIP": self._address(pod.owner),
            "metadata.name": f"{pod.owner.split()[-1]}-0",
        }
        found: dict[str, str] = {}
        for given in container.get("env", []):
            if "value" in given:
                found[given["name"]] = _expanded(given["value"], found)
                continue
            match given["valueFrom"]:
                case {"fieldRef": {"fieldPath": path}}:
                    found[given["name"]] = fields[path]
                case {"secretKeyRef": {"name": name, "key": key}}:
                    found[given["name"]] = self.secret(name)[key].decode()
        return found

    def secret(self, name: str) -> dict[str, bytes]:
        """The data of a Secret of the release."""
        data = named(self._objects, "Secret")[name]["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    def _mounts(self, pod: Pod, container: Object) -> Iterator[str]:
        # Where a StatefulSet has claims, a volume of that name has no other source.
        sources = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            place = self._volume(pod, sources.get(mount["name"], {"name": mount["name"]}))
            yield f"{place}:{mount['mountPath']}:{'ro' if mount.get('readOnly') else 'rw'}"

    def _volume(self, pod: Pod, source: Object) -> Path:
        group = pod.spec["securityContext"]["fsGroup"]
        place: Path = self._directory / pod.owner.split()[-1] / source["name"]
        if "hostPath" in source:
            return Path(source["hostPath"]["path"])
        if "configMap" in source:
            found = named(self._objects, "ConfigMap")[source["configMap"]["name"]]
            files = {key: text.encode() for key, text in found["data"].items()}
            _filled(place, files, 0o644, group)
        elif "secret" in source:
            data, secret = self.secret(source["secret"]["secretName"]), source["secret"]
            items = {item["path"]: data[item["key"]] for item in secret.get("items", [])}
            _filled(place, items or data, secret["defaultMode"], group)
        else:
            # An emptyDir or a claim: the group of the pod may write.
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, 0, group)
            place.chmod(0o2775)
        return place


@contextmanager
def running(objects: tuple[Object, ...], directory: Path) -> Iterator[Kubelet]:
    """A kubelet for the block; what it started is removed afterwards."""
    kubelet = Kubelet(objects, directory)

    def remove() -> None:
        # Whose network others share goes last.
        for group in (kubelet.names(), [_PAUSE]):
            run(*podman(), "rm", "--force", "--ignore", "--time", "0", *group)

    remove()
    try:
        words = (*podman(), "run", "--detach", "--name", _PAUSE, "--network", "none", *LIMITS)
        run(*words, BASE, "sleep", "infinity")
        yield kubelet
    finally:
        remove()
        shutil.rmtree(directory, ignore_errors=True)


def _execute(name: str, *words: object) -> "subprocess.CompletedProcess[str]":
    command = [*podman(), "exec", name, *(str(word) for word in words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def _rights(spec: Object, container: Object) -> list[str]:
    outer, inner = spec["securityContext"], container["securityContext"]
    words = [f"--user={outer['runAsUser']}:{outer['runAsGroup']}"]
    words += [f"--group-add={outer['fsGroup']}"]
    if inner["readOnlyRootFilesystem"]:
        # Podman's own scratch space below /run and /tmp is not there on Kubernetes.
        words += ["--read-only", "--read-only-tmpfs=false"]
    if not inner["allowPrivilegeEscalation"]:
        words += ["--security-opt=no-new-privileges"]
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    if limit is not None:
        words += [f"--memory={limit.removesuffix('i').lower()}"]
    return words + [f"--cap-drop={name}" for name in inner["capabilities"]["drop"]]


def _filled(place: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    for name, content in files.items():
        file = place / name
        file.write_bytes(content)
        os.chown(file, 0, group)
        file.chmod(mode)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it: a name that is nowhere stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)
