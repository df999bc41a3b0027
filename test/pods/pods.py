#!/usr/bin/env python3
"""Runs the pods of the Helm chart on this host, without Kubernetes, and rolls, kills and drains
them under load.

The chart is rendered with test/pods/values.yaml: one prefill engine, two decode engines, a sidecar
in the pod of each, two routers. The engines are vLLM's CPU back end with a tiny model.
test/pods/kubelet.py runs the pods; this program does what the controllers of StatefulSets and
Deployments do. Eight streams go through the routers all the time. No request may fail in an update,
a drain or a restart of a sidecar or an engine; when a pod is killed, only those whose answer had
begun there.

Written: .build/test-pods with the manifests, the log of each container, and result.json.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import hashlib
import http.client
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import yaml
from kubelet import Container, Failed, Image, Node, Object, Pod, wait_for

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / ".build"
OUT = BUILD / "test-pods"
RELEASE, NAMESPACE = "kv", "llm"
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/name"
STREAMS, PAUSE_S = 8, 1.5
START_S, ROLL_S, REQUEST_S = 600.0, 400.0, 90.0  # bounds on a busy machine
INSIDE = "KVSPRAY_PODS_INSIDE"
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", flush=True)


# ---- the cluster: manifests and their controllers


def render(values: Object) -> list[Object]:
    path = OUT / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    done = subprocess.run(
        [BUILD / "bin" / "chartrender", ROOT / "deploy" / "chart", RELEASE, NAMESPACE, path],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(f"chartrender: {done.stderr}")
    (OUT / "manifests.yaml").write_text(done.stdout)
    docs = [d for d in yaml.safe_load_all(done.stdout) if d]
    return [*docs, *(leaders_service(d) for d in docs if d["kind"] == "LeaderWorkerSet")]


def images() -> dict[str, Image]:
    """What deploy/Dockerfile makes images of: the sidecar's program, and vLLM's server with
    kvspray's wheels."""
    base = subprocess.run(
        [BUILD / "venv/bin/python", "-c", "import sys; print(sys.base_prefix)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    system = {d: d for d in ("/usr", "/etc/ld.so.cache", "/etc/ssl") if pathlib.Path(d).exists()}
    for d in ("/bin", "/sbin", "/lib", "/lib64"):
        if not pathlib.Path(d).is_symlink() and pathlib.Path(d).exists():
            system[d] = d
    kvspray = {"/opt/kvspray": str(ROOT / "bin")}
    venv = str((BUILD / "venv").resolve())
    # Only their owner may read the weights that safetensors wrote, and the pods' user is another
    # one.
    model = pathlib.Path(
        shutil.copytree(BUILD / "models" / "tiny-llama", OUT / "models" / "tiny-llama")
    )
    for file in model.iterdir():
        file.chmod(0o644)
    python = {base: base, venv: venv, "/models": str(OUT / "models")}
    return {
        "kvspray": Image(("/opt/kvspray/kvspray",), {**system, **kvspray}),
        "vllm-kvspray": Image(
            (f"{venv}/bin/python", "-m", "vllm.entrypoints.cli.main", "serve"),
            {**system, **kvspray, **python},
            {
                "PATH": f"/opt/kvspray:{venv}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:"
                "/usr/bin:/sbin:/bin",
            },
        ),
    }


def template_hash(template: Object) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]


def leaders_service(doc: Object) -> Object:
    """The headless service that the controller of LeaderWorkerSets makes."""
    name = doc["metadata"]["name"]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {GROUP_LABEL: name}}
    return {"kind": "Service", "metadata": {"name": name}, "spec": spec}


