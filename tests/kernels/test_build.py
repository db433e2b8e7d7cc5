"""The images compile, and the tuned ones neither spill nor use a stack."""

from __future__ import annotations

import hashlib
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ep_backend.errors import EpError
from ep_backend.fabric.nvshmem import images, launch
from ep_backend.fabric.nvshmem.images import Build

BUILD = Path(__file__).resolve().parents[2] / "kernels" / "build.py"


@pytest.fixture(scope="module")
def builder() -> dict[str, Any]:
    return runpy.run_path(str(BUILD))


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine compiles slowly
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_images_compile_and_are_lean(builder: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = builder["build"](tmp_path)
    assert all(p.exists() and p.stat().st_size for p in paths)
    report = json.loads((tmp_path / "images.json").read_text())["kernels"]
    lean = [k for k in report if "sm_90a" in k["image"]]
    assert {k["kernel"] for k in lean} >= {
        "ep_dispatch",
        "ep_send",
        "ep_await",
        "ep_place",
        "ep_combine",
        "ep_expert_send",
        "ep_expert_sum",
        "ep_ring_dispatch",
        "ep_ring_combine",
    }
    for k in lean:
        assert k["spill_bytes"] == 0 and k["stack_bytes"] == 0, k
        most = 72 if k["kernel"] in ("ep_ring_dispatch", "ep_ring_combine") else 64
        assert 0 < k["registers"] <= most, "a block of 1024 threads has 64 registers a thread, one of 896 has 72"
    assert "registers" in capsys.readouterr().out
    for p in paths:
        if p.suffix == ".cubin":
            assert (b"nvshmem" in p.read_bytes()) == ("_put" in p.name), "peer stores need no NVSHMEM device code"
    assert any("_put" in p.name for p in paths) == (builder["find_nvshmem"]() is not None)


REPORT = """ptxas info    : Compiling entry function 'ep_x' for 'sm_90a'
ptxas info    : Function properties for ep_x
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 512 bytes smem
"""


def test_a_spill_is_read_from_the_report(builder: dict[str, Any]) -> None:
    (found,) = builder["report"](REPORT, "x.sm_90a.cubin")
    assert (found.kernel, found.registers, found.shared_bytes) == ("ep_x", 64, 512)
    assert (found.stack_bytes, found.spill_bytes) == (16, 20)


def nvcc(builder: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails_on: str = "") -> None:
    """A compiler that writes a few bytes, but of one image half of them and an error."""

    def compile(name: str, arch: str, *arguments: str) -> str:
        path = Path(arguments[arguments.index("-o") + 1])
        path.write_bytes(name.encode())
        if path.name == fails_on:
            raise builder["BuildError"](f"nvcc failed on {name}.cu")
        return REPORT.replace("16 bytes stack frame, 8 bytes spill stores, 12", "0 bytes stack frame, 0 bytes spill stores, 0")

    monkeypatch.setitem(builder["build"].__globals__, "_nvcc", compile)


def nvshmem(builder: dict[str, Any], monkeypatch: pytest.MonkeyPatch, home: Path | None) -> None:
    monkeypatch.setitem(builder["build"].__globals__, "find_nvshmem", lambda: home)
    monkeypatch.setitem(builder["build"].__globals__, "nvshmem_version", lambda home: "3.4.5")


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_build_replaces_all_of_the_one_before(
    builder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc(builder, monkeypatch)
    nvshmem(builder, monkeypatch, tmp_path)
    (out := tmp_path / "images").mkdir()
    (out / "notes.txt").touch()
    first = {p.name for p in builder["build"](out)}
    assert len(first) == 2 * 8 + 1 and names(out) == first | {"notes.txt"}
    build = images.read(out)
    assert build.nvshmem == "3.4.5" and build.architectures == ["sm_100a", "sm_90a"]
    assert build.sizes == {p.name: p.stat().st_size for p in out.glob("*.cubin")}
    nvshmem(builder, monkeypatch, None)
    second = {p.name for p in builder["build"](out)}
    puts = {f"{image}_put.sm_{n}a.cubin" for image in images.PUT_IMAGES for n in (90, 100)}
    assert names(out) == second | {"notes.txt"} and first - second == puts
    assert images.read(out).nvshmem is None


@pytest.mark.parametrize("fails_on", ["rings.sm_100a.cubin", "hybrid_put.sm_90a.o", "hybrid_put.sm_100a.cubin"])
def test_a_build_that_fails_leaves_no_image(
    fails_on: str, builder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvshmem(builder, monkeypatch, tmp_path)
    nvcc(builder, monkeypatch)
    builder["build"](tmp_path / "images")
    nvcc(builder, monkeypatch, fails_on)
    with pytest.raises(builder["BuildError"], match="nvcc failed"):
        builder["build"](tmp_path / "images")
    assert names(tmp_path / "images") == set()
    with pytest.raises(EpError, match=r"no compiled kernels: .*images has no images\.json"):
        images.read(tmp_path / "images")


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree with images of its own, which the compiler did not see."""
    shutil.copytree(BUILD.parent, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    builder = runpy.run_path(str(tmp_path / "kernels" / "build.py"))
    nvcc(builder, monkeypatch)
    nvshmem(builder, monkeypatch, tmp_path)
    builder["build"](tmp_path / "ep_backend" / "images", ("-DEP_TRACE",))
    return tmp_path


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a kernel": lambda tree: append(tree / "kernels" / "rings.cu"),
    "a header": lambda tree: append(tree / "kernels" / "include" / "ep" / "layout.h"),
    "a header more": lambda tree: (tree / "kernels" / "include" / "more.cuh").touch(),
    "a name": lambda tree: (tree / "kernels" / "combine.cu").rename(tree / "kernels" / "combined.cu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_images_of_other_sources_are_refused(change: str, built: Path) -> None:
    folder = built / "ep_backend" / "images"
    build = images.read(folder)
    (built / "kernels" / "README.md").write_text("is no source")
    images.check(build, folder, "sm_90a", puts=True)
    CHANGES[change](built)
    with pytest.raises(EpError, match=rf"of other sources than kernels/ \(digest {build.sources[:12]}, must be "):
        images.check(build, folder, "sm_90a", puts=True)
    assert images.remedy(folder) == "run python3 kernels/build.py"
    shutil.rmtree(built / "kernels")  # as in a wheel
    images.check(build, folder, "sm_90a", puts=True)
    assert "EP_CUDA=1 pip install" in images.remedy(folder)


def test_the_digest_is_of_names_and_contents_in_order(builder: dict[str, Any]) -> None:
    kernels = BUILD.parent
    headers = [f"include/ep/{p.name}" for p in (kernels / "include" / "ep").iterdir()]
    text = b""
    for name in sorted([p.name for p in kernels.iterdir() if p.suffix == ".cu"] + headers):
        content = (kernels / name).read_bytes()
        text += f"{name} {len(content)}\n".encode() + content
    assert builder["digest"]() == hashlib.sha256(text).hexdigest()


def test_an_image_that_is_missing_or_cut_is_refused(built: Path) -> None:
    folder = built / "ep_backend" / "images"
    build = images.read(folder)
    with pytest.raises(EpError, match=r"no images for sm_120a: .* for sm_100a, sm_90a"):
        images.check(build, folder, "sm_120a", puts=False)
    (folder / "hybrid_put.sm_90a.cubin").unlink()
    images.check(build, folder, "sm_90a", puts=False)
    with pytest.raises(EpError, match=r"hybrid_put\.sm_90a\.cubin is not there"):
        images.check(build, folder, "sm_90a", puts=True)
    with pytest.raises(EpError, match=r"no images of puts, .*nvidia-nvshmem-cu13 .*NVSHMEM_HOME"):
        images.check(Build(build.sources, None, build.sizes), folder, "sm_90a", puts=True)
    (folder / "rings.sm_90a.cubin").write_bytes(b"r")
    with pytest.raises(EpError, match=r"rings\.sm_90a\.cubin has 1 bytes, must have 5"):
        images.check(build, folder, "sm_90a", puts=False)


class Meeting:
    """Of one rank after the other: the others' values are known."""

    def __init__(self, rank: int, values: list[tuple[str | None, str | None]]) -> None:
        self.rank, self.values = rank, values

    def exchange(self, key: str, value: tuple[str | None, str | None]) -> list[tuple[str | None, str | None]]:
        assert value == self.values[self.rank]
        return self.values


def agreed(values: list[tuple[str | None, str | None]]) -> set[str]:
    """What the ranks raise."""

    def find(rank: int) -> Build:
        sources, error = values[rank]
        if sources is None:
            raise EpError(error)
        return Build(sources, None, {})

    said = set()
    for rank in range(len(values)):
        try:
            images.agree(Meeting(rank, values), lambda rank=rank: find(rank))  # type: ignore[arg-type, misc]
            said.add("")
        except EpError as error:
            said.add(str(error))
    return said


def test_ranks_of_different_builds_all_refuse() -> None:
    assert agreed([("a" * 64, None)] * 4) == {""}
    (said,) = agreed([("a" * 64, None), ("b" * 64, None), ("a" * 64, None)])
    assert "rank 0, 2: aaaaaaaaaaaa; rank 1: bbbbbbbbbbbb; install one build" in said
    (said,) = agreed([("a" * 64, None), (None, "no images for sm_80a"), (None, "no images for sm_80a")])
    assert said == "rank 1, 2: no images for sm_80a"


def test_nvshmem_is_named_by_its_folder(builder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "include" / "non_abi").mkdir(parents=True)
    defines = {"MAJOR": 3, "MINOR": 4, "PATCH": 5}
    text = "".join(f"#define NVSHMEM_VENDOR_{k}_VERSION {v}\n" for k, v in defines.items())
    (tmp_path / "include" / "non_abi" / "nvshmem_version.h").write_text(text)
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    with pytest.raises(builder["BuildError"], match=r"NVSHMEM_HOME=.* has no lib/libnvshmem_device\.a: it must be the folder"):
        builder["build"](tmp_path / "images")
    assert not (tmp_path / "images").exists()
    (tmp_path / "lib" / "libnvshmem_device.a").touch()
    assert builder["find_nvshmem"]() == tmp_path
    assert builder["nvshmem_version"](tmp_path) == "3.4.5"
    (tmp_path / "include" / "non_abi" / "nvshmem_version.h").unlink()
    with pytest.raises(builder["BuildError"], match=r"has no include/non_abi/nvshmem_version\.h"):
        builder["find_nvshmem"]()


def test_nvshmem_is_found_in_the_environment_that_an_isolated_build_does_not_import(
    builder: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVSHMEM_HOME", raising=False)
    monkeypatch.setattr(builder["importlib"].util, "find_spec", lambda name: None)
    monkeypatch.setattr(builder["sysconfig"], "get_path", lambda name: str(tmp_path))
    assert builder["find_nvshmem"]() is None
    home = tmp_path / "nvidia" / "nvshmem"
    for name in (builder["LIBRARY"], builder["VERSION"]):
        (home / name).parent.mkdir(parents=True)
        (home / name).touch()
    assert builder["find_nvshmem"]() == home


def test_device_code_of_another_nvshmem_is_refused() -> None:
    images.same_nvshmem("3.4.5", "3.4.0")
    for image in ("3.3.9", None):
        with pytest.raises(EpError, match=r"hold NVSHMEM .*loaded 3\.4\.5"):
            images.same_nvshmem(image, "3.4.5")


def test_an_image_of_other_sources_is_refused() -> None:
    launch.same_arguments("ep_send", (0, 0, launch.ARGS_BYTES))
    with pytest.raises(EpError, match=rf"image of ep_send takes 968 bytes .*packs {launch.ARGS_BYTES}"):
        launch.same_arguments("ep_send", (0, 0, 968))
