"""What is made from the keys of matrix.yaml: the JSON Schema for editors, and the page docs/matrix.md.

`python -m orchestrator.matrix_pages` writes both; a test holds that they are current.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orchestrator.matrix_keys import (
    BoxKeys,
    Deadlines,
    GridKeys,
    LimitKeys,
    LoadSpec,
    MatrixFile,
    ObjectiveKeys,
    RuleKeys,
)

HERE = Path(__file__).resolve().parent
SCHEMA_FILE = HERE / "matrix.schema.json"
PAGE_FILE = HERE.parent / "docs" / "matrix.md"

_SECTIONS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The experiment", "Keys at the top of the file.", MatrixFile),
    (
        "`load:`",
        "How each trial loads the engine. Stands at the top for all boxes, and under a box for what differs there.",
        LoadSpec,
    ),
    (
        "`deadlines:`",
        "How long each step of a boot may take. Stands at the top, and under a box for what differs there.",
        Deadlines,
    ),
    (
        "`limits:`",
        "When a campaign ends, or leaves a variant alone, although boots are left. They may be changed at any time.",
        LimitKeys,
    ),
    (
        "`objective:`",
        "What the winner is best in. It is declared before the boots, so a change needs `--new`.",
        ObjectiveKeys,
    ),
    ("`boxes:`", "One entry a box, by name.", BoxKeys),
    ("`rules:`", "A list; see [rules of your own](#rules-of-your-own) below.", RuleKeys),
    ("`grids:`", "One entry a grid, by name; see [grids](#grids) below.", GridKeys),
)

_TOP = """\
<!-- Made from orchestrator/matrix_keys.py by `python -m orchestrator.matrix_pages`; changes here are lost. -->

# matrix.yaml, key by key

The file says what is compared and on which box. The smallest one that works on a machine with a systemd unit:

```yaml
boxes:
  here: {unit: vllm.service}
variants:
  production: {}
  spec-1: {spec-tokens: 1}
```

An editor that speaks to the YAML language server completes and checks the keys, given this first line:

```yaml
# yaml-language-server: $schema=orchestrator/matrix.schema.json
```

Whatever is wrong is said all at once, before anything is started, with exit code 4:

```
matrix.yaml:4: boots: `0` is not accepted; accepted: a whole number, 1 to 1000, or auto
matrix.yaml:7: load.stream: `on` is text in YAML 1.2, not a boolean, write true; accepted: true or false
```

## How YAML is read

By YAML 1.2. Only `true` and `false` are booleans: `on`, `off`, `yes`, `no` are text (`headroom: off` is the one key
that takes them). A key twice is an error. `010` is an error, because it is 8 to some readers and 10 to others. Where
a number is needed, `1e3`, `1_000`, `0x10`, `.inf` and `"8"` are errors that say what to write. Anchors, aliases and
`<<` work; tags do not. A duration is a number of seconds or text: `90`, `"90s"`, `5min`, `1h30m`.
"""

_VARIANTS = """\
## `variants:`

One entry a variant, by name. Production's command comes from the unit; a variant says only what it changes in it.

| written | the command gets |
|---|---|
| `spec-tokens: 3` | `--spec-tokens 3` |
| `enable-prefix-caching: true` | `--enable-prefix-caching` |
| `enable-prefix-caching: false` | `--no-enable-prefix-caching` |
| `cudagraph-capture-sizes: [1, 2, 4]` | `--cudagraph-capture-sizes 1 2 4` |
| `speculative-config: {method: ngram}` | `--speculative-config '{"method": "ngram"}'` |
| `unset: [spec-tokens]` | no `--spec-tokens` |
| `env: {OMP_NUM_THREADS: 1}` | `OMP_NUM_THREADS=1` in the environment |
| `env: {HF_HUB_OFFLINE: null}` | no such variable in the environment |
| `program: [/opt/v32/bin/python, -m, vllm.entrypoints.openai.api_server]` | this before its first flag |

