"""Faults of form: values and rules as the file spells them, one line a mistake, and nothing that only follows from one."""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_backend.deployment.lint.report import findings_of
from ep_backend.deployment.load import load, name_in
from ep_backend.deployment.problems import DeploymentError
from ep_backend.deployment.spelling import in_yaml

WriteFile = Callable[..., Path]
EP = "ep: {mode: direct, max_tokens: 1024}"
REPR = re.compile(r"\bNone\b|\bTrue\b|\bFalse\b|<\w+|'\w+', '|\{'|Commented|ScalarFloat|nput should|Extra inputs")


def one(file: Path) -> str:
    (found,) = findings_of(file)
    assert not REPR.search(str(found)), str(found)
    return str(found).removeprefix(f"{file}:")


@pytest.mark.parametrize(
    ("was", "given", "said"),
    [
        (
            "data_parallel: 2",
            "data_parallel: two",
            "6:5: roles.prefill.data_parallel: is two, must be a whole number; write a wh",
        ),
        ("data_parallel: 2", "data_parallel: 2.5", "is 2.5, must be a whole number; write a whole number [EP004]"),
        ("data_parallel: 2", "data_parallel: true", "is true, must be a whole number; write a whole number [EP004]"),
        ("data_parallel: 2", "data_parallel: [a, null]", "is [a, null], must be a whole number; write a whole number [EP004]"),
        ("data_parallel: 2", "data_parallel:", "is null, must be a whole number; give it a value [EP004]"),
        ("data_parallel: 2", "data_parallel: 0", "is 0, must be at least 1; write 1 or more [EP004]"),
        ("data_parallel: 2", "dp: 2", "roles.prefill.dp: unknown key; did you mean `data_parallel`, which is missing? [EP002]"),
        ("    data_parallel: 2\n", "", "5:3: roles.prefill.data_parallel: is missing; add it [EP003]"),
        ("data_parallel: 2", "data_parallel: 2024-01-01", "is a date, must be text, a number, true or false, a list or a map"),
        (EP, "ep:", "7:5: roles.prefill.ep: is null, must be a mapping; give it a value, or remove the key [EP004]"),
        (EP, "ep: [direct]", "is [direct], must be a mapping; write keys below it, of mode, max_tokens, sms, overlap, "),
        (EP, "mode: direct", "roles.prefill.mode: unknown key; write it below `ep` [EP002]"),
        (
            EP,
            "max-num-seqs: 8",
            "known here: engine, nodes, data_parallel, ep, args, env, image; flags of the engine belong belo",
        ),
        ("max_tokens: 1024", "timeout_s: -1", "is -1, must be above 0; write a number above 0 [EP004]"),
        ("max_tokens: 1024", "fp8: {a: b}", "is {a: b}, must be true or false; write one of them [EP004]"),
        ("max_tokens: 1024", "lanes: true", "is true, must be a whole number; write a whole number [EP004]"),
        ("max_tokens: 1024", "timeout_s: true", "is true, must be a number; write a number [EP004]"),
        ("max_tokens: 1024", "max_tokens: true", "is true, must be a whole number; write a whole number [EP004]"),
        ("max_tokens: 1024", "lanes: 3", "is 3, must be 1 or 2; write one of them [EP004]"),
        ("args: {max", "args: {1: a, max", '8:5: roles.prefill.args: has the key 1, must be text; write "1" in quotes [EP004]'),
        ("args: {max", "env: {A: true}\n    args: {max", '8:11: roles.prefill.env.A: is true, must be text; write "true" in q'),
        (
            "args: {max",
            "env: {A B: x}\n    args: {max",
            "as a key, must be letters, digits and `_`, the first no digit; choose such",
        ),
        ("args: {max", "args: !!set {max", "roles.prefill.args: is of a type that YAML alone has, must be text"),
        (
            "max-num-seqs: 8",
            "max_num_batched_tokens: 9",
            "is max-num-batched-tokens again, in another spelling; keep one of them [EP300]",
        ),
        ("model: {path: model}", "model: model", "is model, must be a mapping; write keys below it, of path, preset,"),
        (
            "{path: model}",
            "{path: model, routing: {kind: measured, nodes_per_token: 99}}",
            "model.routing.nodes_per_token: is 99, but the roles span 1 NVLink domain(s) at most; give a mean of 1 or less",
        ),
        *(
            (
                "router: {",
                f"control: {{key: {key}}}\nrouter: {{",
                "control.key: is '***', must be visible ASCII characters, for",
            )
            for key in ("schlüssel", '"a\\nb"', '"a\\x7f"', '" a"', '"a "')
        ),
        *(
            (
                "router: {",
                f"router: {{host: {host}, ",
                "must be a host name or an address; write it so",
            )
            for host in ('"a:b"', '"::1::"', '"[::1]"', '"1.2.3.4:80"')
        ),
        ("max_tokens: 1024", f"max_tokens: '{'9' * 400}'", "must be below 2147483648; write a number below 2147483648 [EP004]"),
        ("path: model", "path: model, moe_layers: 3", "model has 2 layers, but moe_layers is 3; give a folder"),
        ("max_tokens: 1024", "max_tokens: 1024, timeout_s: 1.0e+18", "at most"),
        (
            "max_tokens: 1024",
            "max_tokens: 1024, redundant_experts: 1000000000",
            "is 1000000000, but 2 ranks that each hold all 16 experts have 16 replicas; use 16 or fewer [EP118]",
        ),
        ("model: {path: model}", "model: true", "is true, must be a mapping; write keys below it, of path, preset,"),
        ("model: {path: model}", "model: {preset: 3}", 'is 3, must be text; write "3" in quotes [EP004]'),
        (
            "model: {path: model}",
            "model: {preset: deepsek-v3}",
            "is deepsek-v3, which is no model preset; did you mean `deepseek-v3`?",
        ),
        (
            "model: {path: model}",
            'model: {path: "a\\0"}',
            "model.path: holds a NUL character, which neither paths nor arguments may",
        ),
        (
            "model: {path: model}",
            f"model: {{path: {'m' * 65_537}}}",
            "model.path: is a text of 65537 bytes, must have 65536 or fewer; put it into a file, and name that [EP004]",
        ),
        (
            "{device: cuda}",
            "{device: cuda, hbm: 80}",
            "is 80, which is bytes, must be at least 1 MiB; write 80GiB if GiB are meant",
        ),
        (
            "{device: cuda}",
            "{device: cuda, hbm: infGiB}",
            "is infGiB, must be a size such as 64GiB (KiB, MiB, GiB, KB, MB, GB); wri",
        ),
        (
            "{device: cuda}",
            "{device: cuda, nic: {gbs: 46, devices: mlx5_0}}",
            "is mlx5_0, must be a list; write [mlx5_0] [EP004]",
        ),
        (
            "{device: cuda}",
            "{device: cuda, nic: {gbs: 46, devices: [mlx5 0]}}",
            "is mlx5 0, must be a device such as mlx5_0, or mlx5_0:1 with its port",
        ),
        (
            "{mode: direct, max_tokens: 1024}",
            "{mode: direct, max_tokens: 10000000000000}",
            "max_tokens: is 10000000000000, must be below 2147483648; write a number below 2147483648",
        ),
        (
            "{mode: direct, max_tokens: 1024}",
            "{mode: direct, max_tokens: 1024, timeout_s: 1e+300}",
            "timeout_s: is 1e+300, must be at most 1e+09; write 1e+09 or less",
        ),
        ("router: {", "control: {key: schlüssel}\nrouter: {", "must be visible ASCII characters"),
        ("  decode:", "  decod:", "9:3: roles.decod: unknown key; did you mean `decode`? [EP002]"),
    ],
)
def test_a_fault_is_one_line_in_yaml(was: str, given: str, said: str, write_file: WriteFile) -> None:
    assert said in one(write_file((was, given)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "1:1: is empty, must be a mapping with `name` and `roles`; write one [EP001]"),
        ("true", "1:1: is only true, must be a mapping"),
        ("a: 1\n--- \nb: 1\n", "not valid YAML: holds several documents, must be one; keep one, and no `---` after it"),
        ("a: b\nc: \x07\n", "2:4: not valid YAML: holds the control character U+0007; remove it [EP001]"),
        ("a: &a [x, *a]\n", "1:4: is an alias of what it is part of; write the values themselves [EP001]"),
        (
            "name: a\nroles: " + "[" * 3000,
            "2:57: is nested more than 50 deep; close what is open; no value here is deep [EP001]",
        ),
        (
            "name: 2001-13-45\n",
            "1:7: not valid YAML: `2001-13-45` is no timestamp that can be read; correct it, or write it in q",
        ),
        ("a: {b: 2026-02-30}\n", "1:8: not valid YAML: `2026-02-30` is no timestamp"),
        ("a: 1\nb: !!int abc\n", "2:4: not valid YAML: `abc` is no int that can be read"),
        ("a: !!float abc\n", "1:4: not valid YAML: `abc` is no float that can be read"),
        ("a: !!bool foo\n", "1:4: not valid YAML: `foo` is no bool that can be read"),
        (f"a: {'1' * 5000}\n", "11...` is no int that can be read"),
        ("a: !!omap 3\n", "1:4: not valid YAML: `3` is no omap that can be read"),
        ("a: &a\n  <<: *a\n", "1:4: is an alias of what it is part of"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "4:1: d: stands for more than 10000 values, counting what aliases stand for; write fewer [EP004]",
        ),
    ],
    ids=[
        *("empty", "scalar", "documents", "control", "cycle", "deep", "name", "date", "int", "float", "bool", "digits", "omap"),
        *("merged", "laughs"),
    ],
)
def test_no_deployment_at_all(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    assert said in one(tmp_path / "odd.yaml")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_byte_order_marks_are_no_faults(ending: str, mark: str, write_file: WriteFile) -> None:
    file = write_file()
    file.write_bytes((mark + file.read_text().replace("\n", ending)).encode())
    assert findings_of(file) == []


@pytest.mark.parametrize("value", [".nan", '"a\\0"', "2024-01-01", "0x1ffffffffffffffff", "{1: x}", "{[a]: x}", "[1, .inf]"])
def test_a_value_that_cannot_be_written_hides_no_other_mistake(value: str, write_file: WriteFile) -> None:
    file = write_file(
        ("max-num-seqs: 8", f"max-model-len: {value}"),
        ("mode: low_latency", "mode: normal"),
        ("router: {", "router: {prt: 1, "),
    )
    assert [f.problem.code for f in findings_of(file)] == ["EP004", "EP202", "EP002"]


def test_a_required_value_that_cannot_be_written_is_not_also_missing(write_file: WriteFile) -> None:
    assert "6:5: roles.prefill.data_parallel: is nan, must" in one(write_file(("  data_parallel: 2", "  data_parallel: .nan")))


@pytest.mark.parametrize("value", ["9" * 400, '{"a":' * 20_000])
def test_a_word_that_is_no_sane_number_or_mapping_is_the_engines_to_judge(value: str, write_file: WriteFile) -> None:
    findings_of(write_file(("max-num-seqs: 8", f"max-num-seqs: '{value}'")))


def test_of_many_faults_some_are_told_and_the_others_counted(write_file: WriteFile) -> None:
    file = write_file()
    file.write_text(file.read_text() + "".join(f"extra{number}: 1\n" for number in range(9000)))
    started = time.monotonic()
    found = findings_of(file)
    assert time.monotonic() - started < 8
    assert len(found) == 101
    assert "extra100: is the next of 8900 more faults; correct the others first" in str(found[-1])


def test_what_a_terminal_would_obey_is_told_as_escapes(write_file: WriteFile) -> None:
    file = write_file(("name: ", 'name: "\\u202eab\\ec" #'), ("device: cuda", '"de\\u202evice": cpu'))
    said = "\n".join(map(str, findings_of(file)))
    assert "\\u202e" in said and said.isprintable() is False  # of the line ends alone
    assert said.replace("\n", "").isprintable()
    with pytest.raises(DeploymentError, match=r'1:1: name is "\\u202eab\\ec", must be 1 to 63 of a-z'):
        name_in(file)


@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "large.yaml"])
def test_only_files_of_a_sane_size_are_read(place: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large.yaml").write_bytes(b"#" * (5 << 20))
    said = "larger than 4 MiB" if place == "large.yaml" else "not a regular file"
    assert f"1:1: cannot be read: {said}; give the path of a deployment file [EP005]" in one(tmp_path / place)


def test_what_may_follow_from_a_fault_is_not_told(write_file: WriteFile) -> None:
    """Without max_tokens or the engine, other rules would compare defaults; the other role is still judged."""
    batch = ("args: {max-num-batched-tokens: 256}", "args: {max-num-batched-tokens: 512}")
    assert [f.problem.code for f in findings_of(write_file(batch))] == ["EP102"]
    assert [f.problem.code for f in findings_of(write_file(batch, ("max_tokens: 1024", "lanes: x")))] == [
        "EP004",
        "EP102",
    ]
    assert one(
        write_file(("max_tokens: 1024", "max_tokens: x"), ("max-num-batched-tokens: 1024", "max-num-batched-tokens: 99999"))
    )
    assert "is vlm, must be vllm or sglang" in one(write_file(("  decode:\n", "  decode:\n    engine: vlm\n")))
    assert "topology.device: is tpu" in one(write_file(("device: cuda", "device: tpu"), ("max_tokens: 1024", "max_tokens: 8")))
    router = findings_of(write_file(batch, ("router: {port: ", "router: {hold: maybe, port: ")))
    assert [f.problem.code for f in router] == ["EP102", "EP004"]


def test_too_few_machines_are_one_mistake(write_file: WriteFile) -> None:
    small = ("topology: {device: cuda}", "topology: {device: cuda, gpus_per_node: 2}")
    file = write_file(small, ("  prefill:\n", "  prefill:\n    nodes: 2\n"), ("  decode:\n", "  decode:\n    nodes: 2\n"))
    with pytest.raises(DeploymentError) as caught:
        load(file)
    (said,) = caught.value.lines
    assert "topology.nodes: is 1, so there are 2 GPUs, but the roles need 4 (prefill 2 + decode 2); use 2, or" in said


def test_the_router_and_the_control_service_want_different_ports(write_file: WriteFile) -> None:
    file = write_file(("router: {port: ", "control: {port: 9000}\nrouter: {port: 9000} #"))
    assert "13:11: control.port: 9000 is the router's port too; choose another port [EP014]" in one(file)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (["a", None, 1.5], "[a, null, 1.5]"),
        ({"a": {"b": "c"}}, "{a: {b: c}}"),
        ("8", "'8'"),
        ("two words", "two words"),
        ("a\nb", '"a\\nb"'),
        ("ü", "ü"),
        ("x" * 100, "x" * 77 + "..."),
    ],
)
def test_how_values_are_spelt(value: object, text: str) -> None:
    assert in_yaml(value) == text
