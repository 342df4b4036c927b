"""A whole Backhaul stack on this machine: etcd, registries, engines with their agents, routers."""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from backhaul_local.engines import MODEL_NAME, EnginePlace, engine_spec
from backhaul_local.envoy import EnvoyAddresses, envoy_spec
from backhaul_local.etcd import EtcdMember, etcd_spec
from backhaul_local.options import Engine, StackOptions
from backhaul_local.ports import HOST, Ports
from backhaul_local.probes import grpc_ready, http_ready
from backhaul_local.processes import Process, ProcessSpec, Supervisor
from backhaul_local.progress import SilentSteps, Steps
from backhaul_local.secured import StackTls
from backhaul_local.simulated import SimulatedEngine, SimulatedPorts, nixl_stand_in, simulated_spec

_ENGINE_START_S = 300
_SERVICE_START_S = 120
_STOP_S = 15
_LOOK_S = 0.5
_WAITING = " (waiting for the engines)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A vLLM server and its agent."""

    name: str
    """Name of the engine's process: prefill-1, decode-1, ..."""
    role: str
    engine: Engine
    url: str
    """Base URL of the engine."""
    side_channel: str
    socket: Path
    agent_address: str
    kv_events: str
    """host:port of the first rank's KV events; empty: none. Only decode engines are asked what they cache."""

    @property
    def agent(self) -> str:
        """Name of the agent's process."""
        return f"agent-{self.name}"


