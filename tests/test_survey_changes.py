"""A box that is not what the experiment began with is refused, with what changed; what production was stays known."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orchestrator.errors import ExperimentChanged
from orchestrator.records import CampaignEnded, CampaignStarted, ProductionState
from orchestrator.survey import _production, owes_production, refuse_changed

FACTS = {"kernel": "6.1", "driver": "570.1", "engine_version": "0.26.0"}
COMMAND = ("vllm", "serve", "--port", "8080")


def started(*, active: bool) -> CampaignStarted:
    return CampaignStarted(
        experiment="e",
        box="b",
        rehearsal=False,
        seed=1,
        boots_planned=1,
        production=ProductionState(unit="v.service", active=active),
    )


def ended(*, restored: bool) -> CampaignEnded:
    return CampaignEnded(outcome="failed", restored=restored)


def test_the_same_box_is_taken_and_another_driver_is_refused_by_name():
    refuse_changed(FACTS, FACTS, COMMAND, COMMAND)
    with pytest.raises(ExperimentChanged, match=r"driver: 570\.1 → 575\.2") as told:
        refuse_changed(FACTS, FACTS | {"driver": "575.2"}, COMMAND, COMMAND)
    assert "kernel" not in told.value.what
    assert "--new" in str(told.value.hint)


def test_another_command_in_the_unit_is_refused_since_every_variant_is_a_difference_to_it():
    with pytest.raises(ExperimentChanged, match=r"without \['8080'\], with \['9090'\]"):
        refuse_changed(FACTS, FACTS, COMMAND, ("vllm", "serve", "--port", "9090"))


def test_an_experiment_owes_production_until_a_campaign_has_given_it_back():
    assert not owes_production(())
    assert owes_production((started(active=True),))
    assert owes_production((started(active=True), ended(restored=False)))
    assert not owes_production((started(active=True), ended(restored=True)))


@pytest.mark.parametrize(
    ("records", "runs_now", "must_run"),
    [
        ((), True, True),
        ((), False, False),
        ((started(active=True),), False, True),
        ((started(active=False),), False, False),
        ((started(active=True), ended(restored=True)), False, False),
    ],
)
def test_what_ran_before_a_killed_campaign_must_run_after_the_next_one(records, runs_now, must_run):
    now = ProductionState(unit="v.service", active=runs_now, command=COMMAND)
    service = SimpleNamespace(production=lambda: now)
    assert _production(records, service).active is must_run
    assert _production(records, service).command == COMMAND