- `{}` (or nothing) is production as it stands.
- Leading dashes may be written or not, and `_` for `-`: `--spec_tokens` is `spec-tokens`. `host` and `port` belong to
  the box.
- `on` as a flag's value is passed on as the text `on`; `matrix` notes it. A flag's value cannot be null: say `true`
  for a flag without a value, or name it under `unset:`. A flag cannot be set and unset at once.
- Numbers of `env:` are passed on as they are written; booleans must be in quotes.
- `program:` makes another version, or another build, a variant: a second virtual environment beside production's.
- A name is a folder's: letters, digits, `-`, `_`, `.`, at most 64, not only in case different from another.

## Grids

A grid writes variants out that you would otherwise write by hand: every combination of its factors' levels.

```yaml
boxes:
  here: {unit: vllm.service}
variants:
  production: {}
grids:
  sweep:
    factors:
      spec-tokens: [1, 3]
      max-num-seqs: [64, 128]
    exclude:
      - {spec-tokens: 3, max-num-seqs: 128}
```

gives `production`, `spec-tokens-1_max-num-seqs-64`, `spec-tokens-1_max-num-seqs-128` and
`spec-tokens-3_max-num-seqs-64`: plain variants, named as such everywhere (`--only`, folders, report).

```yaml
boxes:
  here: {unit: vllm.service}
grids:
  versions:
    factors:
      venv:                       # a name of your own: labelled levels, each with all that belongs together
        v26: {}
        v32: {program: [/opt/v32/bin/python, -m, vllm.entrypoints.openai.api_server]}
      spec:
        plain: {unset: [spec-method, spec-model, spec-tokens]}
        mtp1: {spec-tokens: 1}
      env.OMP_NUM_THREADS: [1, 4]
    common: {enable-prefix-caching: false}
    name: "{venv}-{spec}-t{env.OMP_NUM_THREADS!}"
  sizes:
    factors:
      max-num-seqs: [32, 64, 128]
      max-num-batched-tokens: [2048, 4096, 8192]
    linked: [[max-num-seqs, max-num-batched-tokens]]
    name: "seqs{max-num-seqs!}"
```

gives `v26-plain-t1` … `v32-mtp1-t4` (eight) and `seqs32`, `seqs64`, `seqs128`. Linked factors go through their levels
together. Two variants of one name, a name that cannot be a folder's, an exclusion that excludes nothing: errors, with
the line in the grid. At most 500 variants come from one grid, and 1000 are in a file; each costs a boot in every block.

## Includes

```yaml
include: [common.yaml]
load: {input_tokens: 4096}
```

Files are named relative to the one that includes them, and include no others. Boxes, variants, grids, and the keys of
`load:` and `deadlines:` are put together name by name; of two values the including file's counts. A box, a variant or a
grid is such a value, taken whole: who writes one of the same name writes all its keys again, `env:` and `load:` too.
A path in an included file, such as `unit_file`, is relative to the file that is run. The experiment's folder keeps what
it all comes to, as one `matrix.yaml`.

## Several prompt lengths

```yaml
boxes:
  here: {unit: vllm.service}
variants:
  production: {}
  spec-1: {spec-tokens: 1}
concurrency: [1, 8]
load: {input_tokens: [512, 8000]}
constraints:
  - ttft_p99_ms <= 2000 at 8@8000
```

Each boot then measures every concurrency at every length, lengths ascending: here 1@512, 8@512, 1@8000, 8@8000. A level
is spelled `streams@prompt tokens` in `objective:`, `constraints:`, `claims:` and `invoke gate --claim`; `8` alone means
eight streams at every length. The winner is the best over all levels; a collapse is judged within one length. Prompt
and answer together must fit into the model's context: where the unit or a variant says `--max-model-len`, a length that
does not fit is an error before anything is started. A verdict for each length of its own takes one small file a length,
as above, over one `common.yaml`.

## Rules of your own

What a line in the journal means is data, and yours decide before those that are shipped ([causes.md](causes.md)):

