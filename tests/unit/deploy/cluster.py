"""What Kubernetes is given by each overlay, rendered by kubectl, and how its containers are started by that."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
OVERLAYS = ("simulated", "production")

POD_IP = "10.0.0.7"
"""Address of every pod here."""

_FIELDS = {"status.podIP": POD_IP, "metadata.name": "pod-0"}
_PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


@dataclass(frozen=True, slots=True)
class Container:
    """A container as it is started: variables filled in, in its arguments too."""

    pod: str
    """``app.kubernetes.io/name`` of its pod."""
    name: str
    image: str
    """Without registry and tag."""
    command: list[str]
    args: list[str]
    env: Mapping[str, str]
    spec: dict[str, Any]
    pod_spec: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.pod}/{self.name}"

    @property
    def ports(self) -> set[int]:
        """Ports that it declares."""
        return {port["containerPort"] for port in self.spec.get("ports", [])}

    @property
    def probes(self) -> list[dict[str, Any]]:
        """What it is asked: of each probe the entry that says how."""
        found = [self.spec.get(f"{name}Probe", {}) for name in ("startup", "liveness", "readiness")]
        return [{kind: probe[kind]} for probe in found for kind in ("httpGet", "grpc") if kind in probe]


@cache
def render(overlay: str) -> list[dict[str, Any]]:
    """Returns the objects of an overlay, as ``kubectl apply -k`` would send them."""
    folder = ROOT / "deploy" / "kustomize" / "overlays" / overlay
    kubectl = shutil.which("kubectl", path=_PATH)
    assert kubectl, "kubectl is missing: it comes with requirements-dev.txt"
    made = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return list(yaml.safe_load_all(made.stdout))


def of_kind(overlay: str, *kinds: str) -> list[dict[str, Any]]:
    """Returns an overlay's objects of these kinds."""
    return [one for one in render(overlay) if one["kind"] in kinds]


def workloads(overlay: str) -> list[dict[str, Any]]:
    """Returns what makes pods."""
    return of_kind(overlay, "Deployment", "StatefulSet")


def containers(overlay: str, *, init: bool = False) -> Iterator[Container]:
    """Yields all containers of an overlay; with ``init`` those that run before the others, too."""
    maps = {one["metadata"]["name"]: one["data"] for one in of_kind(overlay, "ConfigMap")}
    for workload in workloads(overlay):
        template = workload["spec"]["template"]
        pod = template["spec"]
        for spec in [*(pod.get("initContainers", []) if init else []), *pod["containers"]]:
            env = _environment(spec, maps)
            yield Container(
                pod=template["metadata"]["labels"]["app.kubernetes.io/name"],
                name=spec["name"],
                image=image_name(spec["image"]),
                command=spec.get("command", []),
                args=[_filled(arg, env) for arg in spec.get("args", [])],
                env=env,
                spec=spec,
                pod_spec=pod,
            )


def image_name(image: str) -> str:
    """Returns an image's name without registry and tag."""
    return image.rsplit(":", 1)[0].rsplit("/", 1)[-1]


def _environment(spec: Mapping[str, Any], maps: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    env: dict[str, str] = {}
    for source in spec.get("envFrom", []):
        env |= maps[source["configMapRef"]["name"]]
    for entry in spec.get("env", []):
        if "value" in entry:
            env[entry["name"]] = _filled(entry["value"], env)
        elif "fieldRef" in entry["valueFrom"]:
            env[entry["name"]] = _FIELDS[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            env[entry["name"]] = "from-a-secret"
    return env


def _filled(text: str, env: Mapping[str, str]) -> str:
    """Fills in $(NAME) as Kubernetes does; a name that is not there is a mistake here."""
    return re.sub(r"\$\(([A-Z_]+)\)", lambda match: env[match[1]], text)
