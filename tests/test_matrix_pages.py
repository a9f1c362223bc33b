"""The JSON Schema and the page of keys are made from the models, and say what the reader says."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from orchestrator import matrix_pages
from orchestrator.errors import MatrixError
from orchestrator.matrix import load_yaml, parse_matrix
from orchestrator.matrix_keys import BoxKeys, Deadlines, GridKeys, LoadSpec, MatrixFile

ROOT = Path(__file__).parent.parent
MEND = "run `python -m orchestrator.matrix_pages`"


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(matrix_pages.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_schema_file_is_current():
    assert matrix_pages.SCHEMA_FILE.read_text(encoding="utf-8") == matrix_pages.schema(), MEND


def test_the_page_is_current():
    assert matrix_pages.PAGE_FILE.read_text(encoding="utf-8") == matrix_pages.page(), MEND


def test_the_shipped_file_points_editors_to_the_schema_and_fits_it(validator):
    text = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
    first = text.splitlines()[0]
    assert first == "# yaml-language-server: $schema=orchestrator/matrix.schema.json"
    assert (ROOT / first.partition("$schema=")[2]) == matrix_pages.SCHEMA_FILE
    validator.validate(load_yaml(text, "matrix.yaml")[0])


@pytest.mark.parametrize("model", [MatrixFile, LoadSpec, Deadlines, BoxKeys, GridKeys])
def test_every_key_is_explained(model):
    page = matrix_pages.page()
    for name, info in model.model_fields.items():
        assert info.description
        assert info.description[-1] == "."
        assert matrix_pages.accepted(info)
        assert f"\n| `{name}` | " in page


def example(beginning):
    blocks = [block.split("```")[0] for block in matrix_pages.page().split("```yaml\n")[1:]]
    return next(block for block in blocks if beginning in block)


def test_the_first_example_of_the_page_is_a_matrix():
    assert [variant.name for variant in parse_matrix(example("  spec-1:")).variants] == ["production", "spec-1"]


def test_the_grids_of_the_page_make_the_variants_that_it_names(validator):
    first, second = parse_matrix(example("  sweep:")), parse_matrix(example("  versions:"))
    assert [variant.name for variant in first.variants] == [
        "production",
        "spec-tokens-1_max-num-seqs-64",
        "spec-tokens-1_max-num-seqs-128",
        "spec-tokens-3_max-num-seqs-64",
    ]
    names = [variant.name for variant in second.variants]
    assert (names[0], names[7]) == ("v26-plain-t1", "v32-mtp1-t4")
    assert names[8:] == ["seqs32", "seqs64", "seqs128"]
    for beginning in ("  sweep:", "  versions:", "include:"):
        validator.validate(load_yaml(example(beginning), "f")[0])


GOOD = "boxes: {here: {unit: a.service}}\nvariants: {x: {}, y: }\n"


@pytest.mark.parametrize(
    "line",
    [
        "boots: 3",
        "boots: auto",
        "headroom: off",
        "cache: [cold, warm]",
        "load: {window_s: 5min, warmup_s: 0}",
        "deadlines: {ready_s: 15min}",
        "concurrency: [1]",
        "boxes: {here: {unit: a.service, env: {A: 1, B: x}}}",
    ],
)
def test_what_the_reader_takes_the_schema_takes(validator, line):
    text = line + "\n" + "".join(kept for kept in GOOD.splitlines(keepends=True) if kept[:5] != line[:5])
    parse_matrix(text)
    validator.validate(load_yaml(text, "f")[0])


@pytest.mark.parametrize(
    "line",
    [
        "boots: 0",
        "boots: sometimes",
        "bots: 3",
        "cache: hot",
        "cache: []",
        "load: {window_s: soon}",
        "load: {window_s: 0}",
        "load: {stream: on}",
        "concurrency: [0]",
        "concurrency: 1",
        "tolerance: 1",
        "experiment: a b",
    ],
)
def test_what_the_reader_refuses_the_schema_refuses(validator, line):
    with pytest.raises(MatrixError):
        parse_matrix(GOOD + line)
    assert not validator.is_valid(load_yaml(GOOD + line, "f")[0])
