"""docs/from-sglang-to-kubernetes.md, run as it is written: each `sh` block prints the `text` block that follows it."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "from-sglang-to-kubernetes.md"
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_step(tmp_path: Path) -> None:
    blocks = [*BLOCK.findall(PAGE.read_text()), ("", "")]
    steps = [(text, after if follows == "text" else "") for (kind, text), (follows, after) in pairwise(blocks) if kind == "sh"]
    assert len(steps) >= 6
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ep-backend").write_text(f'#!/bin/sh\nexec {sys.executable} -m ep_backend "$@"\n')
    (programs / "ep-backend").chmod(0o755)
    place = tmp_path / "place"
    place.mkdir()
    for text, printed in steps:
        done = subprocess.run(
            ["bash", "-euc", text],
            cwd=place,
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        assert done.stdout == printed, text
