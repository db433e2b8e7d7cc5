"""What a checkpoint answers according to Hugging Face transformers, in float32 on one process: the oracle of the demo."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Reference:
    """Greedy continuations, and how near the closest call was: the least distance between the two best logits."""

    tokens: list[list[int]]
    least_margin: float


def greedy_reference(checkpoint: Path, prompts: list[str], tokens: int, done: Callable[[], None]) -> Reference:
    """Continues every prompt by so many tokens; `done` is called after each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # So small a model gains nothing from threads, and on a busy machine they wait for each other: 20 times slower.
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    continuations, margin = [], float("inf")
    with torch.inference_mode():
        for prompt in prompts:
            step, cache, continuation = tokenizer(prompt, return_tensors="pt").input_ids, None, []
            for _ in range(tokens):
                output = model(step, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                best, second = torch.topk(output.logits[0, -1], 2).values.tolist()
                margin = min(margin, best - second)
                step = output.logits[0, -1].argmax().view(1, 1)
                continuation.append(int(step))
            continuations.append(continuation)
            done()
    return Reference(continuations, margin)