class Stack:
    """Starts everything on entry and ends everything on exit. Use it from one thread at a time.

    Processes are named etcd (or etcd-1 to etcd-n), registry-1, prefill-1, agent-prefill-1, decode-1, agent-decode-1,
    router-1 and so on, and envoy.
    """

    def __init__(self, options: StackOptions, steps: Steps | None = None) -> None:
        self._options = options
        self._steps = steps or SilentSteps()
        self._supervisor = Supervisor(self.logs)
        self._ports = Ports()
        self._sockets = Path()
        self._ready: dict[str, Callable[[], bool]] = {}
        self._labels: dict[str, str] = {}
        self._etcd_data = options.state / "etcd"
        self.tls = StackTls(options.state / "certs") if options.tls else None
        """Certificates of all; None without TLS."""
        self._scheme = "https" if options.tls else "http"
        self._exit = ExitStack()
        self._etcd_names: list[str] = []
        self.etcd_members: list[EtcdMember] = []
        self.etcd_endpoints: list[str] = []
        self.registries: list[str] = []
        """host:port of each registry."""
        self.nodes: list[Node] = []
        """Prefill nodes first."""
        self.routers: list[str] = []
        """Base URL of each router."""
        self.grpc_routers: list[str] = []
        """host:port of each router's gRPC server."""
        self.planners: list[str] = []
        """host:port at which each router plans turns for gateways that move the bytes themselves."""
        self.consoles: list[str] = []
        """URL of each router's console, where there are any."""
        self.pickers: list[str] = []
        """host:port of each router's endpoint picker, where there is a gateway."""
        self.metrics: dict[str, str] = {}
        """host:port at which each service shows what it counts, by the name of its process, where they do."""
        self.gateway = ""
        """Base URL of the gateway; empty without one."""

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            self._sockets = Path(tempfile.mkdtemp(prefix="backhaul-"))
            undo.callback(shutil.rmtree, self._sockets, ignore_errors=True)
            undo.enter_context(self._supervisor)
            self._start()
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()
        if not isinstance(error, Exception):
            # 60 MB that nobody needs again; after a failure they may tell why.
            shutil.rmtree(self._etcd_data, ignore_errors=True)

    @property
    def logs(self) -> Path:
        """Folder with one log per process."""
        return self._options.state / "logs"

    def watch(self, say: Callable[[str], None], *, restart_s: float = 20) -> NoReturn:
        """Waits for ever, and starts agents again ``restart_s`` seconds after they were told to end, and did.

        Tells ``say`` of both. Raises LocalError with the end of its log when any other process ends, or an agent fails.
        """
        agents = [node.agent for node in self.nodes]
        due: dict[str, float] = {}
        while True:
            for name in self._supervisor.check_all(may_end=agents):
                say(f"{name} has ended, as it was told to. Its engine goes on; {name} starts again in {restart_s:g} s.")
                due[name] = time.monotonic() + restart_s
            for name in [name for name, when in due.items() if when <= time.monotonic()]:
                del due[name]
                self._supervisor.restart(name)
                say(f"{name} is started again.")
            time.sleep(_LOOK_S)

    @property
    def process_names(self) -> list[str]:
        """Names of all processes, in the order in which they were started."""
        return [process.name for process in self._supervisor]

    @property
    def model_name(self) -> str:
        """Name under which the engines serve their model."""
        return MODEL_NAME

    def process(self, name: str) -> Process:
        """Returns a process by its name. Raises KeyError for an unknown one."""
        return self._supervisor[name]

    def node(self, name: str) -> Node:
        """Returns a node by its engine's name. Raises StopIteration for an unknown one."""
        return next(node for node in self.nodes if node.name == name)

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL; returns when it is gone."""
        self._supervisor.kill(name)

    def stop(self, name: str) -> None:
        """Ends a process with SIGTERM (SIGKILL after 15 s); returns when it is gone."""
        self._supervisor.stop([self.process(name)], grace_s=_STOP_S)

    def freeze(self, name: str) -> None:
        """Stops a process with SIGSTOP."""
        self.process(name).freeze()

    def thaw(self, name: str) -> None:
        """Lets a frozen process go on."""
        self.process(name).thaw()

    def restart(self, name: str, *, wait: bool = True, flags: Mapping[str, str] | None = None) -> None:
        """Starts an ended process again, with the same command on the same data; waits until it is ready.

        ``flags``: new values of flags that it had. Raises ValueError for one that it had not.
        """
        spec = self.process(name).spec
        command = list(spec.command)
        for flag, value in (flags or {}).items():
            command[command.index(flag) + 1] = value
        self._supervisor.start(replace(spec, command=command))
        if wait:
            self.wait_ready(name)

    def add_router(self, flags: Sequence[str]) -> str:
        """Starts one more router, with flags of its own; waits until it is ready, and returns its base URL."""
        name = self._launch_router(flags)
        self.wait_ready(name, timeout_s=_SERVICE_START_S)
        return self.routers[-1]

    def wait_ready(self, *names: str, timeout_s: float = _ENGINE_START_S) -> None:
        """Waits until the named processes are ready. Raises LocalError with a log's end when one is not in time."""
        self._supervisor.wait_for_all({name: self._ready[name] for name in names}, timeout_s)

    def log_tails(self, lines: int = 30) -> str:
        """Returns the last lines of every log, for a failed test's report."""
        return "\n".join(f"--- {process.name}\n{process.log_tail(lines)}" for process in self._supervisor)

    def _start(self) -> None:
        """Engines first: they take half a minute, in which the rest comes up."""
        self._declare_nodes()
        self._start_engines()
        self._start_etcd()
        self._start_registries()
        self._start_agents()
        self._start_routers()
        if self._options.gateway:
            self._start_gateway()
        self._await([node.name for node in self.nodes], _ENGINE_START_S)
        self._await([node.agent for node in self.nodes], _SERVICE_START_S)
        self._await([f"router-{index}" for index in range(1, len(self.routers) + 1)], _SERVICE_START_S)
        if self._options.gateway:
            self._await(["envoy"], _SERVICE_START_S)

    def _declare_nodes(self) -> None:
        for role, engines, first_port in (
            ("prefill", self._options.prefill, 8100),
            ("decode", self._options.decode, 8200),
        ):
            for index, engine in enumerate(engines, start=1):
                name = f"{role}-{index}"
                node = Node(
                    name=name,
                    role=role,
                    engine=engine,
                    url=f"{self._scheme}://{self._address(first_port + index - 1)}",
                    side_channel=self._side_channel(engine, first_port - 2500 + index - 1),
                    socket=self._sockets / f"{name}.sock",
                    agent_address=self._address(7200 + len(self.nodes) + 1),
                    kv_events=self._kv_events(engine, 5557 + index - 1) if role == "decode" else "",
                )
                self.nodes.append(node)

    def _side_channel(self, engine: Engine, preferred: int) -> str:
        """Rank n of a server listens n ports above the first."""
        if isinstance(engine, SimulatedEngine) and engine.row > 1:
            return f"{HOST}:{self._ports.take_row(engine.row)}"
        return self._address(preferred)

    def _kv_events(self, engine: Engine, preferred: int) -> str:
        """As with side channels, rank n of a server publishes n ports above the first."""
        if isinstance(engine, SimulatedEngine) and engine.row > 1:
            return f"{HOST}:{self._ports.take_row(engine.row)}"
        return self._address(preferred)

    def _start_engines(self) -> None:
        for node in self.nodes:
            place = EnginePlace(
                name=node.name,
                python=self._options.engine_python,
                model=self._options.model,
                http_port=_port(node.url),
                side_channel_port=_port(node.side_channel),
                agent_socket=Path(self._options.network.between(node.name, node.agent, str(node.socket))),
                kv_events_port=_port(node.kv_events) if node.kv_events else None,
            )
            self._launch(self._engine_spec(place, node.engine), self._http_ready(f"{node.url}/health"))

    def _engine_spec(self, place: EnginePlace, engine: Engine) -> ProcessSpec:
        if self.tls:
            engine = replace(engine, flags=(*engine.flags, *self.tls.engine_flags()))
        if not isinstance(engine, SimulatedEngine):
            return engine_spec(place, engine)
        return simulated_spec(place, engine, self._simulated_ports(place, engine.row))

    def _simulated_ports(self, place: EnginePlace, row: int) -> SimulatedPorts:
        def told(source: str, target: str, port: int) -> int:
            # What is put between lies before rank 0: where there are several, they are reached directly.
            return _port(self._options.network.between(source, target, f"{HOST}:{port}")) if row == 1 else port

        memory, notifications = self._ports.take_row(row), self._ports.take_row(row)
        return SimulatedPorts(
            memory=memory,
            told_memory=told("engines", place.name, memory),
            notifications=notifications,
            told_notifications=told("peers", f"{place.name} notifications", notifications),
            told_side_channel=told("peers", f"{place.name} side channel", place.side_channel_port),
        )

    def _start_etcd(self) -> None:
        count = self._options.etcd_members
        names = self._etcd_names = ["etcd"] if count == 1 else [f"etcd-{index}" for index in range(1, count + 1)]
        cluster = self.etcd_members = [self._etcd_member(index, name) for index, name in enumerate(names)]
        for member in cluster:
            self.etcd_endpoints.append(member.endpoint)
            flags = (*self._options.etcd_flags, *(self.tls.etcd_flags() if self.tls else ()))
            spec = etcd_spec(member, cluster, flags, scheme=self._scheme)
            self._launch(spec, self._http_ready(f"{self._scheme}://{member.endpoint}/health"))
        self._await(names, _SERVICE_START_S)

    def _etcd_member(self, index: int, name: str) -> EtcdMember:
        member = EtcdMember(
            name=name,
            client_port=self._ports.take(2379 + 2 * index if self._options.default_ports else None),
            peer_port=self._ports.take(),
            data=self._etcd_data / name,
        )
        if self._options.etcd_members == 1:
            return member
        return replace(member, told_peer=self._options.network.between("members", name, member.peer))

    def _start_registries(self) -> None:
        for index in range(1, self._options.registries + 1):
            address = self._address(7100 + index - 1)
            self.registries.append(address)
            name = f"registry-{index}"
            etcd = self._reached(name, self._etcd_names, self.etcd_endpoints)
            tls = self.tls.registry_flags() if self.tls else ()
            flags = ["--listen", address, "--etcd-endpoints", etcd, *tls, *self._metrics_flags(name)]
            flags += self._options.registry_flags
            self._service(name, "backhaul-registry", flags, self._grpc_ready(address))
        self._await([f"registry-{index}" for index in range(1, len(self.registries) + 1)], _SERVICE_START_S)

    def _start_agents(self) -> None:
        network = self._options.network
        for node in self.nodes:
            engine = node.url.removeprefix(f"{self._scheme}://")
            flags = ["--engine-url", f"{self._scheme}://{network.between(node.agent, node.name, engine)}"]
            flags += ["--advertise-engine-url", f"{self._scheme}://{network.between('routers', node.name, engine)}"]
            flags += [
                "--side-channel",
                self._reached_side_channel(node),
                "--role",
                node.role,
                "--listen",
                node.agent_address,
            ]
            flags += ["--advertise", network.between("routers", node.agent, node.agent_address)]
            flags += ["--registry", self._reached_registries(node.agent), "--node-id", node.name]
            if node.kv_events:
                events = network.between(node.agent, f"{node.name} events", node.kv_events)
                flags += ["--kv-events", f"tcp://{events}"]
            flags += [*(self.tls.agent_flags() if self.tls else ()), *self._metrics_flags(node.agent)]
            flags += ["--connector-socket", str(node.socket), *self._options.agent_flags, *node.engine.agent_flags]
            ready = self._grpc_ready(node.agent_address)
            self._service(node.agent, "backhaul-node-agent", flags, ready, _WAITING, _agent_env(node.engine))

    def _reached_side_channel(self, node: Node) -> str:
        if isinstance(node.engine, SimulatedEngine) and node.engine.row > 1:
            return node.side_channel
        return self._options.network.between(node.agent, f"{node.name} side channel", node.side_channel)

    def _reached_registries(self, source: str) -> str:
        names = [f"registry-{index}" for index in range(1, len(self.registries) + 1)]
        return self._reached(source, names, self.registries)

    def _reached(self, source: str, names: Sequence[str], addresses: Sequence[str]) -> str:
        between = self._options.network.between
        return ",".join(between(source, name, address) for name, address in zip(names, addresses, strict=True))

    def _start_routers(self) -> None:
        for _ in range(self._options.routers):
            self._launch_router(self._options.router_flags)

    def _launch_router(self, more_flags: Sequence[str]) -> str:
        index = len(self.routers) + 1
        http, grpc = self._address(8080 + 10 * (index - 1)), self._address(8081 + 10 * (index - 1))
        self.routers.append(f"{self._scheme}://{http}")
        self.grpc_routers.append(grpc)
        name = f"router-{index}"
        flags = [*self._console_flags(index), "--listen-http", http, "--listen-grpc", grpc]
        flags += ["--registry", self._reached_registries(name)]
        # Nobody here watches readiness.
        tls = self.tls.router_flags() if self.tls else ()
        flags += ["--lame-duck-s", "0", "--listen-gateway", self._planner(index), *self._picker_flags(index)]
        flags += [*tls, *self._metrics_flags(name), *more_flags]
        self._service(name, "backhaul-router", flags, self._http_ready(f"{self.routers[-1]}/ready"), _WAITING)
        return name

    def _metrics_flags(self, name: str) -> Sequence[str]:
        if not self._options.metrics:
            return ()
        self.metrics[name] = self._address(9464 + len(self.metrics))
        return "--listen-metrics", self.metrics[name]

    def _planner(self, index: int) -> str:
        self.planners.append(self._address(8083 + 10 * (index - 1)))
        return self.planners[-1]

    def _console_flags(self, index: int) -> Sequence[str]:
        if not self._options.console:
            return ()
        address = self._address(8084 + 10 * (index - 1))
        self.consoles.append(f"{self._scheme}://{address}/console/")
        return "--listen-console", address

    def _picker_flags(self, index: int) -> Sequence[str]:
        if not self._options.gateway:
            return ()
        self.pickers.append(self._address(8082 + 10 * (index - 1)))
        return "--listen-ext-proc", self.pickers[-1]

    def _start_gateway(self) -> None:
        listen, admin = self._address(8000), self._address(9901)
        self.gateway = f"{self._scheme}://{listen}"
        addresses = EnvoyAddresses(
            listen=listen,
            admin=admin,
            routers=[url.removeprefix(f"{self._scheme}://") for url in self.routers],
            pickers=self.pickers,
        )
        if self.tls:
            self.tls.gateway_files()
        certificates = self.tls.folder if self.tls else None
        spec = envoy_spec(addresses, self._options.state / "envoy.yaml", certificates)
        self._launch(spec, self._http_ready(f"{self.gateway}/ready"), _WAITING)

    def _service(
        self,
        name: str,
        script: str,
        flags: Sequence[str],
        ready: Callable[[], bool],
        remark: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        command = [str(Path(sys.executable).with_name(script)), *flags]
        spec = ProcessSpec(name=name, command=command, env={**self._options.env, **(env or {})})
        self._launch(spec, ready, remark)

    def _launch(self, spec: ProcessSpec, ready: Callable[[], bool], remark: str = "") -> None:
        self._ready[spec.name] = ready
        self._labels[spec.name] = f"Starting {spec.name}{remark}"
        self._steps.begin(self._labels[spec.name])
        self._supervisor.start(spec)

    def _await(self, names: Sequence[str], timeout_s: float) -> None:
        ready = {name: self._ready[name] for name in names}
        self._supervisor.wait_for_all(
            ready, timeout_s, lambda name: self._steps.end(self._labels[name]), self._steps.waiting
        )

    def _http_ready(self, url: str) -> Callable[[], bool]:
        return partial(http_ready, url, self.tls.context() if self.tls else None)

    def _grpc_ready(self, address: str) -> Callable[[], bool]:
        return partial(grpc_ready, address, self.tls.credentials() if self.tls else None)

    def _address(self, preferred: int) -> str:
        return f"{HOST}:{self._ports.take(preferred if self._options.default_ports else None)}"


def _agent_env(engine: Engine) -> Mapping[str, str]:
    """A simulated engine hears what the stand-in of nixl says; NIXL itself does not reach it."""
    if not isinstance(engine, SimulatedEngine):
        return {}
    paths = [str(nixl_stand_in()), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **engine.agent_env}


def _port(address: str) -> int:
    return int(address.rsplit(":", 1)[1])
