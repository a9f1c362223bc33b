"""The GitHub workflows: who may start what on the runner beside production, and that their very steps run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT, copy_to, environment

from orchestrator.yamlfile import load_yaml
from tasks import namespace

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


def read(path):
    return load_yaml(path.read_text(encoding="utf-8"), str(path))[0]


MATRIX = read(FOLDER / "matrix.yml")
STEPS = MATRIX["jobs"]["matrix"]["steps"]


def every_step():
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            for step in job["steps"]:
                yield path.name, name, step


def named(name):
    return next(step for step in STEPS if step.get("name") == name)


# --- who may start what --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_the_workflows_fit_githubs_schema(schema):
    done = subprocess.run(
        (sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, WORKFLOWS)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_issue_forms_fit_githubs_schema():
    for schema, pattern in (("issue-forms", "[!c]*.yml"), ("issue-config", "config.yml")):
        files = sorted(map(str, (ROOT / ".github" / "ISSUE_TEMPLATE").glob(pattern)))
        assert files
        words = (sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.github-{schema}", *files)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_self_hosted_runner_is_started_by_hand_and_by_the_clock_alone():
    hosted = {path.name for path in WORKFLOWS for job in read(path)["jobs"].values() if "self-hosted" in job["runs-on"]}
    assert hosted == {"matrix.yml"}
    for name in hosted:
        assert set(read(FOLDER / name)["on"]) == {"schedule", "workflow_dispatch"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_workflow_may_write_to_the_repository(path):
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("permissions" not in job for job in workflow["jobs"].values())
    assert "pull_request_target" not in workflow["on"]


def test_what_a_person_types_is_never_program_text():
    for where, job, step in every_step():
        assert "${{" not in step.get("run", ""), (where, job, step.get("name"))


def test_actions_are_pinned_by_their_major_version_and_leave_no_credentials():
    for where, _, step in every_step():
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v[0-9]+", step["uses"]), where
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


def test_one_campaign_at_a_time_and_none_is_cancelled_for_another():
    assert MATRIX["concurrency"] == {"group": "coldboot", "cancel-in-progress": False}


def test_production_comes_back_whatever_happened_and_has_time_to():
    measure, restore = named("Boot and measure"), named("Restore")
    assert restore["if"] == "always()"
    assert "coldboot restore" in restore["run"]
    assert STEPS.index(restore) == STEPS.index(measure) + 1
    job_min = MATRIX["jobs"]["matrix"]["timeout-minutes"]
    assert measure["timeout-minutes"] + restore["timeout-minutes"] < job_min


def test_the_runner_is_asked_for_by_a_label_of_its_own_and_behind_an_environment():
    job = MATRIX["jobs"]["matrix"]
    assert job["runs-on"] == ["self-hosted", "linux", "coldboot"]
    assert job["environment"] == "coldboot"
    assert list(MATRIX["jobs"]) == ["matrix"]


def test_summary_and_results_are_kept_after_a_failure_too():
    kept = next(step for step in STEPS if step.get("uses", "").startswith("actions/upload-artifact"))
    assert named("Report")["if"] == "always()"
    assert kept["if"].startswith("always() && ")
    assert kept["with"]["path"] == "${{ steps.report.outputs.folder }}"
    assert [STEPS.index(step) for step in (named("Restore"), named("Report"), kept)] == sorted(
        STEPS.index(step) for step in (named("Restore"), named("Report"), kept)
    )


def test_every_job_ends_by_itself():
    for path in WORKFLOWS:
        for name, job in read(path)["jobs"].items():
            assert 0 < job["timeout-minutes"] <= 660, (path.name, name)


def test_the_key_reaches_only_the_steps_that_talk_to_the_engine():
    holders = [step["name"] for step in STEPS if "COLDBOOT_API_KEY" in json.dumps(step.get("env", {}))]
    assert holders == ["Boot and measure", "Restore"]
    assert "secrets" not in json.dumps(MATRIX["jobs"]["matrix"]["env"])


# --- the very steps ------------------------------------------------------------------------------------------------


class Runner:
    """Does what GitHub's runner does with `run:` steps, on this machine: environment, outputs, conditions, shell."""

    def __init__(self, folder: Path, inputs: dict[str, str]) -> None:
        self.home = folder
        self.workspace = copy_to(folder / "work" / "repo")
        self.inputs = inputs
        self.outputs: dict[str, dict[str, str]] = {}
        self.summary = folder / "summary.md"
        self.summary.touch()
        self.log: list[tuple[str, int, str]] = []
        self.failed = False

    def value(self, expression: str) -> str:
        """The expressions that this workflow uses, and no others."""
        for part in expression.split(" || "):
            found = self._atom(part.strip())
            if found:
                return found
        return ""

    def _atom(self, text: str) -> str:
        head, *rest = text.split(".")
        if text.startswith("'"):
            return text.strip("'")
        if head == "inputs":
            return self.inputs.get(rest[0], "")
        if head in ("vars", "secrets"):
            return ""
        if head == "steps":
            return self.outputs.get(rest[0], {}).get(rest[2], "")
        return {"github.workspace": str(self.workspace), "github.run_id": "17", "github.run_attempt": "1"}[text]

    def env(self, *blocks: dict[str, str]) -> dict[str, str]:
        merged = environment(self.home)
        for block in blocks:
            merged |= {name: EXPRESSION.sub(lambda found: self.value(found[1]), text) for name, text in block.items()}
        return merged

    def run(self, step: dict) -> None:
        condition = step.get("if", "success()")
        if self.failed and "always()" not in condition:
            return
        output = self.home / "output"
        output.write_text("")
        env = self.env(MATRIX["jobs"]["matrix"]["env"], step.get("env", {}))
        env |= {"GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_OUTPUT": str(output)}
        done = subprocess.run(
            ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]),
            cwd=self.workspace,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        if "id" in step:
            lines = output.read_text().splitlines()
            self.outputs[step["id"]] = dict(line.split("=", 1) for line in lines)
        self.log.append((step["name"], done.returncode, done.stdout))
        self.failed = self.failed or done.returncode != 0

    def said(self, name: str) -> tuple[int, str]:
        return next((code, text) for step, code, text in self.log if step == name)


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """The whole workflow, once: one boot of spec-1 on the rehearsal box."""
    made = Runner(tmp_path_factory.mktemp("runner"), {"boots": "1", "only": "spec-1"})
    for step in STEPS:
        if "run" in step:
            made.run(step)
    return made


