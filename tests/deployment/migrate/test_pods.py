"""What pods had is in the file where it has a place, rendered again from there, and every other key is told."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from ruamel.yaml import YAML

from ep_backend.deployment.migrate import Migrated, Unmovable, migrate
from ep_backend.deployment.render import render
from ep_backend.deployment.schema import Pod

from ..render.test_kubernetes import check, documents

MANIFEST = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: engine}
data: {engine.yaml: "max-num-seqs: 64"}
---
apiVersion: v1
kind: Service
metadata: {name: front}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: dsv3
  namespace: serving
  annotations: {leaderworkerset.sigs.k8s.io/exclusive-topology: rack}
spec:
  rolloutStrategy: {type: RollingUpdate}
  leaderWorkerTemplate:
    size: 2
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      metadata: {annotations: {k8s.v1.cni.cncf.io/networks: rail0}}
      spec:
        runtimeClassName: nvidia
        terminationGracePeriodSeconds: 60
        volumes:
          - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Ti}}
          - {name: models, persistentVolumeClaim: {claimName: models}}
          - {name: ib, hostPath: {path: /dev/infiniband}}
          - {name: conf, configMap: {name: engine}}
          - {name: token, secret: {secretName: hub}}
          - {name: idle, emptyDir: {}}
        containers:
          - name: vllm
            image: vllm/vllm-openai:v0.33.0
            workingDir: /srv
            command: [vllm, serve, /models/DeepSeek-V3, -dp, "16", -ep, --config, /etc/engine/engine.yaml]
            envFrom: [{secretRef: {name: keys}}]
            livenessProbe: {httpGet: {path: /health, port: 8000}}
            resources:
              limits: {nvidia.com/gpu: "8", rdma/ib: "8", memory: 512Gi, cpu: "64", hugepages-2Mi: 5Gi}
              requests: {cpu: "32", memory: 512Gi}
            securityContext: {runAsUser: 0, capabilities: {add: [IPC_LOCK], drop: [ALL]}}
            volumeMounts:
              - {name: shm, mountPath: /dev/shm}
              - {name: models, mountPath: /models, readOnly: true}
              - {name: ib, mountPath: /dev/infiniband}
              - {name: conf, mountPath: /etc/engine}
              - {name: token, mountPath: /run/token, subPath: hf}
          - {name: exporter, image: exporter}
"""


def target_of(made: Migrated) -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load(made.text)["target"]
    return found


@pytest.fixture(scope="module")
def made() -> Migrated:
    return migrate([("dsv3.yaml", MANIFEST)], topology="h200-nvl8-cx7")


def test_what_the_file_has_a_place_for_is_there(made: Migrated) -> None:
    assert target_of(made) == {
        "kind": "lws",
        "pod": {
            "namespace": "serving",
            "shm": "1024GiB",
            "memory": "512GiB",
            "rdma": {"rdma/ib": 8},
            "capabilities": ["IPC_LOCK"],
            "volumes": [
                {"mount": "/models", "source": {"persistentVolumeClaim": {"claimName": "models"}}, "read_only": True},
                {"mount": "/etc/engine", "source": {"configMap": {"name": "engine"}}},
            ],
        },
        "image": {"name": "vllm/vllm-openai:v0.33.0", "packages": {"vllm": "0.33.0"}},
    }
    document = YAML(typ="safe").load(made.text)
    assert document["model"]["source"] == "/models/DeepSeek-V3"
    assert document["roles"]["unified"]["args"] == {"max-num-seqs": 64}


def test_all_else_is_told(made: Migrated) -> None:
    told = {note.what.split(":")[0] for note in made.notes if note.kind == "left out"}
    assert told == {
        *("ConfigMap engine", "Service front", "annotations", "rolloutStrategy", "runtimeClassName"),
        *("terminationGracePeriodSeconds", "volume idle", "workingDir", "envFrom", "livenessProbe", "runAsUser", "drop"),
        *("limit cpu", "limit hugepages-2Mi", "request cpu", "volume at /dev/infiniband", "volume at /run/token"),
        "container exporter",
    }


def test_it_is_rendered_from_there(made: Migrated, tmp_path: Path) -> None:
    file = tmp_path / "dsv3.yaml"
    sockets = "".join(f"      {name}_SOCKET_IFNAME: eth0\n" for name in ("GLOO", "NCCL"))
    file.write_text(made.text.replace("    args:\n", f"    env:\n{sockets}    args:\n"))
    objects = documents(render(file).files["lws.yaml"])
    check(objects)
    assert {each["metadata"]["namespace"] for each in objects} == {"serving"}
    (group,) = (each["spec"]["leaderWorkerTemplate"] for each in objects if each["kind"] == "LeaderWorkerSet")
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        pod = template["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["memory"] == "512Gi"
        volumes = {volume.pop("name"): volume for volume in map(dict, pod["volumes"])}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounted["/models"] == {"persistentVolumeClaim": {"claimName": "models"}}
        assert mounted["/etc/engine"] == {"configMap": {"name": "engine"}}
        assert [mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")] == ["/models"]
        assert not any("hostPath" in volume for volume in volumes.values())


def test_a_container_without_a_command_runs_its_image(made: Migrated) -> None:
    text = MANIFEST.replace("command: [vllm, serve, /models", "args: [--model, /models")
    assert "--model" in text
    assert (
        YAML(typ="safe").load(migrate([("dsv3.yaml", text)], topology="h200-nvl8-cx7").text)["roles"]
        == (YAML(typ="safe").load(made.text)["roles"])
    )


@pytest.mark.parametrize("path", ["/models", "/dev/shm"])
def test_a_mount_that_is_taken_is_refused(path: str) -> None:
    volume = {"mount": path, "source": {"emptyDir": {}}}
    with pytest.raises(ValidationError, match=f"has two volumes at {path}, must have one"):
        Pod.model_validate({"volumes": [{"mount": "/models", "source": {"emptyDir": {}}}, volume]})


def test_a_model_that_no_volume_holds_is_told() -> None:
    made = migrate([("dsv3.yaml", MANIFEST.replace("mountPath: /models,", "mountPath: /model,"))])
    assert [(note.what, note.became) for note in made.notes if "no volume of the pod" in note.why] == [
        ("model /models/DeepSeek-V3", "hostPath /models/DeepSeek-V3")
    ]


def test_one_description_of_two_roles_pods_is_the_larger_and_says_so() -> None:
    roles = []
    for role, part in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        flag = f"""--kv-transfer-config, '{{"kv_connector": "NixlConnector", "kv_role": "{part}"}}'"""
        text = MANIFEST[MANIFEST.index("apiVersion: leaderworkerset") :]
        roles.append(text.replace("name: dsv3", f"name: dsv3-{role}").replace("-ep,", f"-ep, {flag},"))
    roles[1] = roles[1].replace("memory: 512Gi", "memory: 256Gi").replace("namespace: serving", "namespace: other")
    made = migrate([("p.yaml", roles[0]), ("d.yaml", roles[1])])
    assert target_of(made)["pod"]["memory"] == "512GiB"
    told = [(note.role, note.what, note.became) for note in made.notes]
    assert ("decode", "memory 256GiB", "memory: 512GiB") in told
    assert ("decode", "namespace: other", "") in told


def test_a_wrong_quantity_is_one_line() -> None:
    with pytest.raises(Unmovable, match="dsv3: memory is '512 GB', must be a quantity such as 64Gi; correct it"):
        migrate([("dsv3.yaml", MANIFEST.replace("memory: 512Gi", "memory: 512 GB"))])
