"""The package's compiled kernels: which images there must be, and whether they are whole and of one build."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ep_backend.errors import EpError, ranks_by_value

if TYPE_CHECKING:
    from ep_backend.fabric.meeting import Meeting

IMAGE_KERNELS = {
    "dispatch": ("dispatch", "send", "await", "order", "place"),
    "combine": ("combine", "sums"),
    "hybrid": ("rail_send", "forward", "rail_place", "rail_return", "rail_sum"),
    "rings": ("ring_count", "ring_dispatch", "ring_order", "ring_place", "ring_combine"),
    "per_expert": ("expert_send", "expert_await", "expert_place", "expert_return", "expert_sum"),
    "refuse": ("refuse",),
}
PUT_IMAGES = ("hybrid", "refuse")  # have a second form, NAME_put, that reaches other nodes by NVSHMEM's puts
PUTS_NEED = "nvidia-nvshmem-cu13 installed before, or NVSHMEM_HOME set"
IMAGES = Path(__file__).resolve().parents[2] / "images"


@dataclass(frozen=True)
class Build:
    """What kernels/build.py says in images.json, which it writes last: a folder without it has no images."""

    sources: str
    """Digest of the sources."""
    nvshmem: str | None
    """Whose device code the images of puts hold; None: there are none."""
    sizes: dict[str, int]
    """Bytes by file."""

    @property
    def architectures(self) -> list[str]:
        return sorted({file.split(".")[1] for file in self.sizes})


def read(folder: Path) -> Build:
    """Raises EpError."""
    file = folder / "images.json"
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in said["images"].items()}
        return Build(str(said["sources"]), None if said["nvshmem"] is None else str(said["nvshmem"]), sizes)
    except FileNotFoundError:
        raise EpError(f"the package has no compiled kernels: {folder} has no images.json") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise EpError(f"{file} cannot be read, or is of an earlier kernels/build.py") from None


def check(build: Build, folder: Path, architecture: str, *, puts: bool) -> None:
    """Raise EpError unless every image is there for the architecture, whole, and of the sources beside the package.
    ``puts``: with the images of puts, too."""
    builder = _builder(folder)
    if builder is not None and build.sources != (here := runpy.run_path(str(builder))["digest"]()):
        raise EpError(f"the images are of other sources than kernels/ (digest {build.sources[:12]}, must be {here[:12]})")
    if architecture not in build.architectures:
        raise EpError(f"no images for {architecture}: kernels/build.py made them for {', '.join(build.architectures)}")
    if puts and build.nvshmem is None:
        raise EpError(f"no images of puts, which need NVSHMEM where they are built ({PUTS_NEED})")
    for name in (*IMAGE_KERNELS, *(f"{image}_put" for image in PUT_IMAGES if puts)):
        file = f"{name}.{architecture}.cubin"
        path, size = folder / file, build.sizes.get(file)
        if size is None or not path.exists():
            raise EpError(f"the image {file} is not there, and all of a build are needed")
        if path.stat().st_size != size:
            raise EpError(f"the image {file} has {path.stat().st_size} bytes, must have {size} as images.json says")


def same_nvshmem(image: str | None, library: str) -> None:
    """Device code and library of NVSHMEM share structures that change between minor versions."""
    if (image or "").split(".")[:2] != library.split(".")[:2]:
        raise EpError(
            f"the images of remote puts hold NVSHMEM {image}, the process has loaded {library}: they must be "
            "built against the library that torch brings (nvidia-nvshmem-cu13)"
        )


def agree(meeting: Meeting, find: Callable[[], Build]) -> None:
    """Raise EpError on every rank if ``find`` does on one, or if ranks have images of different sources. Collective."""
    mine: tuple[str | None, str | None]
    try:
        mine = find().sources, None
    except EpError as error:
        mine = None, str(error)
    everyone = meeting.exchange("nvshmem/images", mine)
    if any(error for _, error in everyone):
        raise EpError(ranks_by_value(error for _, error in everyone))
    if len({sources for sources, _ in everyone}) > 1:
        raise EpError(
            "ranks of one buffer must run images of the same sources, but digests differ: "
            f"{ranks_by_value(sources[:12] for sources, _ in everyone)}; install one build of the package on every host"
        )


def remedy(folder: Path) -> str:
    """How the images of this folder are made."""
    if _builder(folder) is not None:
        return "run python3 kernels/build.py"
    return "EP_CUDA=1 pip install .[cuda,serve] where nvcc is on PATH"


def _builder(folder: Path) -> Path | None:
    """The build script, where the package lies in its source tree."""
    kernels = folder.parents[1] / "kernels"
    return kernels / "build.py" if (kernels / "include" / "ep" / "args.h").exists() else None
