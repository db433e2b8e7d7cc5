"""Ranks on one CPU rest while they poll."""

import sys
import time

import pytest

pytest.importorskip("vllm", reason="these tests need vLLM: run ./ep test")
pytest.importorskip("nixl", reason="these tests need NIXL: run ./ep test")

import vllm.distributed.device_communicators.shm_broadcast as queues
from nixl._api import nixl_agent

from server_plugins.vllm import shared_cores


def test_a_queue_without_a_message_is_looked_at_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "sched_yield", queues.sched_yield)
    shared_cores.rest_while_polling()
    queue = queues.MessageQueue(1, 1)
    reader = queues.MessageQueue.create_from_handle(queue.export_handle(), 0)
    started, spent = time.monotonic(), time.process_time()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.5)
    assert time.monotonic() - started > 0.4
    assert time.process_time() - spent < 0.25
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


def test_an_agent_with_that_wait_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = sys.modules[nixl_agent.__module__].nixlBind
    monkeypatch.setattr(bindings, "nixlAgentConfig", bindings.nixlAgentConfig)
    shared_cores.let_nixl_wait()
    agent = nixl_agent("a rank")
    spent = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - spent < 0.25
    assert agent.get_agent_metadata()