class Workload:
    """A StatefulSet or a Deployment, and its pods."""

    def __init__(self, node: Node, doc: Object) -> None:
        self.node, self.name = node, doc["metadata"]["name"]
        self.kind = doc["kind"]
        self.pods: list[Pod] = []
        self.doc = doc

    @property
    def template(self) -> Object:
        return self.doc["spec"]["template"]

    def create(self, index: int) -> Pod:
        if self.kind == "StatefulSet":
            ordinal = index + self.doc["spec"].get("first", 0)
            return Pod(
                self.node,
                f"{self.name}-{ordinal}",
                NAMESPACE,
                self.template,
                self.doc["spec"]["serviceName"],
            )
        return Pod(
            self.node,
            f"{self.name}-{template_hash(self.template)}-{index}{random.randrange(10**4):04}",
            NAMESPACE,
            self.template,
        )

    def start(self) -> None:
        self.pods = [self.create(i) for i in range(self.doc["spec"]["replicas"])]

    def ready(self) -> bool:
        return all(p.ready for p in self.pods)

    def replace(self, i: int, end: Callable[[Pod], None] = Pod.end) -> None:
        """As the controller after a pod was deleted: a StatefulSet waits for the old one, because
        of its name."""
        if self.kind == "Deployment":
            new = self.create(i)
            wait_for(f"{new.name} to be ready", lambda: new.ready, ROLL_S)
            end(self.pods[i])
            self.pods[i] = new
            return
        end(self.pods[i])
        self.pods[i] = new = self.create(i)
        wait_for(f"{new.name} to be ready", lambda: new.ready, ROLL_S)

    def roll(self, doc: Object) -> None:
        """A rolling update: one pod after the other, from the last one on; those that are up to
        date stay."""
        old, self.doc = self.template, doc
        if template_hash(old) == template_hash(self.template):
            return
        for i in reversed(range(len(self.pods))):
            self.replace(i)


class Groups(Workload):
    """A LeaderWorkerSet, and the pods of its groups: of each the leader, then its workers.

    Leaders are pods of one StatefulSet, which its controller updates one after the other. Each
    leader owns a StatefulSet of its workers: they are deleted when their leader is gone, while the
    next leader already starts.
    """

    @property
    def template(self) -> Object:
        return self.doc["spec"]["leaderWorkerTemplate"]

    @property
    def size(self) -> int:
        return self.template["size"]

    def create(self, index: int) -> Pod:
        group, rank = divmod(index, self.size)
        template = copy.deepcopy(self.template["workerTemplate" if rank else "leaderTemplate"])
        template["metadata"]["labels"][GROUP_LABEL] = self.name
        leader = f"{self.name}-{group}"
        env = {
            "LWS_LEADER_ADDRESS": f"{leader}.{self.name}.{NAMESPACE}",
            "LWS_GROUP_SIZE": self.size,
            "LWS_WORKER_INDEX": rank,
        }
        for c in (*template["spec"].get("initContainers", []), *template["spec"]["containers"]):
            c["env"] = [{"name": k, "value": str(v)} for k, v in env.items()] + c.get("env", [])
        return Pod(
            self.node, f"{leader}-{rank}" if rank else leader, NAMESPACE, template, self.name
        )

    def start(self) -> None:
        self.pods = [self.create(i) for i in range(self.doc["spec"]["replicas"] * self.size)]

    def replace_group(self, group: int) -> None:
        leader, *workers = self.members(group)
        self.renew(leader)
        together([lambda i=i: self.renew(i) for i in workers])
        self.wait_group(group)

    def evict_worker(self, group: int) -> None:
        """The controller then deletes the leader, in the foreground: it is gone when all of its
        workers are."""
        members = self.members(group)
        together([self.pods[i].end for i in reversed(members)])
        for i in members:
            self.pods[i] = self.create(i)
        self.wait_group(group)

    def members(self, group: int) -> range:
        return range(group * self.size, (group + 1) * self.size)

    def renew(self, i: int) -> None:
        self.pods[i].end()
        self.pods[i] = self.create(i)

    def wait_group(self, group: int) -> None:
        pods = [self.pods[i] for i in self.members(group)]
        wait_for(
            f"{pods[0].name} and its workers to be ready",
            lambda: all(p.ready for p in pods),
            ROLL_S,
        )

    def roll(self, doc: Object) -> None:
        old, self.doc = self.template, doc
        if template_hash(old) == template_hash(self.template):
            return
        for group in reversed(range(self.doc["spec"]["replicas"])):
            self.replace_group(group)


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Makes the calls at the same time. The first failure is raised when all are through."""
    failures: list[BaseException] = []

    def call(f: Callable[[], None]) -> None:
        try:
            f()
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=call, args=(f,)) for f in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


# ---- the load


@dataclasses.dataclass
class Request:
    begun: float
    ended: float = 0.0
    error: str = ""
    first: float = 0.0  # when its answer began; 0: it did not


class Streams:
    """Clients of the router's service, which send streamed requests all the time."""

    def __init__(self, node: Node, service: str) -> None:
        self.node, self.service = node, service
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.done: list[Request] = []
        self.threads = [threading.Thread(target=self._client, args=(i,)) for i in range(STREAMS)]
        for t in self.threads:
            t.start()

    def stop(self) -> None:
        self.over.set()
        for t in self.threads:
            t.join()

    def _client(self, i: int) -> None:
        r = random.Random(i)
        while not self.over.is_set():
            # As kube-proxy: any endpoint that is ready.
            pods = self.node.endpoints(self.service)
            if not pods:
                with self.lock:
                    self.done.append(
                        Request(
                            time.monotonic(),
                            time.monotonic(),
                            "the router's service has no endpoint",
                        )
                    )
                self.over.wait(1)
                continue
            prompt = [r.randrange(300, 1000) for _ in range(int(2 ** r.uniform(4, 10)))]
            q = ask(r.choice(pods).address, prompt, r.randrange(30, 200))
            with self.lock:
                self.done.append(q)
            # Engines that start need the processors, too.
            self.over.wait(r.uniform(0, PAUSE_S))

    def since(self, begun: float) -> list[Request]:
        """Requests that were under way after that."""
        with self.lock:
            return [q for q in self.done if q.ended >= begun]


