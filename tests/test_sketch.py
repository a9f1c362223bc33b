"""`invoke init`: what it writes loads, fits the unit, and says what production runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invoke.context import Context

from orchestrator import commands, survey
from orchestrator.box import unitfile
from orchestrator.box.engines import ENGINES, Launch
from orchestrator.errors import UsageError
from orchestrator.matrix import Matrix, load_matrix, parse_matrix
from orchestrator.sketch import from_box, from_file, matrix_text, scalar, sketch, write

ROOT = Path(__file__).parent.parent
UNIT = ROOT / "examples/vllm-qwen.service"
PYTHON = ("/v/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/m")
CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'


def unit_of(folder: Path, *argv: str, name: str = "vllm.service") -> Path:
    path = folder / name
    path.write_text(f"[Service]\nExecStart={unitfile.quote_exec(argv)}\n")
    return path


def made(folder: Path, *argv: str) -> Matrix:
    """The matrix of a unit file, checked in every way: by the loader with the unit, each variant composed."""
    path = folder / "matrix.yaml"
    write(path, matrix_text(from_file(unit_of(folder, *argv), path)), force=True)
    matrix = load_matrix(path, unit_check=survey.unit_problems)
    for variant in matrix.variants:
        for box in matrix.boxes.values():
            launch = survey.compose(box, argv, variant, 18080)
            assert isinstance(launch, Launch), (variant.name, launch)
    return matrix


def test_the_shipped_unit_gives_the_story_again(tmp_path):
    path = tmp_path / "matrix.yaml"
    source = from_file(UNIT, path)
    matrix = write(path, matrix_text(source), force=False)
    assert [variant.name for variant in matrix.variants] == ["no-spec", "spec-1", "spec-2", "spec-3", "spec-5"]
    assert matrix.variant("no-spec").unset == ("spec-method", "spec-model", "spec-tokens")
    assert (matrix.experiment, matrix.box, matrix.concurrency) == ("vllm-qwen", "rehearsal", (1, 2, 4, 8))
    assert (matrix.boxes["real"].unit, matrix.boxes["real"].port) == ("vllm-qwen.service", 8080)
    assert "#     --spec-tokens 3" in path.read_text()
    changes = {
        variant.name: ENGINES["vllm"].changes(
            source.argv, survey.compose(matrix.boxes["real"], source.argv, variant, 1)
        )
        for variant in matrix.variants
    }
    assert changes == {"no-spec": 3, "spec-1": 1, "spec-2": 1, "spec-3": 0, "spec-5": 1}


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (1, ["no-spec", "spec-1", "spec-2"]),
        (5, ["no-spec", "spec-1", "spec-3", "spec-5", "spec-8"]),
        (10, ["no-spec", "spec-1", "spec-8", "spec-10", "spec-20"]),
    ],
)
def test_numbers_of_tokens_around_productions_own(tmp_path, own, names):
    matrix = made(tmp_path, *PYTHON, "--spec-method", "mtp", "--spec-tokens", str(own))
    assert [variant.name for variant in matrix.variants] == names


def test_a_speculative_config_keeps_what_it_says_besides_the_number(tmp_path):
    matrix = made(tmp_path, *PYTHON, "--speculative-config", CONFIG)
    assert matrix.variant("no-spec").unset == ("speculative-config",)
    assert matrix.variant("spec-4").set == {}
    assert matrix.variant("spec-5").set == {"speculative-config": json.loads(CONFIG) | {"num_speculative_tokens": 5}}


@pytest.mark.parametrize("argv", [PYTHON, ("/v/vllm", "serve", "m"), (*PYTHON, "--enforce-eager")])
def test_a_unit_that_does_not_speculate_gives_production_and_examples_that_can_be_used(tmp_path, argv):
    matrix = made(tmp_path, *argv)
    assert [variant.name for variant in matrix.variants] == ["production"]
    text = (tmp_path / "matrix.yaml").read_text()
    assert "# ngram-3:" in text
    # Each example is a variant when its # is taken away.
    uncommented = "\n".join(
        line.replace("  # ", "  ", 1) if line.startswith("  # ") and "{" in line else line for line in text.splitlines()
    )
    fuller = parse_matrix(uncommented, tmp_path / "matrix.yaml")
    assert len(fuller.variants) >= 3
    assert not [problem for one in fuller.variants for problem in survey.unit_problems(matrix.boxes["rehearsal"], one)]


def test_short_contexts_and_few_sequences_are_respected(tmp_path):
    matrix = made(tmp_path, *PYTHON, "--max-model-len", "400", "--max-num-seqs", "3")
    assert matrix.concurrency == (1, 2)
    load = matrix.effective_load("real")
    assert load.input_tokens + load.output_tokens <= 400 - 64


def test_secrets_of_the_command_are_not_copied(tmp_path):
    made(tmp_path, *PYTHON, "--api-key", "sk-very-secret-indeed", "--note", "line\nbreak: {")
    text = (tmp_path / "matrix.yaml").read_text()
    assert "very-secret" not in text
    assert "[redacted]" in text


@pytest.mark.parametrize(
    "text", ["gwen", "true", "no", "010", "1e3", "~/.ssh/config", "a b", 'q"x', "#x", "ä: {", ".inf", "-"]
)
def test_a_text_is_read_back_as_it_was(text):
    matrix = parse_matrix(
        f"boxes:\n  b: {{transport: local, env: {{X: {scalar(text)}}}, unit: u}}\nvariants: {{a: {{}}}}\n"
    )
    assert matrix.boxes["b"].env == {"X": text}


def test_odd_names_become_names(tmp_path):
    unit = unit_of(tmp_path, *PYTHON, name="12.service")
    matrix = parse_matrix(matrix_text(from_file(unit, tmp_path / "m.yaml")), tmp_path / "m.yaml")
    assert matrix.experiment == "experiment-12"
    named = parse_matrix(matrix_text(from_file(unit, tmp_path / "m.yaml"), experiment="mine"), tmp_path / "m.yaml")
    assert named.experiment == "mine"


def test_a_file_that_is_there_is_not_replaced_unless_forced(tmp_path):
    path = tmp_path / "matrix.yaml"
    path.write_text("mine")
    text = matrix_text(from_file(UNIT, path))
    with pytest.raises(UsageError, match="--force"):
        write(path, text, force=False)
    assert path.read_text() == "mine"
    write(path, text, force=True)
    assert path.read_text() == text
    assert [one.name for one in tmp_path.iterdir()] == ["matrix.yaml"]


def test_what_cannot_be_changed_flag_by_flag_is_refused_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match="shell"):
        from_file(unit_of(tmp_path, "/bin/sh", "-c", "vllm serve m"), tmp_path / "matrix.yaml")
    with pytest.raises(UsageError, match="no-such"):
        from_file(tmp_path / "no-such.service", tmp_path / "matrix.yaml")
    with pytest.raises(UsageError, match="--box-host"):
        from_box("vllm.service", host="-oProxyCommand=x")
    assert sketch(("/v/vllm", "serve", "m"))[0].name == "production"


def test_the_command_writes_once_and_says_what_is_next(tmp_path, capsys):
    path = tmp_path / "m.yaml"
    words = {"unit_file": str(UNIT), "matrix": str(path)}
    commands.init(Context(), **words)
    said = capsys.readouterr().out
    assert said.splitlines() == [
        f"{path}: 5 variants, from vllm-qwen.service",
        f"fill in: `host:` of box `real` in {path}, an alias of your ssh config; look at its `unit:` and `port:`",
        "next:",
        f"  invoke doctor --matrix {path} --box real",
        f"  invoke plan --matrix {path} --box real",
        "without the box, a rehearsal of it on this machine:",
        f"  invoke matrix --matrix {path} --boots 3",
    ]
    with pytest.raises(SystemExit) as again:
        commands.init(Context(), **words)
    assert (again.value.code, "--force" in capsys.readouterr().err) == (4, True)
    commands.init(Context(), force=True, **words)
    with pytest.raises(SystemExit) as neither:
        commands.init(Context(), matrix=str(tmp_path / "other.yaml"))
    assert (neither.value.code, "--unit-file" in capsys.readouterr().err) == (4, True)
