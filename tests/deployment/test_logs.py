"""What is kept of an engine's log when it ends."""

from pathlib import Path

from ep_backend.deployment.logs import last_errors

REFUSED = """\
(APIServer pid=7) INFO 11-29 10:00:00 [utils.py:253] non-default args: {'max_model_len': -5}
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)     s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 2 validation errors for ModelConfig
(APIServer pid=7) max_model_len
(APIServer pid=7)   Input should be greater than 0 [type=greater_than, input_value=-5, input_type=int]
(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.12/v/greater_than
(APIServer pid=7) seed
(APIServer pid=7)   Input should be a valid integer [type=int_type, input_value='x', input_type=str]
(APIServer pid=7)     For further information visit https://errors.pydantic.dev/2.12/v/int_type
(APIServer pid=7) bye
"""


def test_keys_and_rules_of_pydantics_errors_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(REFUSED)
    assert last_errors(log) == [
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for ModelConfig",
        "max_model_len",
        "  Input should be greater than 0 [type=greater_than, input_value=-5, input_type=int]",
        "seed",
        "  Input should be a valid integer [type=int_type, input_value='x', input_type=str]",
    ]


def test_other_errors_keep_the_indented_lines_after_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: no weights\n  in this folder\nINFO bye\n")
    assert last_errors(log) == ["ValueError: no weights", "  in this folder"]