def ask(address: str, prompt: list[int], tokens: int) -> Request:
    q = Request(time.monotonic())
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    conn = http.client.HTTPConnection(address, 8000, timeout=REQUEST_S)
    got, ended = 0, False
    try:
        conn.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        resp = conn.getresponse()
        if resp.status != 200:
            q.error = f"HTTP {resp.status}: {resp.read(300).decode(errors='replace')}"
        else:
            for raw in resp:
                if not raw.startswith(b"data:"):
                    continue
                if raw[5:].strip() == b"[DONE]":
                    ended = True
                    break
                chunk = json.loads(raw[5:])
                if "error" in chunk:
                    q.error = str(chunk["error"])[:300]
                for choice in chunk.get("choices", ()):
                    got += len(choice.get("token_ids") or [])
                    q.first = q.first or time.monotonic()
            if not q.error and (got != tokens or not ended):
                q.error = f"{got} tokens of {tokens}, {'ended' if ended else 'broken off'}"
    except (OSError, http.client.HTTPException, ValueError) as err:
        q.error = f"{type(err).__name__}: {err}"
    finally:
        conn.close()
    q.ended = time.monotonic()
    return q


# ---- what is done


class Test:
    def __init__(self, switch_user: bool, values: pathlib.Path) -> None:
        self.values = yaml.safe_load(values.read_text())
        self.node = Node(OUT, images(), switch_user, say)
        self.problems: list[str] = []
        self.steps: list[Object] = []
        docs = render(self.values)
        key = OUT / "cluster.key"
        subprocess.run(
            [ROOT / "bin" / "kvspray", "keygen", "cluster", "--out", key],
            check=True,
            capture_output=True,
        )
        self.node.configs["Secret/kvspray"] = {"cluster.key": key.read_text()}
        self.workloads: dict[str, Workload] = {}
        self.apply(docs)

    def apply(self, docs: list[Object]) -> dict[str, Object]:
        """Takes what has no pods at once; returns the workloads."""
        out = {}
        for d in docs:
            name = d["metadata"]["name"]
            if d["kind"] == "ConfigMap":
                self.node.configs[f"ConfigMap/{name}"] = d["data"]
            elif kind := {
                "StatefulSet": Workload,
                "Deployment": Workload,
                "LeaderWorkerSet": Groups,
            }.get(d["kind"]):
                out[name] = d
                self.workloads.setdefault(name, kind(self.node, d))
        self.node.services = [d for d in docs if d["kind"] == "Service"]
        self.budgets = {
            d["metadata"]["name"]: d["spec"]["maxUnavailable"]
            for d in docs
            if d["kind"] == "PodDisruptionBudget"
        }
        return out

    def problem(self, text: str) -> None:
        self.problems.append(text)
        say(f"PROBLEM: {text}")

    @contextmanager
    def step(
        self, name: str, allowed: Callable[[Request], bool] = lambda q: False, unwell: str = ""
    ) -> Iterator[None]:
        """No request may fail but those that are allowed to; of the pod unwell a container is
        killed for its liveness probe."""
        say(name)
        begun, at = time.monotonic(), len(self.node.events)
        yield
        time.sleep(1)
        requests = self.streams.since(begun)
        failed = [q for q in requests if q.error and not allowed(q)]
        excused = sum(1 for q in requests if q.error and allowed(q))
        for q in failed[:5]:
            say(
                f"  failed after {q.ended - q.begun:.1f} s, {q.ended - begun:.1f} s into the step: "
                f"{q.error}"
            )
        if failed:
            self.problem(f"{name}: {len(failed)} of {len(requests)} requests failed")
        took = time.monotonic() - begun
        for e in self.node.events[at:]:
            if e.pod == unwell and "its liveness probe" in e.text:
                continue
            if (
                ", killed: " in e.text
                or "does not start" in e.text
                or "preStop of" in e.text
                or "is killed" in e.text
                or "out of order" in e.text
            ):
                self.problem(f"{name}: {e.pod}: {e.text}")
        self.steps.append(
            {
                "step": name,
                "seconds": round(took, 1),
                "requests": len(requests),
                "failed": len(failed),
                "broken with their pod": excused,
            }
        )
        say(
            f"  {took:.1f} s, {len(requests)} requests, {len(failed)} "
            f"failed{f', {excused} broken with their pod' if excused else ''}"
        )

    def workload(self, part: str) -> Workload:
        return self.workloads[f"{RELEASE}-{part}"]

    def upgrade(self, change: Callable[[Object], None], parts: tuple[str, ...]) -> None:
        """helm upgrade: the controllers of all workloads work at the same time."""
        change(self.values)
        docs = self.apply(render(copy.deepcopy(self.values)))
        before = {n: [p.template for p in w.pods] for n, w in self.workloads.items()}
        together([lambda w=w: w.roll(docs[w.name]) for w in self.workloads.values()])
        rolled = {n for n, w in self.workloads.items() if [p.template for p in w.pods] != before[n]}
        if rolled != {f"{RELEASE}-{p}" for p in parts}:
            self.problem(f"the upgrade rolled {sorted(rolled)}, expected {parts}")

    def run(self, steps: set[str]) -> None:
        for w in self.workloads.values():
            w.start()
        wait_for("all pods to be ready", self.up, START_S)
        say("all pods are ready")
        self.waited()
        self.streams = Streams(self.node, f"{RELEASE}-router")
        try:
            with self.step("load without a change"):
                wait_for("transfers to each decode engine", self.received, ROLL_S)
                wait_for("answers", lambda: len(self.streams.done) >= 4 * STREAMS, ROLL_S)
            if "decode" in steps:
                with self.step("rolling update of decode"):
                    self.upgrade(
                        lambda v: v["decode"].update(podAnnotations={"rolled": "1"}), ("decode",)
                    )
            if "worker" in steps:
                with self.step("eviction of a worker of decode-0"):
                    groups = self.workload("decode")
                    assert isinstance(groups, Groups)
                    groups.evict_worker(0)
            if "prefill" in steps:
                with self.step("rolling update of prefill"):
                    self.upgrade(
                        lambda v: v["prefill"].update(podAnnotations={"rolled": "1"}), ("prefill",)
                    )
            if "router" in steps:
                with self.step("rolling update of the router"):
                    self.upgrade(
                        lambda v: v.update(router={"podAnnotations": {"rolled": "1"}}), ("router",)
                    )
            if "sidecars" in steps:
                # Which is one of prefill and decode, at the same time: a sidecar is in the pod of
                # its engine.
                with self.step("rolling update of sidecars, prefill and decode"):
                    self.upgrade(
                        lambda v: v.update(sidecar={"config": {"log": {"level": "debug"}}}),
                        ("prefill", "decode"),
                    )
            if "restart" in steps:
                with self.step("kill -9 of each sidecar in turn"):
                    for pod in (*self.workload("prefill").pods, *self.workload("decode").pods):
                        self.restart(pod.container("kvspray"))
            if "liveness" in steps:
                pod = self.workload("decode").pods[1]
                with self.step(f"{pod.name} fails its liveness probe once", unwell=pod.name):
                    self.fail_liveness(pod)
            if "drain" in steps:
                with self.step("drain of a node with prefill-0 and decode-0"):
                    self.drain([("prefill", 0), ("decode", 0)])
            if "kill" in steps:
                killed = time.monotonic()
                with self.step(
                    "kill -9 of the pod decode-1",
                    lambda q: 0 < q.first <= killed + 2 and q.begun < killed + 1,
                ):
                    self.workload("decode").replace(1, Pod.kill)
            with self.step("the last requests"):
                self.streams.stop()
        finally:
            self.streams.stop()
        self.probes()

    def received(self) -> bool:
        """Whether the sidecars of all decode engines have received blocks."""
        for pod in self.node.pods.values():
            if pod.labels["app.kubernetes.io/component"] != "decode":
                continue
            conn = http.client.HTTPConnection(pod.address, 7651, timeout=5)
            conn.request("GET", "/metrics")
            lines = conn.getresponse().read().decode().splitlines()
            moved = [
                x
                for x in lines
                if x.startswith("kvspray_transfer_payload_bytes_total{")
                and 'side="destination"' in x
                and not x.endswith(" 0")
            ]
            conn.close()
            if not moved:
                return False
        return True

    def up(self) -> bool:
        for w in self.workloads.values():
            for c in (c for p in w.pods for c in (*p.init, *p.containers)):
                if c.restarts > 1:
                    raise Failed(
                        f"{c.name} of {c.pod.name} does not stay up; {c.log} ends "
                        f"with\n{c.log.read_text(errors='replace')[-3000:]}"
                    )
        return all(w.ready() for w in self.workloads.values())

    def waited(self) -> None:
        """No engine was taken for ready before it was: its startup probe failed first."""
        for part in ("prefill", "decode"):
            for pod in self.workload(part).pods:
                engine = pod.container("engine")
                if "startupProbe" not in engine.spec:
                    continue  # a worker's, which has no API server
                if engine.counts["startup"] < 2 or not engine.counts["startup failed"]:
                    self.problem(
                        f"{pod.name}: the startup probe of the engine did not wait for it: "
                        f"{dict(engine.counts)}"
                    )

    def probes(self) -> None:
        """No probe failed of a pod that was up, and none restarted a container."""
        for w in self.workloads.values():
            for pod in w.pods:
                for c in (*pod.init, *pod.containers):
                    if (
                        c.counts["liveness failed"]
                        or c.counts["readiness failed"] > c.restarts * 5 + 3
                    ):
                        self.problem(f"{pod.name}: probes of {c.name}: {dict(c.counts)}")

    def restart(self, c: Container) -> None:
        n = c.restarts
        c.kill()
        wait_for(f"{c.name} of {c.pod.name} to be back", lambda: c.restarts > n and c.ready, 60)
        time.sleep(3)

    def fail_liveness(self, pod: Pod) -> None:
        """The preStop hook of a killed engine marks it as leaving. The engine starts again in the
        same pod, and routers have to use it again."""
        engine = pod.container("engine")
        n = engine.restarts
        engine.live_fails = True
        wait_for(
            f"the engine of {pod.name} to be back",
            lambda: engine.restarts > n and engine.ready,
            ROLL_S,
        )
        for router in self.workload("router").pods:
            wait_for(
                f"{router.name} to use {pod.name} again",
                lambda router=router: self.used(router, pod),
                ROLL_S,
            )

    @staticmethod
    def used(router: Pod, engine: Pod) -> bool:
        """Whether the engine has requests of this router now."""
        conn = http.client.HTTPConnection(router.address, 8000, timeout=5)
        try:
            conn.request("GET", "/health")
            backends = json.loads(conn.getresponse().read())["backends"]
        finally:
            conn.close()
        return any(
            f"//{engine.address}:" in b["url"] and b["in_flight"] > 0 and not b.get("leaving")
            for b in backends
        )

    def drain(self, pods: list[tuple[str, int]]) -> None:
        """Evicts pods as kubectl drain does: all at once, so far as their budgets allow it."""

        def evict(part: str, i: int) -> None:
            w = self.workload(part)
            wait_for(
                f"the budget of {part}",
                lambda: sum(not p.ready for p in w.pods) < self.budgets[w.name],
                ROLL_S,
            )
            pod = w.pods[i]
            w.replace(i)
            if pod.took > pod.grace:
                self.problem(f"{pod.name} took {pod.took:.1f} s to end, of {pod.grace:g}")

        together([lambda p=p: evict(*p) for p in pods])


