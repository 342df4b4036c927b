"""What Kubernetes is given: settings, ports, probes, drains and rights."""

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from backhaul_common.addresses import split_address
from tests.unit.deploy import started
from tests.unit.deploy.cluster import OVERLAYS, POD_IP, ROOT, Container, containers, of_kind, render, workloads
from tests.unit.deploy.started import of_container, program_of

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)

_AFTER_DRAIN_S = 3
"""What an agent takes to leave when its drain is over (--help)."""
_END_S = 5
"""What is kept for the end of a process."""


def ours(overlay: str) -> list[tuple[Container, Any]]:
    """Returns the containers that run a service of Backhaul's, with the configuration that it gets."""
    return [(one, of_container(one)) for one in containers(overlay) if program_of(one) in started.CONFIGS]


def engines(overlay: str) -> list[Container]:
    return [one for one in containers(overlay) if one.name == "engine"]


def agents(overlay: str) -> Mapping[str, Any]:
    """Returns the agents' configurations by their pods."""
    return {container.pod: settings for container, settings in ours(overlay) if container.name == "agent"}


def drain_s(overlay: str, pod: str) -> float:
    """Returns how long what is in a pod takes to end in good order."""
    ends = {
        "backhaul-router": lambda it: it.lame_duck_s + it.grace_s,
        "backhaul-registry": lambda it: it.grace_s,
        "backhaul-node-agent": lambda it: it.drain_s + _AFTER_DRAIN_S,
    }
    return max(
        (ends[program_of(one)](settings) for one, settings in ours(overlay) if one.pod == pod),
        default=0,
    )


class TestSettings:
    def test_every_flag_and_variable_is_one_that_the_service_knows(self, overlay: str) -> None:
        programs = [program_of(container) for container, _ in ours(overlay)]
        assert sorted(programs) == sorted([*started.CONFIGS, "backhaul-node-agent"])

    def test_kubernetes_adds_no_variables_that_look_like_settings(self, overlay: str) -> None:
        assert all(one.pod_spec["enableServiceLinks"] is False for one in containers(overlay))

    def test_every_registry_is_named_where_it_is(self, overlay: str) -> None:
        (registry,) = [one for one in workloads(overlay) if one["metadata"]["name"] == "backhaul-registry"]
        (service,) = [one for one in of_kind(overlay, "Service") if one["metadata"]["name"] == "backhaul-registry"]
        assert registry["spec"]["serviceName"] == service["metadata"]["name"]
        (listen,) = [settings.listen for one, settings in ours(overlay) if one.name == "registry"]
        _, port = split_address(listen)
        named = tuple(f"backhaul-registry-{i}.backhaul-registry:{port}" for i in range(registry["spec"]["replicas"]))
        for container, settings in ours(overlay):
            if container.name != "registry":
                assert settings.registry == named

    def test_etcd_is_the_one_for_trying_or_one_outside(self, overlay: str) -> None:
        (endpoints,) = [settings.etcd_endpoints for one, settings in ours(overlay) if one.name == "registry"]
        inside = {
            f"{one['metadata']['name']}:{port['port']}"
            for one in of_kind(overlay, "Service")
            for port in one["spec"]["ports"]
        }
        assert (set(endpoints) <= inside) is (overlay == "simulated")

    def test_what_settings_name_is_mounted(self, overlay: str) -> None:
        for container, settings in ours(overlay):
            mounts = [mount["mountPath"] for mount in container.spec.get("volumeMounts", [])]
            for name, value in settings:
                if value and (name.endswith(("_file", "_socket")) or name in ("etcd_ca", "etcd_cert", "etcd_key")):
                    assert any(value.startswith(f"{mount}/") for mount in mounts), f"{container}: {name}"


class TestNodes:
    def test_an_agent_and_its_engine_meet(self, overlay: str) -> None:
        for engine in engines(overlay):
            agent = agents(overlay)[engine.pod]
            assert engine.pod == f"backhaul-{agent.role}"
            if engine.image == "backhaul-simulator":
                options = started.simulator(engine.args)
                socket, side = options.agent_socket, f"{options.side_channel_host}:{options.side_channel_port}"
                events = options.kv_events
            else:
                socket = engine.env["BACKHAUL_AGENT_SOCKET"]
                side = ":".join(engine.env[f"VLLM_NIXL_SIDE_CHANNEL_{name}"] for name in ("HOST", "PORT"))
                events = json_flag(engine, "--kv-events-config").get("endpoint", "")
            assert socket == agent.connector_socket
            assert side == agent.side_channel
            assert events.replace("*", "127.0.0.1") == agent.kv_events
            assert bool(events) is (agent.role == "decode")
            (port,) = {int(arg.removeprefix("--port=")) for arg in engine.args if arg.startswith("--port=")}
            assert agent.engine_url == f"http://127.0.0.1:{port}"
            assert port in engine.ports

    def test_others_are_told_addresses_of_the_pod(self, overlay: str) -> None:
        for agent in agents(overlay).values():
            assert agent.advertised == f"{POD_IP}:7201"
            assert agent.advertised_engine_url == f"http://{POD_IP}:8000"
            assert agent.side_channel == f"{POD_IP}:5600"

    def test_engine_and_agent_share_the_folder_of_the_socket_and_the_user(self, overlay: str) -> None:
        shared: dict[str, set[tuple[str, int | None]]] = {}
        for one in containers(overlay):
            if one.name in ("engine", "agent"):
                (volume,) = [it["name"] for it in one.spec["volumeMounts"] if it["mountPath"] == "/run/backhaul"]
                shared.setdefault(one.pod, set()).add((volume, one.spec["securityContext"].get("runAsUser")))
                assert {"name": volume, "emptyDir": {}} in one.pod_spec["volumes"]
        assert len(shared) == 2
        assert all(len(of_pod) == 1 for of_pod in shared.values())

    def test_vllm_is_configured_as_the_manual_says(self, overlay: str) -> None:
        if overlay == "simulated":
            return
        manual = re.findall(
            r"--kv-transfer-config '(\{.*?\n\})'", (ROOT / "docs" / "engines.md").read_text(), re.DOTALL
        )
        for engine, text in zip(sorted(engines(overlay), key=lambda it: it.pod, reverse=True), manual, strict=True):
            assert json_flag(engine, "--kv-transfer-config") == json.loads(text)
            assert "--enable-prompt-tokens-details" in engine.args

    def test_an_engine_ends_only_when_its_agent_has_left(self, overlay: str) -> None:
        for engine in engines(overlay):
            command = engine.spec["lifecycle"]["preStop"]["exec"]["command"]
            assert f"[ -S {agents(overlay)[engine.pod].connector_socket} ]" in command[-1]


