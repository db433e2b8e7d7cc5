"""What the hooks in a scheduler do, and when they leave SGLang alone."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the adapter's tests need SGLang: run ./ep test sglang")

from server_plugins.sglang import hooks, runtime
from server_plugins.sglang.state import MODE, TOKEN

pytestmark = pytest.mark.engine


@pytest.fixture
def scheduler(monkeypatch):
    """A runtime that takes every proposal but of mode `hybrid`."""
    seen = []

    def prepare(token, mode):
        if mode == "hybrid":
            raise hooks.FlipRefused("no room")
        seen.append((token, mode))

    here = SimpleNamespace(flip=SimpleNamespace(prepare=prepare), settings=SimpleNamespace(sms=None), refused=None, seen=seen)
    monkeypatch.setattr(runtime, "_runtime", here)
    return here


def ask(**server_args):
    return hooks._set_internal_state(lambda scheduler, request: "sglang's own", None, SimpleNamespace(server_args=server_args))


def test_a_draft_of_another_backend_gets_sglangs_own_dispatcher(monkeypatch):
    from sglang.srt.layers.moe.utils import MoeA2ABackend

    monkeypatch.setattr("sglang.srt.layers.moe.utils.get_moe_a2a_backend", lambda: MoeA2ABackend.NONE)
    assert hooks._create(lambda *given: given, "config", "method") == ("config", "method")


def test_two_batch_overlap_leaves_the_multiprocessors_that_settings_name(scheduler):
    assert hooks._deepep_config(None, None).num_sms == hooks.NUM_SMS
    scheduler.settings.sms = 12
    assert hooks._deepep_config(None, None).num_sms == 12


def test_sglangs_own_keys_go_on_to_it(scheduler):
    assert ask(pp_max_micro_batch_size=4) == "sglang's own"
    assert scheduler.seen == []


def test_a_scheduler_without_our_layers_leaves_our_keys_to_sglang():
    assert ask(**{TOKEN: 1, MODE: 0}) == "sglang's own"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({TOKEN: 3, MODE: 3}, "no room"),
        ({TOKEN: 3}, "ep_backend_token and ep_backend_mode go together; send both"),
        ({TOKEN: 256, MODE: 0}, "ep_backend_token=256; a token is a whole number from 1 to 255"),
        ({TOKEN: 3.5, MODE: 0}, "ep_backend_token=3.5; a token is a whole number"),
        ({TOKEN: 3, MODE: 9}, "ep_backend_mode=9; it is one of 0 normal, 1 direct, 2 low_latency, 3 hybrid, 4 auto"),
        ({TOKEN: 3, MODE: 0, "pp_max_micro_batch_size": 4}, "pp_max_micro_batch_size cannot travel with"),
    ],
)
def test_a_refused_request_says_why(scheduler, request_, reason):
    assert ask(**request_).updated is False
    assert reason in scheduler.refused
    assert scheduler.seen == []
    assert ask(**{TOKEN: 4, MODE: 1}).updated is True
    assert scheduler.refused is None
    assert scheduler.seen == [(4, "direct")]
