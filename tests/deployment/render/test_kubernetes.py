"""Manifests: valid by the API's schemas, and with what expert-parallel engines need of Kubernetes."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from ep_backend.deployment.render import render

Object = dict[str, Any]
HERE = Path(__file__).parent
DEPLOY = HERE.parents[2] / "deploy"
VERSION = "1.33"
KINDS = json.loads((HERE / "schemas" / "lws.json").read_text())["$defs"]
INPUTS = [*sorted(HERE.glob("golden/*.yaml")), *sorted(DEPLOY.glob("deepseek*.yaml")), DEPLOY / "qwen3-235b-rail-only.yaml"]


def documents(text: str) -> list[Object]:
    return list(YAML(typ="safe").load_all(text))


def groups(objects: list[Object]) -> Iterator[Object]:
    """The specs of LeaderWorkerSets, also inside a DisaggregatedSet."""
    for each in objects:
        if each["kind"] == "LeaderWorkerSet":
            yield each["spec"]
        elif each["kind"] == "DisaggregatedSet":
            yield from (role["spec"] for role in each["spec"]["roles"])


def templates(objects: list[Object]) -> Iterator[Object]:
    for group in groups(objects):
        yield group["leaderWorkerTemplate"]["leaderTemplate"]
        yield group["leaderWorkerTemplate"]["workerTemplate"]


def check(objects: list[Object]) -> None:
    for each in objects:
        if each["kind"] in KINDS:
            schema = {"$ref": f"#/$defs/{each['kind']}", "$defs": KINDS}
            Draft202012Validator(schema).validate(each)
        else:
            kubernetes_validate.validate(each, VERSION, strict=True)
    for template in templates(objects):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template["metadata"]}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("kind", ["lws", "disaggregatedset"])
@pytest.mark.parametrize("file", INPUTS, ids=lambda file: file.stem)
def test_manifests_are_valid(file: Path, kind: str) -> None:
    objects = documents(render(file, [kind]).files[f"{kind}.yaml"])  # type: ignore[list-item]
    check(objects)
    assert len(list(templates(objects))) == 4
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)


def test_the_checks_find_a_wrong_field() -> None:
    def broken(change: Callable[[Object], None]) -> list[Object]:
        objects = documents((HERE / "golden" / "sglang" / "lws.yaml").read_text())
        change(next(each for each in objects if each["kind"] == "LeaderWorkerSet")["spec"])
        return objects

    for change in (
        lambda spec: spec["leaderWorkerTemplate"].update(restartPolicy="Always"),
        lambda spec: spec.update(workers=2),
        lambda spec: spec["leaderWorkerTemplate"]["workerTemplate"]["spec"].update(hostnetwork=True),
        lambda spec: spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["startupProbe"].update(period=1),
    ):
        with pytest.raises(Exception, match=r"restartPolicy|workers|hostnetwork|period|Always"):
            check(broken(change))


@pytest.mark.parametrize("file", INPUTS, ids=lambda file: file.stem)
def test_what_engines_need_of_a_pod(file: Path) -> None:
    deployment = YAML(typ="safe").load(file.read_text())
    objects = documents(render(file, ["lws"]).files["lws.yaml"])
    for group in groups(objects):
        template = group["leaderWorkerTemplate"]
        assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert group["rolloutStrategy"]["rollingUpdateConfiguration"]["maxSurge"] == 0
        leader, worker = (template[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate"))
        start = leader["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 2700
        # All that a leader has more.
        assert {key for key in leader if leader[key] != worker.get(key)} == {
            "ports", "startupProbe", "readinessProbe", "livenessProbe",
        }  # fmt: skip
        for spec in (template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]):
            (container,) = spec["containers"]
            assert container["command"][2].startswith("find /dev/shm -mindepth 1 -delete;")
            assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
            assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, **deployment["target"]["pod"]["rdma"]}
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
            assert all("subPath" not in mount for mount in container["volumeMounts"])
            assert spec["terminationGracePeriodSeconds"] >= 300


def test_services_find_leaders_only_and_configurations_are_those_mounted(rendered: Callable[..., Path]) -> None:
    objects = documents((rendered("sglang") / "lws.yaml").read_text())
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    for role, port in (("prefill", 20000), ("decode", 22000)):
        service = by_name["Service", f"small-{role}-leader"]["spec"]
        assert service["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
        labels = by_name["LeaderWorkerSet", f"small-{role}"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"][
            "labels"
        ]
        assert labels.items() <= service["selector"].items()
        assert service["ports"][0]["port"] == port
    for template in templates(objects):
        sources = next(v for v in template["spec"]["volumes"] if v["name"] == "ep-backend")["projected"]["sources"]
        mounted = {}
        for source in sources:
            ((kind, reference),) = source.items()
            found = by_name["ConfigMap" if kind == "configMap" else "Secret", reference["name"]]
            assert found["immutable"]
            mounted |= found.get("data", {}) | found.get("stringData", {})
        assert set(mounted) == {"launch.sh", "engine.yaml", "settings.json"}
    secrets = [each for each in objects if each["kind"] == "Secret"]
    assert len(secrets) == 2
    assert "not-a-real-key" not in json.dumps([each for each in objects if each["kind"] != "Secret"])


def test_a_change_of_the_role_rolls_its_pods(rendered: Callable[..., Path]) -> None:
    def configurations(*replacements: tuple[str, str]) -> set[str]:
        objects = documents((rendered("vllm", *replacements, kinds=("lws",)) / "lws.yaml").read_text())
        return {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}

    before, after = configurations(), configurations(("max-num-seqs: 128", "max-num-seqs: 64"))
    assert {name.rpartition("-")[0] for name in before ^ after} == {"small-decode"}


@pytest.mark.parametrize("kind", ["lws", "disaggregatedset"])
def test_prometheus_finds_the_agent_of_every_rank(rendered: Callable[..., Path], kind: str) -> None:
    out = rendered("sglang", ("  pod: {", "  pod: {namespace: moe, "), kinds=(kind,))
    secret, *monitors = documents((out / "podmonitor.yaml").read_text())
    kubernetes_validate.validate(secret, VERSION, strict=True)
    assert secret["stringData"] == {"key": "not-a-real-key"}
    assert {each["metadata"]["namespace"] for each in (secret, *monitors)} == {"moe"}
    assert (out / "podmonitor.yaml").stat().st_mode & 0o077 == 0
    pods = list(groups(documents((out / f"{kind}.yaml").read_text())))
    for monitor, group, role, nodes, ranks in zip(monitors, pods, ("prefill", "decode"), (2, 1), (16, 8), strict=True):
        settings = json.loads((out / role / "settings.json").read_text())
        assert settings["agent_host"] == "0.0.0.0"
        template = group["leaderWorkerTemplate"]
        found = [
            address
            for node in range(nodes)
            for address in scraped(monitor, template["leaderTemplate" if node == 0 else "workerTemplate"], node, secret)
        ]
        per_node = ranks // nodes
        assert found == [f"[fd00::{rank // per_node}]:{settings['agent_port'] + rank}" for rank in range(ranks)]


def scraped(monitor: Object, template: Object, index: int, secret: Object) -> Iterator[str]:
    """The addresses that a pod's endpoints have after Prometheus relabelled them."""
    assert monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        credentials = endpoint["authorization"]["credentials"]
        assert (credentials["name"], credentials["key"] in secret["stringData"]) == (secret["metadata"]["name"], True)
        label = "__meta_kubernetes_pod_label_leaderworkerset_sigs_k8s_io_worker_index"
        target = {label: str(index), "__address__": f"[fd00::{index}]:{ports[endpoint['port']]}"}
        for rule in endpoint["relabelings"]:
            value = ";".join(target[name] for name in rule["sourceLabels"])
            match = re.fullmatch(rule["regex"], value)
            if rule.get("action", "replace") == "keep":
                if not match:
                    break
            elif match:
                target[rule["targetLabel"]] = match.expand(rule["replacement"].replace("${1}", r"\g<1>"))
        else:
            yield target["__address__"]


def test_agents_on_loopback_are_nobodys_targets(rendered: Callable[..., Path]) -> None:
    """Without an address that others reach there is nothing to scrape, and no key lies about."""
    out = rendered("sglang", ("control: {host: 0.0.0.0, key: not-a-real-key}", "control: {key: not-a-real-key}"))
    assert not (out / "podmonitor.yaml").exists()
    containers = [template["spec"]["containers"][0] for template in templates(documents((out / "lws.yaml").read_text()))]
    assert [[port["name"] for port in each.get("ports", [])] for each in containers] == [["http"], [], ["http"], []]
