"""`ep-backend render`: what it writes, byte by byte, and when it refuses to write."""

import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.deployment.problems import DeploymentError, Finding
from ep_backend.deployment.render import FolderRefused, Rendered, render, write

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
DEPLOY = HERE.parents[2] / "deploy"
TARGETS = {"vllm": ("slurm", "disaggregatedset"), "sglang": ()}


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", TARGETS)
def test_the_golden_files(name: str) -> None:
    found = render(GOLDEN / f"{name}.yaml", TARGETS[name]).files  # type: ignore[arg-type]
    options = "".join(f" --for {kind}" for kind in TARGETS[name])
    assert found == contents(GOLDEN / name), (
        f"if this is meant: cd {GOLDEN.relative_to(HERE.parents[2])} && ep-backend render {name}.yaml --out {name}{options}"
    )


@pytest.mark.parametrize("file", sorted(DEPLOY.glob("[!hl]*.yaml")), ids=lambda file: file.stem)
def test_shipped_deployments_render(file: Path) -> None:
    assert len(render(file).files) > 3
    assert render(file) == render(file)


def test_what_the_kernels_do_not_reach_is_told() -> None:
    """After minutes of loading on every node it would be an error of the engines."""
    reach = {file.stem: told for file in DEPLOY.glob("[!hl]*.yaml") if (told := beyond(render(file).warnings))}
    assert reach == {
        "deepseek-v3-h800-ep128": [
            "roles.prefill.nodes: spans 4 NVLink domains, between which only hybrid goes, with ep.rail: put",
            "roles.decode.nodes: has 128 ranks, and the kernels serve up to 32",
        ],
        "deepseek-v3-h100-sglang": [
            "roles.prefill.nodes: spans 4 NVLink domains, between which only hybrid goes, with ep.rail: put",
            "roles.decode.nodes: has 72 ranks, and the kernels serve up to 32",
        ],
        "kimi-k2-gb200-nvl72": ["roles.decode.nodes: has 48 ranks, and the kernels serve up to 32"],
    }


def beyond(warnings: list[Finding]) -> list[str]:
    told = [finding.problem for finding in warnings if finding.problem.code == "EP016"]
    return [f"{'.'.join(map(str, each.place))}: {each.what.removesuffix(': engines will refuse to start')}" for each in told]


def test_nothing_is_written_while_lint_has_an_error(rendered: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match=r"vllm.yaml:\d+:\d+: roles.decode.args.max-num-sequences: .*\[EP301\]"):
        rendered("vllm", ("max-num-seqs", "max-num-sequences"))
    assert not (tmp_path / "out").exists()


def test_every_target_asked_for_is_judged_as_that_target(rendered: Callable[..., Path]) -> None:
    without_shm = ("shm: 64GiB, ", "")
    rendered("vllm", without_shm)
    with pytest.raises(DeploymentError, match=r"target.pod: gives /dev/shm .*\[EP401\]"):
        rendered("vllm", without_shm, kinds=("slurm", "lws"))


@pytest.mark.parametrize(
    ("replacement", "kind", "complaint"),
    [
        ((", source: /models/DeepSeek-V3", ""), "shell", "model: has a preset only.*set source"),
        (("name: small", "name: small.one"), "lws", "name: is small.one, which names services"),
        (("name: registry.example/vllm-ep:1, ", ""), "lws", "roles.prefill: has no image.*set target.image.name"),
        (("nodes: 4\n", "nodes: 3\n"), "slurm", "topology.nodes: is 3, but each role takes nodes of its own, 4 in all"),
        (("target:\n", "router: {hold: true}\ntarget:\n"), "shell", "router.hold: is true"),
        (("kind: slurm", "kind: local"), None, "target.kind: is local.*shell, slurm, lws"),
    ],
)
def test_what_a_target_needs(
    replacement: tuple[str, str], kind: str | None, complaint: str, rendered: Callable[..., Path]
) -> None:
    with pytest.raises(DeploymentError, match=complaint):
        rendered("vllm", replacement, kinds=(kind,) if kind else ())


def test_one_role_is_no_disaggregated_set(rendered: Callable[..., Path]) -> None:
    text = (GOLDEN / "vllm.yaml").read_text()
    prefill = text[text.index("  prefill:") : text.index("  decode:")]
    unified = prefill.replace("prefill:", "unified:")
    rest = text[text.index("  decode:") : text.index("target:")]
    with pytest.raises(DeploymentError, match="disaggregatedset, which has at least two roles"):
        rendered("vllm", (prefill, unified), (rest, ""), kinds=("disaggregatedset",))


def test_a_folder_that_render_did_not_write_is_left_alone(tmp_path: Path) -> None:
    files = Rendered({"router.sh": "new\n"}, [], "", False)
    (tmp_path / "out" / "prefill").mkdir(parents=True)
    (tmp_path / "out" / "prefill" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "lws.yaml").write_text("old")
    with pytest.raises(FolderRefused, match=r"out holds prefill/notes.txt, which render did not write; choose a new folder"):
        write(files, tmp_path / "out")
    assert (tmp_path / "out" / "lws.yaml").read_text() == "old"
    with pytest.raises(FolderRefused, match=r"notes.txt is a file"):
        write(files, tmp_path / "out" / "prefill" / "notes.txt")
    (tmp_path / "out" / "prefill" / "notes.txt").unlink()
    write(files, tmp_path / "out")
    assert contents(tmp_path / "out") == {"router.sh": "new\n"}, "what another target left there would be applied by mistake"


def test_the_control_key_is_for_the_owner_only(rendered: Callable[..., Path]) -> None:
    out = rendered("sglang")
    holders = {name for name, text in contents(out).items() if "not-a-real-key" in text}
    assert holders == {"prefill/settings.json", "decode/settings.json", "lws.yaml", "podmonitor.yaml"}
    assert {stat.S_IMODE((out / name).stat().st_mode) for name in holders} == {0o600}


@pytest.mark.parametrize(
    ("file", "out", "complaint"),
    [
        ("vllm.yaml", "/proc/no", "--out /proc/no cannot be written: No such file or directory; choose another"),
        ("vllm.yaml", str(GOLDEN), "golden holds sglang/decode/engine.yaml, which render did not write"),
        ("nowhere.yaml", "out", "nowhere.yaml:1:1: cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_call_is_one_line(file: str, out: str, complaint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ep_backend", "render", str(GOLDEN / file), "--out", out]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ep-backend: ") and done.stderr.count("\n") == 1
    assert complaint in done.stderr
