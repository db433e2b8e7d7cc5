"""The small checkpoint: the same bytes for a seed, the hub's names, and a tokenizer that loses nothing."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ep_backend.checkpoint import MODELS, SHAPES, VOCAB, Model, Shape, write_checkpoint, write_shape


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(out, seed=0)
    return out


def test_a_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "same", seed=0)
    write_checkpoint(tmp_path / "other", seed=1)
    same, other = digests(tmp_path / "same"), digests(tmp_path / "other")
    assert same == digests(checkpoint)
    assert {name for name in same if same[name] != other[name]} == {"model.safetensors"}


def test_transformers_loads_every_tensor(checkpoint: Path) -> None:
    from transformers import DeepseekV3ForCausalLM

    model, info = DeepseekV3ForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["topk_method"]) == (512, 64, "noaux_tc")
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 12e6
    assert model.config.vocab_size == VOCAB


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-moe"])
def test_routing_is_clear_and_reaches_every_expert(model: Model, tmp_path: Path) -> None:
    """Scores that are all but equal would let rounding choose the experts."""
    from safetensors.torch import load_file

    write_checkpoint(tmp_path, model=model)
    tensors = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    config, embeddings = MODELS[model][0], tensors["model.embed_tokens.weight"]
    gates = {name: gate for name, gate in tensors.items() if name.endswith("mlp.gate.weight")}
    assert len(gates) == config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)
    for gate in gates.values():
        scores = embeddings @ gate.T
        picked = scores > 0
        assert (picked.sum(1) == config["num_experts_per_tok"]).all() and scores.abs().min() > 0.9
        in_groups = picked.unflatten(1, (config.get("n_group", 1), -1)).any(2)
        assert (in_groups.sum(1) == config.get("topk_group", 1)).all()
        rows = picked.sum(0)
        assert rows.min() > 0.6 * rows.float().mean() and rows.max() < 1.4 * rows.float().mean()
    every = sum(gates.values()).any(0)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor[every].any() and tensor[~every].all(), name


def test_any_text_survives_the_tokenizer(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "Ünïcode, 漢字 and\ttabs\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|bos|><|User|>hi<|Assistant|>"


def test_transformers_loads_every_tensor_of_a_qwen3_moe(tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    parameters = write_checkpoint(tmp_path, model="qwen3-moe")
    model, info = Qwen3MoeForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert parameters == sum(each.numel() for each in model.parameters())


def test_the_one_for_gpus_has_every_tensor_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its widths are held small here: the layers and their names are what counts."""
    from transformers import DeepseekV3ForCausalLM

    config, layer = MODELS["deepseek-v3-100m"]
    small = config | {"hidden_size": 128, "n_routed_experts": 16, "num_hidden_layers": 2}
    monkeypatch.setitem(MODELS, "deepseek-v3-100m", (small, layer))
    write_checkpoint(tmp_path, model="deepseek-v3-100m")
    model, info = DeepseekV3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_experts_per_tok == 8


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_deepseek_v3s_but_for_depth_and_vocabulary(shape: Shape, tmp_path: Path) -> None:
    from ep_backend.deployment.presets import models

    write_shape(tmp_path, shape)
    config = json.loads((tmp_path / "config.json").read_text())
    real = models()["deepseek-v3"]
    differ = {key for key, value in real.items() if key in config and config[key] != value}
    assert differ == {"num_hidden_layers", "first_k_dense_replace", "vocab_size"} | (
        {"quantization_config"} if shape == "deepseek-v3-shape-fp8" else set()
    )
    assert not list(tmp_path.glob("*.safetensors")) and (tmp_path / "tokenizer.json").exists()


def command(*words: str) -> tuple[int, str]:
    """Exit status and complaint of `ep-backend checkpoint`."""
    done = subprocess.run(
        [sys.executable, "-m", "ep_backend", "checkpoint", *words], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("content", [{"config.json": '{"precious": 1}', "model.safetensors": "w"}, {"notes.txt": "mine"}])
def test_what_others_wrote_is_kept(content: dict[str, str], tmp_path: Path) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    first = next(iter(content))
    said = f"ep-backend: {tmp_path} holds {first}, which this version of `ep-backend checkpoint` did not write; "
    assert command(str(tmp_path)) == (1, f"{said}choose a new folder, or empty this one\n")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == content


def test_its_own_earlier_output_is_replaced_whole(tmp_path: Path, checkpoint: Path) -> None:
    write_checkpoint(tmp_path, seed=1)
    (tmp_path / ".ep-backend-draft").mkdir()  # of a run that was killed
    write_checkpoint(tmp_path, seed=0)
    assert digests(tmp_path) == digests(checkpoint)
    write_shape(tmp_path, "deepseek-v3-shape")
    assert not (tmp_path / "model.safetensors").exists(), "its weights are the other model's"


def test_what_fails_half_way_changes_nothing(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, seed=0)
    monkeypatch.setitem(MODELS, "qwen3-moe", (MODELS["qwen3-moe"][0], lambda *_: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path, model="qwen3-moe")
    assert digests(tmp_path) == digests(checkpoint)


@pytest.mark.parametrize("model", ["deepseek-v3", *SHAPES])
@pytest.mark.parametrize("name", ["", "file", "/proc/x", "a" * 300, ".", "weights"])
def test_a_folder_that_cannot_be_written_is_one_line(name: str, model: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "config.json").mkdir()
    write_shape(tmp_path / "weights", "deepseek-v3-shape")
    (tmp_path / "weights" / "model.safetensors").mkdir()
    code, said = command(str(tmp_path / name) if name else "", "--model", model)
    assert code == 1 and said.startswith("ep-backend: ") and said.count("\n") == 1
