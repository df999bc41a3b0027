"""One node without Kubernetes: it runs pods from their specs, in namespaces of their own, with what
a kubelet does for them.

Done as Kubernetes does it: the pod's network, its IPC and, with shareProcessNamespace, its
processes are shared; each container has a root file system, user, groups, volumes and environment
of its own; init containers start one after the other, sidecars (restartPolicy Always) before the
containers and end after them in reverse; startup, readiness and liveness probes at their periods;
preStop, SIGTERM, the grace period, SIGKILL; containers that end start again. Images are entry
points and directories of this host. Not done: seccomp, resources, node selection, network policies.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
BRIDGE, SUBNET = "pods", "10.244.0"
BACK_OFF_S = 10.0  # before a container that ends again and again starts once more
SIDECAR_MIN_S = 2.0  # for sidecars, after containers that used the whole grace period
ZONE = "svc.cluster.local"

Object = dict[str, Any]


class Failed(Exception):
    pass


def sh(*words: object) -> None:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, words))}: {done.stdout}{done.stderr}")


def wait_for(what: str, check: Callable[[], Any], seconds: float, tick: float = 0.1) -> Any:
    end = time.monotonic() + seconds
    while not (found := check()):
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds:g} s")
        time.sleep(tick)
    return found


@dataclasses.dataclass(frozen=True)
class Image:
    entry: tuple[str, ...]
    folders: Mapping[str, str]  # where in the container: of this host, read only
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Event:
    at: float
    pod: str
    text: str


class Node:
    """The host: its network, its names, its pods and what happened to them."""

    def __init__(
        self,
        folder: pathlib.Path,
        images: Mapping[str, Image],
        switch_user: bool,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.images, self.switch_user, self.say = folder, images, switch_user, say
        self.configs: dict[str, dict[str, str]] = {}  # ConfigMaps and Secrets, by kind/name
        self.services: list[Object] = []
        self.pods: dict[str, Pod] = {}
        self.events: list[Event] = []
        self.lock = threading.RLock()
        self.addresses = itertools.count(2)
        self.hosts = folder / "hosts"
        self.hosts.write_text("")
        sh("ip", "link", "set", "lo", "up")
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        sh("ip", "address", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        sh("ip", "link", "set", BRIDGE, "up")

    def event(self, pod: str, text: str) -> None:
        with self.lock:
            self.events.append(Event(time.monotonic(), pod, text))
        self.say(f"  {pod}: {text}")

    def selected(self, service: Object) -> list[Pod]:
        """A service's pods that have an address for it. Pods that end have none, unless it
        publishes those that are not ready."""
        spec = service["spec"]
        with self.lock:
            pods = [
                p
                for p in self.pods.values()
                if spec["selector"].items() <= p.labels.items() and p.address
            ]
        if spec.get("publishNotReadyAddresses"):
            return pods
        return [p for p in pods if p.ready and not p.ending]

    def endpoints(self, name: str) -> list[Pod]:
        return [p for s in self.services if s["metadata"]["name"] == name for p in self.selected(s)]

    def publish(self) -> None:
        """Names of headless services and their pods, as DNS has them, into the file of hosts of all
        containers."""
        with self.lock:
            # A pod's own name is in the file that a kubelet gives it; here all are in all.
            lines = [
                "127.0.0.1 localhost",
                *(f"{p.address} {p.name}" for p in self.pods.values() if p.address),
            ]
            for s in self.services:
                if s["spec"].get("clusterIP") != "None":
                    continue
                for p in self.selected(s):
                    lines += [
                        f"{p.address} {name}" for name in full(s["metadata"]["name"], p.namespace)
                    ]
                    if p.subdomain == s["metadata"]["name"]:
                        lines += [
                            f"{p.address} {p.name}.{name}"
                            for name in full(s["metadata"]["name"], p.namespace)
                        ]
            text = "".join(f"{line}\n" for line in lines)
            if text != self.hosts.read_text():
                self.hosts.write_text(text)  # in its place: containers have this very file

    def stop(self) -> None:
        with self.lock:
            pods = list(self.pods.values())
        for p in pods:
            p.kill()


def full(service: str, namespace: str) -> list[str]:
    return [
        service,
        f"{service}.{namespace}",
        f"{service}.{namespace}.svc",
        f"{service}.{namespace}.{ZONE}",
    ]


class Pod:
    def __init__(
        self, node: Node, name: str, namespace: str, template: Object, subdomain: str = ""
    ) -> None:
        self.node, self.name, self.namespace, self.subdomain = node, name, namespace, subdomain
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Object = template["spec"]
        self.template = template
        self.grace = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self.ending = self.gone = self.started = False
        self.address = ""
        self.took = 0.0  # seconds from the request to end until the end
        self.killed: list[str] = []  # containers that did not end in time
        self.folder = node.folder / f"{name}-{time.monotonic_ns():x}"
        self.volumes: dict[str, str] = {}
        self.init = [Container(self, c) for c in self.spec.get("initContainers", [])]
        self.containers = [Container(self, c) for c in self.spec["containers"]]
        self.sidecars = [c for c in self.init if c.spec.get("restartPolicy") == "Always"]
        with node.lock:
            node.pods[name] = self
        threading.Thread(target=self._start, daemon=True).start()

    @property
    def ready(self) -> bool:
        return self.started and all(c.ready for c in (*self.sidecars, *self.containers))

    def container(self, name: str) -> Container:
        return next(c for c in (*self.init, *self.containers) if c.name == name)

    def _sandbox(self) -> None:
        self.pause = subprocess.Popen(
            ["unshare", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child",
            sys.executable, HERE / "container.py", "pause", self.name], stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.pid = wait_for("the pod's first process", lambda: children(self.pause.pid), 10, 0.01)[
            0
        ]
        own = os.readlink("/proc/self/ns/net")
        wait_for(
            "the pod's network", lambda: os.readlink(f"/proc/{self.pid}/ns/net") != own, 10, 0.01
        )
        n = next(self.node.addresses)
        sh(
            "ip",
            "link",
            "add",
            f"pod{n}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self.pid,
        )
        sh("ip", "link", "set", f"pod{n}", "master", BRIDGE, "up")
        inside = ("nsenter", "--target", self.pid, "--net", "ip")
        sh(*inside, "link", "set", "lo", "up")
        sh(*inside, "address", "add", f"{SUBNET}.{n}/24", "dev", "eth0")
        sh(*inside, "link", "set", "eth0", "up")
        sh(*inside, "route", "add", "default", "via", f"{SUBNET}.1")
        self.address = f"{SUBNET}.{n}"

    def _volumes(self) -> None:
        group = self.spec["securityContext"].get("fsGroup", 0)
        for v in self.spec.get("volumes", []):
            path = self.folder / "volumes" / v["name"]
            path.mkdir(parents=True)
            if "emptyDir" in v:
                if v["emptyDir"].get("medium") == "Memory":
                    size = number(v["emptyDir"].get("sizeLimit", "64Mi"))
                    sh("mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", path)
                self._give(path, group, 0o2777)
            elif "configMap" in v:
                self._write(
                    path, self.node.configs[f"ConfigMap/{v['configMap']['name']}"], 0o644, group
                )
            elif "secret" in v:
                self._write(
                    path,
                    self.node.configs[f"Secret/{v['secret']['secretName']}"],
                    v["secret"].get("defaultMode", 0o644),
                    group,
                )
            elif "hostPath" in v:
                path = pathlib.Path(v["hostPath"]["path"])
            else:
                raise Failed(f"{self.name}: volume {v} is of a kind that this runner does not have")
            self.volumes[v["name"]] = str(path)

    def _give(self, path: pathlib.Path, group: int, mode: int) -> None:
        if self.node.switch_user:
            os.chown(path, -1, group)
        path.chmod(mode)

    def _write(self, path: pathlib.Path, files: Mapping[str, str], mode: int, group: int) -> None:
        for name, text in files.items():
            (path / name).write_text(text)
            self._give(path / name, group, mode)

    def _start(self) -> None:
        try:
            self._sandbox()
            self._volumes()
            self.node.publish()
            for c in self.init:
                c.start()
                wait_for(
                    f"{self.name}: {c.name} to start",
                    lambda c=c: self.ending or c.started or c.done,
                    600,
                )
                if c.done and c.status:
                    raise Failed(f"init container {c.name} ended with status {c.status}")
            for c in self.containers:
                if not self.ending:
                    c.start()
            self.started = True
            self.order(self.sidecars, "started", self.containers, "begun")
        except Exception as err:
            if not self.ending:
                self.node.event(self.name, f"does not start: {err}")

    def end(self) -> None:
        """What a deletion does; returns when it is through."""
        begun = time.monotonic()
        self.ending = True
        self.node.event(self.name, "is to end")
        self.node.publish()
        deadline = begun + self.grace
        stops = [threading.Thread(target=c.stop, args=(deadline,)) for c in self.containers]
        for t in stops:
            t.start()
        for t in stops:
            t.join()
        self.order(self.containers, "ended", self.sidecars, "ended")
        for c in reversed(self.sidecars):
            c.stop(max(deadline, time.monotonic() + SIDECAR_MIN_S))
        self.took = time.monotonic() - begun
        self.node.event(
            self.name,
            f"has ended after {self.took:.1f} of {self.grace:g} "
            f"s{', killed: ' + ', '.join(self.killed) if self.killed else ''}",
        )
        self.kill()

    def order(
        self, first: Sequence[Container], what: str, later: Sequence[Container], then: str
    ) -> None:
        """An event, if something of the later containers came before something of the first
        ones."""
        for a, b in itertools.product(first, later):
            if then in b.times and a.times.get(what, time.monotonic()) > b.times[then]:
                self.node.event(
                    self.name, f"out of order: {b.name} has {then} before {a.name} has {what}"
                )

    def kill(self) -> None:
        """kill -9 of every process, as of a pod whose node has lost it. Its connections are
        reset."""
        self.ending = self.gone = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for c in (*self.init, *self.containers):
            c.wait()
        with self.node.lock:
            self.address = ""
            if self.node.pods.get(self.name) is self:
                del self.node.pods[self.name]
        self.node.publish()
        self.pause.wait()
        for path in self.volumes.values():
            subprocess.run(["umount", path], capture_output=True)
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)


def children(pid: int) -> list[int]:
    out: list[int] = []
    with contextlib.suppress(OSError):
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            out += [int(c) for c in (task / "children").read_text().split()]
    return out


def number(quantity: str) -> int:
    m = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", quantity)
    if not m:
        raise Failed(f"{quantity}: no quantity that this runner reads")
    return int(m[1]) << {"": 0, "Ki": 10, "Mi": 20, "Gi": 30}[m[2]]


class Container:
    def __init__(self, pod: Pod, spec: Object) -> None:
        self.pod, self.spec, self.name = pod, spec, spec["name"]
        self.started = self.ready = self.done = False
        self.status = 0
        self.restarts = 0
        self.proc: subprocess.Popen[bytes] | None = None
        self.log = pod.node.folder / f"{pod.name}.{self.name}.log"
        # Set by a test: its liveness probe fails until it was killed for that.
        self.live_fails = False
        # Of probes and their failures.
        self.counts: collections.Counter[str] = collections.Counter()
        self.times: dict[str, float] = {}  # when it first began, was started, and ended
        self._ended = threading.Event()
        self._begun = False

    def start(self) -> None:
        self._begun = True
        self.times["begun"] = time.monotonic()
        threading.Thread(target=self._live, daemon=True).start()

    def wait(self) -> None:
        if self._begun:
            self._ended.wait(30)

    # ---- what runs

    def _field(self, path: str) -> str:
        return {
            "status.podIP": self.pod.address,
            "metadata.name": self.pod.name,
            "metadata.namespace": self.pod.namespace,
        }[path]

    def env(self) -> dict[str, str]:
        out = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOSTNAME": self.pod.name,
            **self.image.env,
        }
        for e in self.spec.get("env", []):
            out[e["name"]] = (
                self.expand(str(e["value"]), out)
                if "value" in e
                else self._field(e["valueFrom"]["fieldRef"]["fieldPath"])
            )
        return out

    @staticmethod
    def expand(text: str, env: Mapping[str, str]) -> str:
        return re.sub(r"\$\((\w+)\)", lambda m: env.get(m[1], m[0]), text)

    @property
    def image(self) -> Image:
        return self.pod.node.images[self.spec["image"].rpartition(":")[0]]

    @property
    def security(self) -> Object:
        return {**self.pod.spec["securityContext"], **self.spec.get("securityContext", {})}

    def _spec(self) -> Object:
        env, image, security = self.env(), self.image, self.security
        if security.get("runAsNonRoot") and not security.get("runAsUser"):
            raise Failed(f"{self.name} may not run as root and names no user")
        argv = [*self.spec.get("command", image.entry), *self.spec.get("args", [])]
        mounts = [[source, target, True] for target, source in image.folders.items()]
        mounts.append([str(self.pod.node.hosts), "/etc/hosts", True])
        for m in self.spec.get("volumeMounts", []):
            mounts.append([self.pod.volumes[m["name"]], m["mountPath"], m.get("readOnly", False)])
        root = self.pod.folder / "root" / self.name
        root.mkdir(parents=True, exist_ok=True)
        links = {
            f"/{d.name}": os.readlink(d)
            for d in pathlib.Path("/").iterdir()
            if d.is_symlink() and d.name in ("bin", "sbin", "lib", "lib64")
        }
        return {
            "pid": self.pod.pid, "shared": self.pod.spec.get("shareProcessNamespace", False),
            "root": str(root), "links": links, "argv": [self.expand(a, env) for a in argv],
            "env": env, "cwd": self.spec.get("workingDir", "/"),
            "uid": security.get("runAsUser", 0), "gid": security.get("runAsGroup", 0),
            "groups": [security.get("fsGroup", 0)], "switch_user": self.pod.node.switch_user,
            "read_only": security.get("readOnlyRootFilesystem", False),
            "no_new_privileges": not security.get("allowPrivilegeEscalation", True),
            "mounts": mounts,
            # As images have it: no user 1000 is known.
            "files": {"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
                      "/etc/group": "root:x:0:\n", "/etc/nsswitch.conf": "hosts: files dns\n",
                      "/etc/hostname": self.pod.name + "\n"},
        }  # fmt: skip

    def _live(self) -> None:
        back_off = 0.0
        try:
            while True:
                begun = time.monotonic()
                with self.log.open("ab") as out:
                    out.write(f"--- {self.name} starts\n".encode())
                    out.flush()
                    self.proc = subprocess.Popen([sys.executable, HERE / "container.py", "run",
                        json.dumps(self._spec())], stdin=subprocess.DEVNULL, stdout=out,
                        stderr=out, start_new_session=True)  # fmt: skip
                over = threading.Event()
                prober = threading.Thread(target=self._probe, args=(over,), daemon=True)
                prober.start()
                self.status = self.proc.wait()
                over.set()
                self.started = self.ready = False
                prober.join()
                if self.pod.ending or self not in (*self.pod.sidecars, *self.pod.containers):
                    return
                self.restarts += 1
                back_off = 0.0 if time.monotonic() - begun > 60 or not back_off else BACK_OFF_S
                self.pod.node.event(
                    self.pod.name, f"{self.name} ended with status {self.status} and starts again"
                )
                time.sleep(back_off)
                back_off = BACK_OFF_S
                if self.pod.ending:
                    return
        except Exception as err:
            self.status = 125
            self.pod.node.event(self.pod.name, f"{self.name} does not start: {err}")
        finally:
            self.done = True
            self.times["ended"] = time.monotonic()
            self._ended.set()

    def main_pid(self) -> int:
        """The container's own process, as this node sees it."""
        pid = self.proc.pid if self.proc else 0
        for _ in range(1 if self.pod.spec.get("shareProcessNamespace") else 2):
            pid = wait_for(f"the process of {self.name}", lambda pid=pid: children(pid), 5, 0.01)[0]
        return pid

    # ---- probes

    def _probe(self, over: threading.Event) -> None:
        startup, ready, live = (
            self.spec.get(k) for k in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        if startup and not self._until("startup", startup, over):
            return
        self.started = True
        self.times.setdefault("started", time.monotonic())
        self.ready = not ready
        if ready or live:
            loops = [
                threading.Thread(target=f, args=(p, over), daemon=True)
                for f, p in ((self._readiness, ready), (self._liveness, live))
                if p
            ]
            for t in loops:
                t.start()
            for t in loops:
                t.join()

    def _until(self, kind: str, probe: Object, over: threading.Event) -> bool:
        """Whether it succeeded before its failures were too many, for which the container is
        killed."""
        over.wait(probe.get("initialDelaySeconds", 0))
        for _ in range(probe.get("failureThreshold", 3)):
            if over.is_set():
                return False
            if self._ask(kind, probe):
                return True
            over.wait(probe.get("periodSeconds", 10))
        if not over.is_set():
            self._unwell(kind)
        return False

    def _readiness(self, probe: Object, over: threading.Event) -> None:
        failures = 0
        while not over.is_set():
            if self._ask("readiness", probe):
                failures, was, self.ready = 0, self.ready, not over.is_set()
                if self.ready and not was:
                    self.pod.node.publish()
            else:
                failures += 1
                if failures >= probe.get("failureThreshold", 3) and self.ready:
                    self.ready = False
                    self.pod.node.event(self.pod.name, f"{self.name} is not ready any more")
            over.wait(probe.get("periodSeconds", 10))

    def _liveness(self, probe: Object, over: threading.Event) -> None:
        failures = 0
        while not over.is_set():
            failures = 0 if self._ask("liveness", probe) and not self.live_fails else failures + 1
            if failures >= probe.get("failureThreshold", 3) and not self.pod.ending:
                self._unwell("liveness")
                return
            over.wait(probe.get("periodSeconds", 10))

    def _unwell(self, kind: str) -> None:
        """Ends the process as a kubelet does, with its preStop hook; it starts again in the same
        pod."""
        self.live_fails = False
        self.pod.node.event(
            self.pod.name, f"{self.name} is killed: its {kind} probe has failed too often"
        )
        deadline = time.monotonic() + self.pod.grace
        self._pre_stop(deadline)
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired, AttributeError):
            self.proc.wait(max(0.0, deadline - time.monotonic()))
            return
        self.pod.node.event(
            self.pod.name, f"{self.name} has not ended, killed: after the grace period"
        )
        self._signal(signal.SIGKILL)

    def _ask(self, kind: str, probe: Object) -> bool:
        timeout = probe.get("timeoutSeconds", 1)
        good = False
        try:
            if "httpGet" in probe:
                conn = http.client.HTTPConnection(
                    self.pod.address, self._port(probe["httpGet"]["port"]), timeout=timeout
                )
                conn.request(
                    "GET",
                    probe["httpGet"].get("path", "/"),
                    headers={"User-Agent": "kube-probe/1.30", "Connection": "close"},
                )
                good = 200 <= conn.getresponse().status < 400
                conn.close()
            elif "tcpSocket" in probe:
                conn = http.client.HTTPConnection(
                    self.pod.address, self._port(probe["tcpSocket"]["port"]), timeout=timeout
                )
                conn.connect()
                conn.close()
                good = True
            else:
                good = self.execute(probe["exec"]["command"], timeout) == 0
        except (OSError, http.client.HTTPException, Failed):
            pass
        if not self.pod.ending:
            self.counts[kind] += 1
            self.counts[f"{kind} failed"] += not good
        return good

    def _port(self, port: str | int) -> int:
        return (
            port
            if isinstance(port, int)
            else next(p["containerPort"] for p in self.spec["ports"] if p["name"] == port)
        )

    # ---- the end

    def execute(self, command: Sequence[str], timeout: float) -> int:
        """Runs a command in the container, as its user."""
        pid = self.main_pid()
        words = [
            "nsenter",
            "--target",
            str(pid),
            "--mount",
            "--net",
            "--ipc",
            "--uts",
            "--pid",
            "--root",
            "--wd=/",
        ]
        if self.pod.node.switch_user:
            words += [
                f"--setgid={self.security.get('runAsGroup', 0)}",
                f"--setuid={self.security.get('runAsUser', 0)}",
            ]
        with self.log.open("ab") as out:
            try:
                return subprocess.run([*words, "--", "/usr/bin/env", *command], env=self.env(),
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    timeout=timeout).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return 124

    def _signal(self, sig: int) -> None:
        if self.proc and self.proc.poll() is None:
            with contextlib.suppress(ProcessLookupError, Failed):
                os.kill(self.main_pid() if sig == signal.SIGKILL else self.proc.pid, sig)

    def _pre_stop(self, deadline: float) -> None:
        hook = self.spec.get("lifecycle", {}).get("preStop", {})
        if "sleep" in hook:
            self._ended.wait(min(hook["sleep"]["seconds"], max(0.0, deadline - time.monotonic())))
        elif "exec" in hook:
            rc = self.execute(hook["exec"]["command"], max(0.1, deadline - time.monotonic()))
            if rc:
                self.pod.node.event(self.pod.name, f"preStop of {self.name} ended with status {rc}")
        elif hook:
            raise Failed(f"preStop {hook}: of a kind that this runner does not have")

    def stop(self, deadline: float) -> None:
        """preStop, SIGTERM, and SIGKILL at the deadline."""
        if self.proc is None or self.proc.poll() is not None:
            return
        self._pre_stop(deadline)
        self._signal(signal.SIGTERM)
        if not self._ended.wait(max(0.0, deadline - time.monotonic())):
            self.pod.killed.append(self.name)
            self._signal(signal.SIGKILL)
            self._ended.wait(10)

    def kill(self) -> None:
        """kill -9 of its process alone."""
        self._signal(signal.SIGKILL)
