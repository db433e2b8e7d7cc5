"""Container images of what ran before, and the engine's version, where an image's tag tells it."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ep_backend.deployment.engines import table
from ep_backend.deployment.engines.traits import Engine
from ep_backend.deployment.migrate.notes import Note
from ep_backend.deployment.migrate.roles import Draft

# Repositories whose tags are the engine's version; tags of others (Dynamo's, llm-d's) are their own.
REPOSITORIES: dict[Engine, tuple[str, ...]] = {"vllm": ("vllm", "vllm-openai"), "sglang": ("sglang",)}
TAG = re.compile(r"v?(\d+\.\d+\.\d+(?:\.?(?:post|rc)\d+)?)(?![\d.])")


def version_of(engine: Engine, image: str) -> str | None:
    """The engine's version as `vllm/vllm-openai:v0.26.0` tells it."""
    name, _, tag = image.partition("@")[0].rpartition("/")[2].partition(":")
    found = TAG.match(tag)
    return found[1] if found and name in REPOSITORIES[engine] else None


def set_images(document: dict[str, Any], drafts: Sequence[Draft]) -> Iterator[Note]:
    """Puts the images into the document: the target's, or each role's own where they differ."""
    shared = len({(each.engine, each.image) for each in drafts}) == 1
    for each in drafts[:1] if shared else drafts:
        role, place = ("all", "target") if shared else (each.name, f"roles.{each.name}")
        version = version_of(each.engine, each.image) if each.image else None
        image: dict[str, Any] = {"name": each.image} if each.image else {}
        if version is not None:
            image["packages"] = {each.engine: version}
        else:
            tells = f"image {each.image} does not tell it" if each.image else "nothing tells it"
            why = f"{tells}; set {place}.image.packages; until then flags are judged by {table(each.engine, None).version}"
            yield Note("left out", role, f"version of {each.engine}", "", why)
        if each.image:
            why = "it needs this package beside the engine: the engine loads it as a plug-in"
            yield Note("changed", role, f"image {each.image}", f"{place}.image.name", why)
        if image:
            (document["target"] if shared else document["roles"][each.name])["image"] = image