@pytest.mark.rehearsal
def test_every_step_of_the_workflow_runs(runner):
    assert [name for name, _, _ in runner.log] == [step["name"] for step in STEPS if "run" in step]
    for name, code, text in runner.log:
        assert code == 0, f"{name}:\n{text[-3000:]}"


@pytest.mark.rehearsal
def test_the_summary_is_the_report_with_the_gates_sentence(runner):
    summary = runner.summary.read_text(encoding="utf-8")
    report = Path(runner.outputs["report"]["folder"]) / "report" / "report.md"
    assert summary.startswith(report.read_text(encoding="utf-8"))
    assert "REHEARSAL: UNDECIDED" in summary.splitlines()[-1]


@pytest.mark.rehearsal
def test_an_undecided_gate_is_a_warning_and_no_failure(runner):
    code, text = runner.said("Gate")
    assert code == 0
    assert "::warning title=Coldboot::REHEARSAL: UNDECIDED" in text


@pytest.mark.rehearsal
def test_results_stand_beside_the_workspace_where_a_checkout_leaves_them(runner):
    folder = Path(runner.outputs["report"]["folder"]).resolve()
    assert folder == (runner.workspace.parent / "coldboot-artifacts" / "ci-17").resolve()
    assert (folder / "records.jsonl").exists()


@pytest.mark.rehearsal
def test_after_a_failure_production_is_restored_and_the_gate_is_not_asked(runner):
    again = Runner(runner.home / "again", {"boots": "1", "only": "no-such-variant"})
    (again.workspace / ".venv").symlink_to(runner.workspace / ".venv")
    for step in STEPS:
        if step.get("name") in ("Boot and measure", "Restore", "Gate"):
            again.run(step)
    assert [(name, code) for name, code, _ in again.log] == [("Boot and measure", 4), ("Restore", 0)]


@pytest.mark.rehearsal
def test_a_production_that_is_rejected_fails_the_run_and_the_summary_says_why(runner):
    made = Runner(runner.home / "rejected", {"boots": "1", "only": "spec-3"})
    (made.workspace / ".venv").symlink_to(runner.workspace / ".venv")
    for step in STEPS:
        if step.get("name") in ("Boot and measure", "Restore", "Report", "Gate"):
            made.run(step)
    assert [(name, code) for name, code, _ in made.log] == [
        ("Boot and measure", 0),
        ("Restore", 0),
        ("Report", 0),
        ("Gate", 5),
    ]
    assert "REHEARSAL: FAIL: production (spec-3) is REJECTED" in made.summary.read_text(encoding="utf-8")


# --- what was installed --------------------------------------------------------------------------------------------


@pytest.mark.rehearsal
def test_everything_that_is_no_python_is_in_the_installed_package(runner):
    package = next((runner.workspace / ".venv" / "lib").glob("python*/site-packages/orchestrator"))
    ours = runner.workspace / "orchestrator"
    data = {
        str(path.relative_to(ours))
        for path in ours.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts
    }
    assert {"prompts.txt", "matrix.schema.json", "journal/vllm.toml"} <= data
    assert {name for name in data if not (package / name).exists()} == set()


@pytest.mark.rehearsal
def test_the_installed_command_measures_in_a_folder_that_holds_nothing_but_a_matrix(runner, tmp_path):
    (tmp_path / "examples").mkdir()
    for name in ("matrix.yaml", "examples/vllm-qwen.service"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    coldboot = runner.workspace / ".venv" / "bin" / "coldboot"
    for words in (("matrix", "--boots", "1", "--only", "spec-1"), ("report",)):
        done = subprocess.run(
            (str(coldboot), *words),
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "artifacts" / "gwen" / "report" / "report.html").exists()


@pytest.mark.rehearsal
def test_the_installed_command_offers_the_same_tasks_as_a_checkout(runner):
    coldboot = runner.workspace / ".venv" / "bin" / "coldboot"
    listed = subprocess.run(
        (str(coldboot), "--list"),
        cwd=runner.home,
        env=environment(runner.home),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    ours = set(re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE))
    own = {name for name in namespace.task_names if name == "check" or name.startswith(("test", "fuzz"))}
    assert ours == set(namespace.task_names) - own
