"""When a campaign ends although boots are left."""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from orchestrator.brakes import braked, out_of_time, storm
from orchestrator.campaign import _Walk
from orchestrator.errors import BoxError
from orchestrator.matrix import LimitKeys
from orchestrator.records import BootEnded

LIMITS = LimitKeys(fatal_boots_variant=3, fatal_boots=4)


def ends(*pairs: tuple[str, str]) -> list[BootEnded]:
    return [
        BootEnded(
            boot=f"b{n:02d}-{variant}",
            variant=variant,
            cache="cold",
            block=n,
            position=n,
            boot_outcome=outcome,
            why="",
        )
        for n, (variant, outcome) in enumerate(pairs, start=1)
    ]


def test_a_variant_that_died_three_times_in_a_row_is_left_alone_and_the_others_are_not():
    records = ends(("a", "crashed"), ("b", "completed"), ("a", "not_ready"), ("a", "crashed"), ("b", "crashed"))
    assert braked(records, LIMITS) == {"a": 3}


def test_a_good_boot_between_takes_the_brake_off_and_a_disturbed_one_does_not_count():
    assert braked(ends(("a", "crashed"), ("a", "crashed"), ("a", "completed"), ("a", "crashed")), LIMITS) == {}
    assert braked(ends(("a", "crashed"), ("a", "disturbed"), ("a", "crashed"), ("a", "aborted")), LIMITS) == {}


def test_four_deaths_in_a_row_of_whatever_variants_are_a_storm():
    died = [("a", "crashed"), ("b", "crashed"), ("c", "not_ready")]
    assert storm(ends(*died), LIMITS) is None
    assert storm(ends(*died, ("a", "crashed")), LIMITS) == 4
    assert storm(ends(*died, ("a", "completed"), ("b", "crashed")), LIMITS) is None


def test_a_storm_is_counted_over_all_sessions_of_the_experiment():
    died = ends(("a", "crashed"), ("b", "crashed"), ("a", "not_ready"))
    design = SimpleNamespace(matrix=SimpleNamespace(limits=LIMITS))
    before = SimpleNamespace(ledger=SimpleNamespace(outline=tuple(died)), design=design)
    _Walk.refuse_storm(before, died[-1])
    after = SimpleNamespace(ledger=SimpleNamespace(outline=(*died, *ends(("b", "crashed")))), design=design)
    with pytest.raises(BoxError, match="4 boots in a row died"):
        _Walk.refuse_storm(after, died[-1])


def test_no_boot_begins_that_would_end_after_the_campaigns_time():
    limits = LimitKeys(campaign_s=100)
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    assert out_of_time(limits, now, spent_s=60, boot_s=40) is None
    assert out_of_time(limits, now, spent_s=61, boot_s=40).startswith("another boot of 40 s would end after the 100 s")


@pytest.mark.parametrize(
    ("hours", "clock", "boot_s", "quiet"),
    [
        ("07:00-22:00", "06:30", 1799, False),
        ("07:00-22:00", "06:30", 1800, True),
        ("07:00-22:00", "21:59", 0, True),
        ("07:00-22:00", "22:00", 3600, False),
        ("22:30-6:00", "05:59", 0, True),
        ("22:30-6:00", "06:00", 0, False),
        ("22:30-6:00", "22:00", 1800, True),
        ("22:30-6:00", "23:59", 0, True),
        ("07:00-22:00", "22:00", 9 * 3600, True),
    ],
)
def test_no_boot_reaches_into_the_quiet_hours_also_over_midnight(hours, clock, boot_s, quiet):
    now = datetime.fromisoformat(f"2026-03-03T{clock}:00+00:00")
    assert (out_of_time(LimitKeys(quiet_hours=hours), now, spent_s=0, boot_s=boot_s) is not None) is quiet


@pytest.mark.parametrize("hours", ["7-22", "24:00-06:00", "07:60-08:00", "07:00"])
def test_hours_that_are_none_are_refused(hours):
    with pytest.raises(ValueError, match="quiet_hours"):
        LimitKeys(quiet_hours=hours)
