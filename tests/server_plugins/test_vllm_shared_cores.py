"""Ranks on one CPU rest while they poll."""

import os
import sys

import pytest

pytest.importorskip("vllm", reason="these tests need vLLM: run ./ep test")
pytest.importorskip("nixl", reason="these tests need NIXL: run ./ep test")

import vllm.distributed.device_communicators.shm_broadcast as queues
from nixl._api import nixl_agent

from server_plugins.vllm import shared_cores


def never() -> None:
    raise AssertionError("sched_yield")


def test_an_empty_queue_is_not_polled_with_sched_yield(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "sched_yield", queues.sched_yield)
    monkeypatch.setattr(os, "sched_yield", never)
    shared_cores.rest_while_polling()
    queue = queues.MessageQueue(1, 1)
    reader = queues.MessageQueue.create_from_handle(queue.export_handle(), 0)
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    queue.enqueue("a message")
    assert reader.dequeue(timeout=5) == "a message"


def test_only_nixls_wait_of_zero_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = sys.modules[nixl_agent.__module__].nixlBind
    monkeypatch.setattr(bindings, "nixlAgentConfig", bindings.nixlAgentConfig)
    shared_cores.let_nixl_wait()
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == shared_cores.NIXL_WAIT_US
    config.pthrDelay = 7
    assert config.pthrDelay == 7
    assert isinstance(config, bindings.nixlAgentConfig.__mro__[1])
