"""One engine, one rank, another backend than ours: `one_rank.py vllm|sglang CHECKPOINT OUT.json` writes what it answers.

OUT.json: ``tokens``, greedy, of each prompt; ``known``: does the engine know the plug-in's backend?
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path

PROMPTS = [[(7 * n + 3 * m) % 250 + 3 for m in range(5 + 9 * n)] for n in range(4)]
NEW, NAME = 24, "ep_backend"


def vllm(checkpoint: str) -> tuple[list[list[int]], bool]:
    from vllm import LLM, SamplingParams
    from vllm.config import parallel

    llm = LLM(
        checkpoint,
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.3,
        all2all_backend="allgather_reducescatter",
        enforce_eager=True,
    )
    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    # One at a time: what shares a batch with a prompt changes its last bits.
    answers = [llm.generate([{"prompt_token_ids": prompt}], asked)[0] for prompt in PROMPTS]
    return [list(a.outputs[0].token_ids) for a in answers], NAME in typing.get_args(parallel.All2AllBackend)


def sglang(checkpoint: str) -> tuple[list[list[int]], bool]:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import MOE_A2A_BACKEND_CHOICES

    engine = Engine(
        model_path=checkpoint,
        moe_a2a_backend="none",
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        context_length=256,
        mem_fraction_static=0.3,
        cuda_graph_max_bs_decode=8,
    )
    try:
        asked = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        answers = [engine.generate(input_ids=prompt, sampling_params=asked) for prompt in PROMPTS]
        return [list(a["output_ids"]) for a in answers], NAME in MOE_A2A_BACKEND_CHOICES
    finally:
        engine.shutdown()


if __name__ == "__main__":
    tokens, known = {"vllm": vllm, "sglang": sglang}[sys.argv[1]](sys.argv[2])
    assert [len(t) for t in tokens] == [NEW] * len(PROMPTS), tokens
    Path(sys.argv[3]).write_text(json.dumps({"tokens": tokens, "known": known}))
