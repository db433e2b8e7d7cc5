"""Tables of flags and variables read from wheels, on wheels made here."""

import json
import zipfile
from pathlib import Path

import pytest

from ep_backend.deployment.engines import extract

VLLM = {
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    def add_cli_args(parser):
        group.add_argument("--max-num-seqs", **kwargs["max_num_seqs"])
        group.add_argument("--quantization", "-q", **kwargs["quantization"])
        group.add_argument("--port", type=int)
        group.add_argument("--log-stats", action=argparse.BooleanOptionalAction)
""",
    "vllm/entrypoints/common/cli_args.py": """
class BaseFrontendArgs:
    chat_template: str | None = None
class Unrelated:
    not_a_flag: int = 1
def make_arg_parser(parser):
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--headless", action="store_true")
""",
    "vllm/envs.py": """
environment_variables: dict = {
    "VLLM_A": lambda: os.getenv("VLLM_A", "x"),
    "VLLM_B": env_with_choices("VLLM_B", "high", ["high", "low"]),
}
OTHER = {"VLLM_NOT_ONE": 1}
""",
    "vllm-9.9.0.dist-info/METADATA": "Name: vllm\nRequires-Dist: torch==2.14.0\nRequires-Dist: torchvision==0.1\n",
}
SGLANG = {
    "sglang/srt/server_args.py": 'parser.add_argument("--config", type=str)\n',
    "sglang/srt/arg_groups/fields/exec_.py": """
class MoE:
    derived = Derived(fn="x")
    moe_a2a_backend: A[Literal["none"], Arg(help="--not-a-flag", choices=["none"])] = "none"
    tp_size: A[int, Arg(help="h", aliases=["--tensor-parallel-size"])] = 1
    renamed_field: A[int, Arg(cli_name="--own-name")] = 1
    hidden: A[int, Arg(no_cli=True)] = 1
    plain: int = 1
    simple_one: A[bool, "help"] = False
    two_way: A[bool, Arg(help="h", action=argparse.BooleanOptionalAction)] = False
""",
    "sglang/srt/environ.py": """
class Envs:
    SGLANG_X = EnvInt(1)
    SGLANG_Y = EnvIntWithAlias("SGL_OLD_Y", 2)
    IS_H200 = EnvBool(False)
""",
    "sglang-9.9.dist-info/METADATA": "Name: sglang\nRequires-Dist: torch==2.14.1\n",
}


def wheel(folder: Path, name: str, files: dict[str, str | bytes]) -> Path:
    file = folder / name
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return file


def test_vllm(tmp_path: Path) -> None:
    table = extract.from_wheel(wheel(tmp_path, "vllm-9.9.0-cp38-abi3-linux_x86_64.whl", VLLM))
    assert (table.name, table.version, table.torch) == ("vllm", "9.9.0", "2.14.0")
    spelt = {"max-num-seqs", "quantization", "port", "log-stats", "headless", "chat-template"}
    assert {flag for flag in table.flags if not flag.startswith("no-")} == spelt
    assert "no-log-stats" in table.flags
    assert "no-port" not in table.flags
    assert table.env == ["VLLM_A", "VLLM_B"]


def test_sglang(tmp_path: Path) -> None:
    table = extract.from_wheel(wheel(tmp_path, "sglang-9.9-cp311-cp311-linux_x86_64.whl", SGLANG))
    assert table.torch == "2.14.1"
    assert table.flags == [
        "config",
        "moe-a2a-backend",
        "no-two-way",
        "own-name",
        "simple-one",
        "tensor-parallel-size",
        "tp-size",
        "two-way",
    ]
    assert table.env == ["SGLANG_X", "SGLANG_Y", "SGL_OLD_Y"]


def test_nvshmem(tmp_path: Path) -> None:
    library = b"\x7fELF\0NVSHMEM_HCA_LIST\0IB_GID_INDEX\0lower_case\0AB\0"
    files = {"nvidia/nvshmem/lib/nvshmem_transport_ibgda.so.3": library, "nvidia/nvshmem/README": b"\0NOT_ONE\0"}
    table = extract.from_wheel(wheel(tmp_path, "nvidia_nvshmem_cu13-9.9-py3-none-linux_x86_64.whl", files))
    assert table.env == ["NVSHMEM_HCA_LIST", "NVSHMEM_IB_GID_INDEX"]


def test_no_engine(tmp_path: Path) -> None:
    other = {"torch-2.14.0.dist-info/METADATA": "Name: torch\n"}
    with pytest.raises(ValueError, match="torch is none of vllm, sglang, nvidia-nvshmem"):
        extract.from_wheel(wheel(tmp_path, "torch-2.14.0-cp311-cp311-linux_x86_64.whl", other))


def test_the_script_writes_a_table_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "FOLDER", tmp_path)
    extract.main([str(wheel(tmp_path, "sglang-9.9-cp311-cp311-linux_x86_64.whl", SGLANG))])
    assert json.loads((tmp_path / "sglang-9.9.json").read_text())["version"] == "9.9"


def test_known_names_are_in_the_tables_that_ship() -> None:
    """Hand-picked from the engines' documentation; a broken extraction would miss whole groups of them."""
    for table, flags, env in (
        ("vllm-0.33.0", {"max-num-seqs", "api-server-count", "chat-template", "no-enforce-eager"}, {"VLLM_USE_DEEP_GEMM"}),
        ("sglang-0.5.23", {"attn-dp-size", "tensor-parallel-size", "cuda-graph-bs-decode"}, {"SGLANG_SET_CPU_AFFINITY"}),
        ("nvshmem-3.4.5", set(), {"NVSHMEM_IB_GID_INDEX", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_SYMMETRIC_SIZE"}),
    ):
        found = json.loads((extract.FOLDER / f"{table}.json").read_text())
        assert flags <= set(found["flags"])
        assert env <= set(found["env"])
