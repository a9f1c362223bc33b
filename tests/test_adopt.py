"""A measured variant as production's own drop-in: systemd reads back what was measured, at production's own address."""

from __future__ import annotations

import pytest
from report_samples import sample

from orchestrator import verdict
from orchestrator.adopt import adopt, as_production, command_lines
from orchestrator.box import unitfile
from orchestrator.box.engines import ENGINES, Launch
from orchestrator.errors import LedgerError, UsageError
from orchestrator.matrix import Variant
from orchestrator.records import BootStarted, CampaignStarted, ProductionState, VariantVerdict, Verdicts

BASE = (
    *("/v/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m", "--served-model-name", "q"),
    *("--spec-tokens", "3", "--template-kwargs", '{"enable_thinking": false, "cost": "5$ 50%"}', "--enforce-eager"),
    *("--host", "0.0.0.0", "--port", "8080", "--ssl-keyfile", "/k"),
)


def measured(variant: Variant, base=BASE, engine="vllm") -> tuple[str, ...]:
    """The command as a campaign composes it: isolated."""
    launch = ENGINES[engine].compose(base, variant, host="127.0.0.1", port=18080)
    assert isinstance(launch, Launch)
    return launch.argv


def campaign(commands, **changes) -> CampaignStarted:
    given = {
        "experiment": "gwen",
        "box": "gwen",
        "rehearsal": False,
        "seed": 1,
        "boots_planned": 6,
        "variants": tuple(commands),
        "commands": commands,
        "base_command": BASE,
        "production": ProductionState(unit="vllm-qwen.service", active=True),
    }
    return CampaignStarted(**(given | changes))


def verdicts(name="spec-1", answer="WINNER", *, provisional=False, winner="spec-1", rehearsal=False) -> Verdicts:
    own = VariantVerdict(name=name, verdict=answer, boots=6, boots_failed=0, sentence=f"{name} is {answer}.")
    return Verdicts(
        experiment="gwen",
        box="gwen",
        rehearsal=rehearsal,
        tolerance=0.05,
        boots_planned=6,
        winner=winner,
        provisional=provisional,
        variants=(own,),
    )


def read_back(text: str) -> tuple[str, ...]:
    production = f"[Service]\nExecStart={unitfile.quote_exec(BASE)}\n"
    return unitfile.exec_argv(unitfile.parse(production, text), {})


@pytest.mark.parametrize(
    "variant",
    [
        Variant(name="v"),
        Variant(name="v", set={"spec-tokens": 1}),
        Variant(name="v", unset=("spec-tokens", "enforce-eager")),
        Variant(name="v", set={"spec-tokens": 8, "new-flag": [1, 2], "enable-prefix-caching": False, "-O": 2}),
    ],
)
def test_production_gets_what_was_measured_at_its_own_address_and_in_its_own_order(variant):
    found = as_production(BASE, measured(variant), keep_program=False)
    asked = ENGINES["vllm"].compose(BASE, variant, host=None, port=None)
    assert isinstance(asked, Launch)
    assert found == asked.argv
    assert "18080" not in found
    assert "127.0.0.1" not in found


@pytest.mark.parametrize("base", [BASE, ("/v/vllm", "serve", "/m", "--spec-tokens", "3", "--port", "8080")])
def test_a_rehearsals_own_program_is_never_handed_to_production(base):
    variant = Variant(name="v", set={"spec-tokens": 1})
    found = as_production(base, measured(variant, base, "rehearsal"), keep_program=True)
    asked = ENGINES["vllm"].compose(base, variant, host=None, port=None)
    assert isinstance(asked, Launch)
    assert found == asked.argv


def test_another_program_that_was_measured_is_adopted_with_its_flags():
    other = ("/new/python", *measured(Variant(name="v"))[1:])
    assert as_production(BASE, other, keep_program=False) == ("/new/python", *BASE[1:])


def test_the_drop_in_is_read_by_systemd_as_the_measured_command():
    commands = {"spec-1": measured(Variant(name="spec-1", set={"spec-tokens": 1}))}
    made = adopt((campaign(commands),), verdicts(), "spec-1")
    assert read_back(made.text) == tuple("1" if word == "3" else word for word in BASE)
    assert made.path == "/etc/systemd/system/vllm-qwen.service.d/50-coldboot-adopt.conf"
    assert made.warnings == ()


def test_the_diff_holds_the_change_and_nothing_else():
    commands = {"spec-1": measured(Variant(name="spec-1", set={"spec-tokens": 1}))}
    lines = adopt((campaign(commands),), verdicts(), "spec-1").diff.splitlines()[2:]
    assert [line for line in lines if line.startswith(("-", "+"))] == ["-  --spec-tokens 3 \\", "+  --spec-tokens 1 \\"]
    assert " ExecStart=/v/python -m vllm.entrypoints.openai.api_server \\" in lines