```yaml
boxes:
  here: {unit: vllm.service}
variants:
  production: {}
rules:
  - reason: WeightsShareGone
    pattern: 'Stale file handle'
    cause: model_not_found
    phase: weights
    permanent: false
    advice: Mount the share with the weights again.
    words: [Stale]
    matches:
      - "OSError: [Errno 116] Stale file handle: '/srv/models/x/model.safetensors'"
    ignores:
      - "OSError: [Errno 2] No such file or directory: '/srv/models/x/model.safetensors'"
```

A rule without witnesses, or one that its witnesses contradict, is refused. `invoke classify --journal FILE --matrix
matrix.yaml` tries them on a journal that you have; in a campaign they are used live. They change what an answer says
and, with `alarm: true`, how soon a dead boot is given up; they change no measurement, so they may change between two
sessions. Boots that have ended keep the answer that they got.

## What may change between two sessions

`invoke matrix` again goes on with an experiment. It refuses, and names what changed, when these differ from what the
experiment began with: variants and their flags, `concurrency`, `cache`, `headroom`, `tolerance`,
`objective`, `constraints`, `claims`, the load (of `prompts` what the file says, not its name), the
deadlines that decide an outcome (all but `clean_slate_s`, `stop_s`, `command_s`, `on_end_s`), and of the box its
`service`, `unit`, `unit_file` (its name), `program`, `engine`, `isolate`, `env`, `time_scale`. Free to change: `boots`,
`seed` (the plan keeps the one that it began with), `box`, `limits`, `on_end`, `rules`, comments, order, what the
report's bandwidth wall is made of, and how the box is reached. `--new` starts afresh.

## Where results go

`artifacts/<experiment>/` for the file's own box. Another box, by `--box` or by an edited `box:` line, has
`artifacts/<experiment>.<box>/`. `--new` makes `artifacts/<experiment>.2/`, then `.3`.
"""


def schema() -> str:
    """The JSON Schema (draft 2020-12) of matrix.yaml."""
    made = MatrixFile.model_json_schema()
    # Of a file that includes others, nothing is needed but the names of those.
    made.pop("required", None)
    made["anyOf"] = [{"required": ["boxes", "variants"]}, {"required": ["boxes", "grids"]}, {"required": ["include"]}]
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_tidy(made),
        "title": "matrix.yaml of Coldboot",
    }
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def page() -> str:
    """docs/matrix.md."""
    parts = [_TOP]
    for title, about, model in _SECTIONS:
        parts.append(f"## {title}\n\n{about}\n\n| key | meaning | accepted | default |\n|---|---|---|---|")
        parts.append("\n".join(_row(name, info) for name, info in model.model_fields.items()) + "\n")
    return "\n".join((*parts, _VARIANTS))


def write() -> None:
    """Write both files."""
    SCHEMA_FILE.write_text(schema(), encoding="utf-8")
    PAGE_FILE.parent.mkdir(exist_ok=True)
    PAGE_FILE.write_text(page(), encoding="utf-8")


def accepted(info: FieldInfo) -> str:
    """What a key accepts, in words."""
    extra = info.json_schema_extra
    return str(extra["accepted"]) if isinstance(extra, dict) else ""


def _row(name: str, info: FieldInfo) -> str:
    cells = (f"`{name}`", info.description or "", accepted(info), _default(info))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.default
    if value is None or value == {} or isinstance(value, BaseModel):
        return "–"
    if isinstance(value, tuple):
        return f"`{json.dumps(list(value))}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(value)}`" if isinstance(value, bool) else f"`{value}`"


def _tidy(node: Any) -> Any:
    """Our word `accepted` goes into the description, where editors show it; defaults of whole sections go away."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidied = {key: _tidy(value) for key, value in node.items() if key not in ("accepted", "title")}
    if isinstance(node.get("accepted"), str):
        tidied["description"] = f"{node.get('description', '')} Accepted: {node['accepted']}.".strip()
    if isinstance(tidied.get("default"), dict | None):
        tidied.pop("default", None)
    return tidied


if __name__ == "__main__":
    write()
