"""Every row of the policy table, every wish that cannot be, and that decisions depend on nothing else."""

import pytest

from ep_backend.modes import Family, Mode
from ep_backend.policy import (
    AUTO,
    FAMILIES,
    POLICY,
    Forward,
    Role,
    Situation,
    decide,
    family_of,
    modes_of,
)

N, D, L, H = Mode.NORMAL, Mode.DIRECT, Mode.LOW_LATENCY, Mode.HYBRID
ROOMY = {N: 4096, D: 4096, L: 4096, H: 4096}


def situation(role=Role.PREFILL, forward=Forward.MIXED, tokens=100, capacity=ROOMY, top_k=8, **rest) -> Situation:
    return Situation(role, forward, tokens, capacity, top_k, **rest)


# One entry a row of POLICY, in its order.
ROWS = [
    (situation(), D),
    (situation(capacity={N: 4096, D: 64}), N),
    (situation(nodes=2), H),
    (situation(nodes=2, capacity={N: 4096, H: 64}), N),
    (situation(Role.DECODE), L),
    (situation(Role.DECODE, capacity={H: 128}), H),
    (situation(Role.DECODE, nodes=16), L),
    (situation(Role.DECODE, nodes=2), H),
    (situation(Role.DECODE, nodes=2, capacity={L: 128}), L),
]


def test_every_row_has_a_case():
    assert len(ROWS) == len(POLICY)


@pytest.mark.parametrize("index", range(len(POLICY)))
def test_row(index):
    case, mode = ROWS[index]
    decision = decide(case)
    assert decision.mode is mode is POLICY[index].mode
    assert decision.reason.startswith(POLICY[index].reason)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("forward", Forward)
def test_families_by_role_and_forward_mode(role, forward):
    generating = forward in (Forward.DECODE, Forward.VERIFY, Forward.IDLE)
    decode = role is Role.DECODE or (role is Role.UNIFIED and generating)
    assert decide(situation(role, forward)).mode is (L if decode else D)
    assert FAMILIES[role][forward][0] is (Family.DECODE if decode else Family.PREFILL)


def test_unified_without_decode_modes_generates_in_prefill_modes():
    assert decide(situation(Role.UNIFIED, Forward.DECODE, capacity={D: 4096})).mode is D


def test_unified_falls_back_when_the_decode_slots_are_too_few():
    assert decide(situation(Role.UNIFIED, Forward.VERIFY, tokens=768, capacity={L: 512, D: 4096})).mode is D


def test_estimates_decide_decode_across_nodes_and_are_named():
    fast = decide(situation(Role.DECODE, nodes=16, estimates={L: 155e-6, H: 129e-6}))
    assert fast.mode is H
    assert "low_latency 155 us, hybrid 129 us" in fast.reason
    assert decide(situation(Role.DECODE, nodes=16, estimates={L: 100e-6, H: 129e-6})).mode is L


def test_capture_passes_over_a_mode_that_cannot_be_captured():
    with pytest.raises(ValueError, match=r"normal cannot be captured.*use"):
        decide(situation(capture=True, capacity={N: 4096}))
    assert decide(situation(capture=True)).mode is D


@pytest.mark.parametrize(
    "case, why",
    [
        (situation(), None),
        (situation(wish=D), None),
        (situation(capacity={N: 4096, D: 64}), "capacity"),
        (situation(capacity={N: 4096}), "absent"),
        (situation(Role.UNIFIED, Forward.VERIFY, tokens=768, capacity={L: 512, H: 512, D: 4096}), "capacity"),
        (situation(nodes=2, capture=True, capacity={H: 64, N: 4096}, tokens=32), None),
    ],
)
def test_a_second_choice_says_why(case, why):
    assert decide(case).fallback == why


@pytest.mark.parametrize("mode", Mode)
def test_a_wish_of_the_roles_own_modes_is_granted(mode):
    role = Role.PREFILL if mode in modes_of(Family.PREFILL) else Role.DECODE
    assert decide(situation(role, wish=mode)).mode is mode
    assert decide(situation(Role.UNIFIED, wish=mode)).mode is mode


@pytest.mark.parametrize(("role", "wish"), [(Role.PREFILL, L), (Role.DECODE, N), (Role.DECODE, D)])
def test_a_wish_of_the_other_family_is_refused(role, wish):
    with pytest.raises(ValueError, match=rf"mode {wish.value} does not serve role {role.value}; use .*auto"):
        decide(situation(role, wish=wish))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            situation(wish=N, capture=True),
            "normal cannot be captured in a graph .*; use direct, hybrid, or no graphs",
        ),
        (situation(wish=D, capacity={N: 8}), "mode direct has no capacity; give it max_tokens"),
        (
            situation(wish=D, tokens=65, capacity={D: 64}),
            "65 tokens exceed max_tokens=64 of mode direct; raise it",
        ),
        (
            situation(tokens=5000),
            "no mode can carry a mixed batch of role prefill: 5000 tokens exceed max_tokens=4096",
        ),
    ],
)
def test_impossible_batches_name_value_rule_and_fix(case, message):
    with pytest.raises(ValueError, match=message):
        decide(case)


def test_decide_is_a_function_of_its_argument():
    cases = [case for case, _ in ROWS]
    assert [decide(c) for c in cases] == [decide(c) for c in reversed(cases)][::-1]


def test_family_of_an_instance_that_cannot_change_its_layout():
    assert family_of(Role.PREFILL, AUTO) is Family.PREFILL
    assert family_of(Role.DECODE, AUTO) is Family.DECODE
    assert family_of(Role.UNIFIED, AUTO) is Family.PREFILL
    assert family_of(Role.UNIFIED, L) is Family.DECODE
    assert family_of(Role.PREFILL, H) is Family.PREFILL
    with pytest.raises(ValueError, match="direct does not serve role decode"):
        family_of(Role.DECODE, D)