def test_a_command_over_several_lines_is_the_same_command():
    odd = (
        "/v/python",
        "-m",
        "vllm.x",
        "--a",
        "#no comment",
        ";",
        "--b",
        "",
        "--c",
        "tab\there",
        "--d",
        "${HOME} $$ %n",
    )
    text = "[Service]\n" + "\n".join(command_lines(odd)) + "\n"
    assert unitfile.exec_argv(unitfile.parse(text), {"n": "wrong"}, {"HOME": "wrong"}) == odd


def test_the_variants_environment_goes_with_it_and_ours_does_not():
    commands = {"spec-1": measured(Variant(name="spec-1"))}
    where = {"boot": "b01-spec-1", "variant": "spec-1", "cache": "cold", "block": 1, "position": 1}
    env = {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "COLDBOOT_REHEARSAL_STATE": "/x", "VLLM_ATTENTION": "a 50%"}
    started = BootStarted(**where, env=env)
    text = adopt((campaign(commands), started), verdicts(), "spec-1", unset_env=("HTTP_PROXY",)).text
    unit = unitfile.parse(text)
    assert unitfile.environment(unit, {}) == {"VLLM_ATTENTION": "a 50%"}
    assert unit.values("Service", "UnsetEnvironment") == ("HTTP_PROXY",)


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (verdicts(answer="REJECTED", winner="no-spec"), ("REJECTED", "no-spec")),
        (verdicts(answer="CONTENDER", winner="no-spec"), ("CONTENDER",)),
        (verdicts(provisional=True), ("provisionally", "6 boots")),
        (verdicts(rehearsal=True), ("REHEARSAL",)),
        (verdicts(name="other"), ("no boot",)),
    ],
)
def test_what_speaks_against_it_is_said(judged, words):
    commands = {"spec-1": measured(Variant(name="spec-1", set={"spec-tokens": 1}))}
    made = adopt((campaign(commands),), judged, "spec-1", force=True)
    assert len(made.warnings) == 1
    assert all(word in made.warnings[0] for word in words)


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (
            verdicts(answer="REJECTED", winner="no-spec"),
            r"spec-1 is REJECTED in gwen: REJECTED\.[\s\S]*--force",
        ),
        (verdicts(name="other"), r"no boot that counts in gwen[\s\S]*boot it first; --force"),
    ],
)
def test_what_is_rejected_or_was_never_booted_is_printed_only_by_force(judged, words):
    given = (campaign({"spec-1": measured(Variant(name="spec-1", set={"spec-tokens": 1}))}),)
    with pytest.raises(UsageError, match=words) as refused:
        adopt(given, judged, "spec-1")
    assert refused.value.exit_code == 4
    assert "--spec-tokens 1" in adopt(given, judged, "spec-1", force=True).text


def test_a_hidden_secret_is_not_adopted_in_silence():
    base = (*BASE, "--api-key", "[redacted]")
    commands = {"spec-1": measured(Variant(name="spec-1", set={"spec-tokens": 1}), base)}
    made = adopt((campaign(commands, base_command=base),), verdicts(), "spec-1")
    assert any("secret of vllm-qwen.service" in warning for warning in made.warnings)


def test_production_itself_needs_no_drop_in_and_that_is_said():
    made = adopt(
        (campaign({"spec-3": measured(Variant(name="spec-3"))}),), verdicts("spec-3", winner="spec-3"), "spec-3"
    )
    assert made.diff == ""
    assert "already" in made.warnings[0]


def test_who_is_not_there_cannot_be_adopted():
    commands = {"spec-1": measured(Variant(name="spec-1"))}
    with pytest.raises(UsageError, match=r"no variant 'spec-9'[\s\S]*spec-1"):
        adopt((campaign(commands),), verdicts(), "spec-9")
    with pytest.raises(LedgerError, match="production's command"):
        adopt((), verdicts(), "spec-1")


def test_a_whole_experiment_names_its_winner_as_provisional():
    whole = sample()
    made = adopt(whole.records, verdict.judge(whole.series), "spec-1")
    assert any("provisionally" in warning for warning in made.warnings)
    assert "+  --spec-tokens 1" in made.diff.splitlines()
    assert "--port 8080" in made.text
    # The boots' cold caches are no part of it, and a token is hidden.
    assert "VLLM_CACHE_ROOT" not in made.text
    assert "hf_x" not in made.text