def inside(argv: list[str]) -> int | None:
    """The status of this program in namespaces of its own; None where the kernel forbids them."""
    words = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    for extra in (
        [["--user", "--map-root-user"]] if os.geteuid() else [[], ["--user", "--map-root-user"]]
    ):
        command = [words[0], *extra, *words[1:]]
        if (
            subprocess.run(
                [*command, "ip", "link", "add", "probe", "type", "bridge"], capture_output=True
            ).returncode
            == 0
        ):
            mode = "other" if extra else "root"
            return subprocess.run(
                [*command, sys.executable, *argv], env={**os.environ, INSIDE: mode}
            ).returncode
    return None


# Those of eight minutes, those of which the first ones are parts, and those for values with groups
# of pods.
STEPS, MORE, GROUPS = (
    ("sidecars", "router", "restart", "liveness", "drain", "kill"),
    ("decode", "prefill"),
    ("worker",),
)


def main() -> int:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument(
        "--steps",
        default=",".join(STEPS),
        help=f"some of {', '.join((*STEPS, *MORE, *GROUPS))}, or all",
    )
    ap.add_argument(
        "--values", type=pathlib.Path, default=HERE / "values.yaml", help="of the chart"
    )
    args = ap.parse_args()
    steps = {*STEPS, *MORE} if args.steps == "all" else set(filter(None, args.steps.split(",")))
    if unknown := steps - {*STEPS, *MORE, *GROUPS}:
        ap.error(f"--steps: {unknown.pop()!r} is none of {', '.join((*STEPS, *MORE, *GROUPS))}")
    if INSIDE not in os.environ:
        if (rc := inside(sys.argv)) is not None:
            return rc
        print(
            "SKIPPED test/pods/pods.py::pods - Skipped: netns: the kernel refuses network "
            "namespaces or bridges to this user"
        )
        print("pods: nothing ran")
        return 0
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    test = None
    try:
        test = Test(os.environ[INSIDE] == "root", args.values)
        test.run(steps)
    except Failed as err:
        print(f"pods: FAILED: {err}", file=sys.stderr)
        return 1
    finally:
        if test:
            test.node.stop()
    total = collections.Counter[str]()
    for s in test.steps:
        total.update({k: v for k, v in s.items() if isinstance(v, int)})
    (OUT / "result.json").write_text(
        json.dumps({"steps": test.steps, "problems": test.problems}, indent=1) + "\n"
    )
    print(f"\n{'step':50}{'seconds':>9}{'requests':>10}{'failed':>8}{'broken with their pod':>24}")
    for s in test.steps:
        print(
            f"{s['step']:50}{s['seconds']:9}{s['requests']:10}{s['failed']:8}"
            f"{s['broken with their pod']:24}"
        )
    print(
        f"pods: {'FAILED, ' if test.problems else ''}{total['requests']} requests, "
        f"{total['failed']} failed, {total['broken with their pod']} broken with a killed pod, "
        f"{len(test.problems)} problems, {time.monotonic() - BEGAN:.0f} s"
    )
    return 1 if test.problems else 0


if __name__ == "__main__":
    sys.exit(main())
