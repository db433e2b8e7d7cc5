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
        scheduler_kwargs = get_kwargs(SchedulerConfig)
        group.add_argument("--max-batched", **{**scheduler_kwargs["max_batched"], "default": None})
        for_each("--policy", **scheduler_kwargs["policy"])
        group.add_argument("--policy", **scheduler_kwargs["policy"])
        group.add_argument("--async", **scheduler_kwargs["async_"])
        group.add_argument("--sizes", **scheduler_kwargs["sizes"])
        group.add_argument("--share", **scheduler_kwargs["share"])
        group.add_argument("--dtype", **scheduler_kwargs["dtype"])
        group.add_argument("--open", **scheduler_kwargs["open_"])
        scheduler_kwargs["parsed"]["type"] = json.loads
        group.add_argument("--parsed", **scheduler_kwargs["parsed"])
        group.add_argument("--elsewhere", **scheduler_kwargs["elsewhere"])
        group.add_argument("--kv-move-config", **vllm_kwargs["kv_move_config"])
        group.add_argument("--open-config", **vllm_kwargs["open_config"])
def get_kwargs(cls):
    human_readable_int_args = {"max_batched"}
""",
    "vllm/config/scheduler.py": """
RunnerType = Literal["generate", "draft"]
Policy = Literal["fcfs", RunnerType]
class SchedulerConfig:
    max_batched: int = 1
    policy: Policy | None = None
    async_: bool | None = None
    sizes: list[int] | None = None
    share: float | int = 0.5
    dtype: Policy | torch.dtype = "fcfs"
    open_: Policy | str = "fcfs"
    parsed: int = 0
    elsewhere: SomeConfig | None = None
@config
class KVMoveConfig:
    rank: int | None = None
    how: Policy = "fcfs"
    rewritten: int = 0
    shared: ClassVar[int] = 0
    extra: dict[str, Any] = field(default_factory=dict)
    @field_validator("rewritten", mode="before")
    def rewrite(cls, value): ...
@dataclass
class OpenConfig:
    anything: int = 0
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
    context: A[Optional[int], Arg(type_parser=human_readable_int)] = None
    sizes: A[Optional[List[int]], "help"] = None
    rows: A[Optional[str], Arg(choices=ROWS + ["more"])] = None
    config_json: A[Optional[str], Arg(type_parser=json.loads)] = None
""",
    "sglang/srt/arg_groups/choices.py": 'ROWS = ["few"]\n',
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
    assert {flag: takes for flag, takes in table.flags.items() if not flag.startswith("no-")} == {
        "async": "boolean",
        "chat-template": "text",
        "dtype": ["fcfs", "generate", "draft"],
        "elsewhere": None,
        "headless": "switch",
        "kv-move-config": None,
        "log-stats": "boolean",
        "max-batched": "size",
        "max-num-seqs": None,
        "open": None,
        "open-config": None,
        "parsed": None,
        "policy": ["fcfs", "generate", "draft"],
        "port": "integer",
        "quantization": None,
        "share": "integer",
        "sizes": "integers",
    }
    assert (table.flags["no-log-stats"], table.flags["no-async"]) == ("switch", "switch")
    assert not {"no-port", "no-policy", "no-max-batched"} & set(table.flags)
    assert table.env == ["VLLM_A", "VLLM_B"]
    inside = {"rank": "integer", "how": ["fcfs", "generate", "draft"], "rewritten": None, "extra": None}
    assert table.inside == {"kv-move-config": inside}


def test_sglang(tmp_path: Path) -> None:
    table = extract.from_wheel(wheel(tmp_path, "sglang-9.9-cp311-cp311-linux_x86_64.whl", SGLANG))
    assert table.torch == "2.14.1"
    assert table.flags == {
        "config": "text",
        "config-json": None,
        "context": "size",
        "moe-a2a-backend": ["none"],
        "no-two-way": "switch",
        "own-name": "integer",
        "rows": ["few", "more"],
        "simple-one": "switch",
        "sizes": "integers",
        "tensor-parallel-size": "integer",
        "tp-size": "integer",
        "two-way": "boolean",
    }
    assert list(table.flags) == sorted(table.flags)
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
