from pathlib import Path

import pytest

from tests.doctor.tree import Tree, good


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return good(tmp_path / "root", tmp_path / "ep_backend" / "images")