class TestProbes:
    def test_only_liveness_restarts(self, overlay: str) -> None:
        for container, _ in ours(overlay):
            live, ready = container.spec["livenessProbe"], container.spec["readinessProbe"]
            assert live.get("httpGet", {}).get("path") == "/health" or live["grpc"]["service"] == "liveness"
            assert ready.get("httpGet", {}).get("path") == "/ready" or "service" not in ready["grpc"]
            assert live["failureThreshold"] * live["periodSeconds"] >= 30

    def test_clients_have_noticed_when_a_router_takes_no_more(self, overlay: str) -> None:
        ((router, settings),) = [both for both in ours(overlay) if both[0].name == "router"]
        probe = router.spec["readinessProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] <= settings.lame_duck_s


class TestPorts:
    def test_a_container_declares_those_on_which_it_listens(self, overlay: str) -> None:
        for container, settings in ours(overlay):
            assert container.ports == started.ports(settings), container

    def test_every_probe_and_service_meets_one(self, overlay: str) -> None:
        by_pod: dict[str, dict[str, int]] = {}
        for container in containers(overlay):
            for probe in container.probes:
                assert next(iter(probe.values()))["port"] in container.ports
            by_pod.setdefault(container.pod, {}).update(
                {port["name"]: port["containerPort"] for port in container.spec["ports"]}
            )
        for service in of_kind(overlay, "Service"):
            named = by_pod[service["spec"]["selector"]["app.kubernetes.io/name"]]
            for port in service["spec"]["ports"]:
                assert named[port["targetPort"]] == port["port"]


class TestEnds:
    def test_a_pod_has_time_to_end_in_good_order(self, overlay: str) -> None:
        for workload in workloads(overlay):
            spec = workload["spec"]["template"]["spec"]
            name = workload["metadata"]["name"]
            assert spec["terminationGracePeriodSeconds"] >= drain_s(overlay, name) + _END_S, name

    def test_a_budget_keeps_all_but_one_of_what_serves(self, overlay: str) -> None:
        budgets = {
            one["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]: one["spec"]
            for one in of_kind(overlay, "PodDisruptionBudget")
        }
        assert set(budgets) == {container.pod for container, _ in ours(overlay)}
        for spec in budgets.values():
            assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")

    def test_the_autoscaler_alone_says_how_many_routers_there_are(self, overlay: str) -> None:
        (scaler,) = of_kind(overlay, "HorizontalPodAutoscaler")
        target = scaler["spec"]["scaleTargetRef"]
        (router,) = [
            one
            for one in workloads(overlay)
            if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        assert "replicas" not in router["spec"]
        assert scaler["spec"]["minReplicas"] >= 2
        (container,) = router["spec"]["template"]["spec"]["containers"]
        assert "cpu" in container["resources"]["requests"]


class TestRights:
    def test_no_pod_runs_as_root_or_has_a_token(self, overlay: str) -> None:
        (account,) = of_kind(overlay, "ServiceAccount")
        assert account["automountServiceAccountToken"] is False
        for container in containers(overlay):
            pod = container.pod_spec
            assert pod["serviceAccountName"] == account["metadata"]["name"]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}

    def test_no_container_can_get_more_or_write_to_its_image(self, overlay: str) -> None:
        for container in containers(overlay, init=True):
            context = container.spec["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            # vLLM compiles and caches in its home.
            assert context.get("readOnlyRootFilesystem", False) is (container.image != "vllm-openai"), container

    def test_every_container_says_what_it_needs_and_may_take(self, overlay: str) -> None:
        for container in containers(overlay, init=True):
            assert {"cpu", "memory"} <= set(container.spec["resources"]["requests"]), container
            assert "memory" in container.spec["resources"]["limits"], container

    def test_everything_is_in_one_namespace_that_lets_nobody_have_more(self, overlay: str) -> None:
        (namespace,) = of_kind(overlay, "Namespace")
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        others = [one for one in render(overlay) if one["kind"] != "Namespace"]
        assert {one["metadata"]["namespace"] for one in others} == {namespace["metadata"]["name"]}


def json_flag(container: Container, flag: str) -> dict[str, Any]:
    """Returns the value of a flag that takes JSON; empty without the flag."""
    for arg in container.args:
        if arg.startswith(f"{flag}="):
            found: dict[str, Any] = json.loads(arg.removeprefix(f"{flag}="))
            return found
    return {}
