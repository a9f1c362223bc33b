"""Commands in the documentation: `console run` blocks are run, of all others task and options must exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from checkout import ROOT, copy_to, environment

from tasks import namespace

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\S*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:invoke|coldboot) [^`]+)`")
OPERATORS = frozenset({"&&", "||", ";", "|", ">", "<", "2>"})
OURS = frozenset({"invoke", ".venv/bin/invoke", "coldboot", ".venv/bin/coldboot"})


@dataclass(frozen=True)
class Block:
    """One fenced block: which page, its language, whether it is run, and its text."""

    page: Path
    language: str
    runs: bool
    text: str

    @property
    def commands(self) -> tuple[str, ...]:
        text = self.text.replace("\\\n", " ")
        if self.language == "console":
            return tuple(line[2:] for line in text.splitlines() if line.startswith("$ "))
        return tuple(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [Block(page, found[1], found[2].strip() == "run", found[3]) for found in FENCE.finditer(text)]


def simple_commands(line):
    """A line of shell as lists of words, parted at its operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = []
    for word in lexer:
        if word in OPERATORS:
            yield words
            words = []
        else:
            words.append(word)
    yield words


def wrong_with(words):
    """What is wrong with a command of ours: each task that stands there must exist, with each of its options."""
    tasks = namespace.tasks
    given = words[1:]
    if not given or given[0] in ("--list", "--version", "--help"):
        return None if len(given) < 2 or given[1] in tasks or given[1] == "TASK" else f"no task {given[1]}"
    task = None
    for word, before in zip(given, ["", *given], strict=False):
        name = word.partition("=")[0]
        if word in tasks and (task is None or not before.startswith("--")):
            task = tasks[word]
            options = {name.strip("_").replace("_", "-") for one in task.get_arguments() for name in one.names}
        elif task is None:
            return f"no task {word}"
        elif name.startswith("--") and name[2:] not in options and name[2:].removeprefix("no-") not in options:
            return f"no option {name}"
    return None


def test_the_check_would_see_a_task_and_an_option_that_do_not_exist():
    assert wrong_with(["invoke", "matrix", "--boots", "3"]) is None
    assert wrong_with(["invoke", "check", "test"]) is None
    assert wrong_with(["invoke", "report", "--explain", "spec-8"]) is None
    assert wrong_with(["invoke", "matricks"]) == "no task matricks"
    assert wrong_with(["invoke", "matrix", "--boot", "3"]) == "no option --boot"
    assert list(simple_commands("a && b 'c && d' | e > f")) == [["a"], ["b", "c && d"], ["e"], ["f"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_ours_exists_with_its_options(page):
    lines = [line for block in blocks(page) if block.language in ("bash", "console") for line in block.commands]
    lines += INLINE.findall(page.read_text(encoding="utf-8"))
    for line in lines:
        for words in simple_commands(line.replace("…", "")):
            for at, word in enumerate(words):
                if word in OURS:
                    assert wrong_with(words[at:]) is None, line
                    break


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_commands_says_in_what_language_it_is(page):
    for block in blocks(page):
        assert block.language in ("bash", "console", "yaml", "json", "ini", "python", ""), block.language
        assert block.language or not re.search(r"^\$? ?(\.venv/bin/)?(invoke|coldboot) [a-z]", block.text, re.MULTILINE)
        assert not block.runs or block.language == "console"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_blocks_are_shell(page):
    for block in blocks(page):
        if block.language == "bash":
            done = subprocess.run(("bash", "-n"), input=block.text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_and_to_a_heading_leads_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page):
    """Headings as GitHub links to them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_task_stands_in_the_readme_and_has_a_docstring():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, task in namespace.tasks.items():
        assert re.search(rf"`(invoke )?{name}[ `]", readme), name
        assert task.__doc__


def test_every_page_is_reached_from_the_readme():
    seen = {ROOT / "README.md"}
    todo = list(seen)
    while todo:
        page = todo.pop()
        for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve()
            if file.exists() and file not in seen:
                seen.add(file)
                todo.append(file)
    assert set(PAGES) <= seen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_path_that_begins_with_init_names_its_file_in_every_step(page):
    asks = {"doctor", "plan", "matrix"}
    for block in (block for block in blocks(page) if block.language == "bash"):
        steps = [words for line in block.commands for words in simple_commands(line) if words[:1] == ["invoke"]]
        made = [words[words.index("--matrix") + 1] for words in steps if words[1] == "init" and "--matrix" in words]
        for words in steps if made else ():
            assert words[1] not in asks or words[words.index("--matrix") + 1] == made[0], words


def test_the_main_command_of_the_readme_is_the_one_that_the_main_test_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ".venv/bin/invoke matrix --boots 3 && .venv/bin/invoke report" in readme
    assert 'invoke("matrix", "--boots", "3"' in (ROOT / "tests" / "test_main_job.py").read_text(encoding="utf-8")


# --- commands that are run -----------------------------------------------------------------------------------------

RUNNING = [page for page in PAGES if any(block.runs for block in blocks(page))]


def shown_outputs(block):
    """Each command of a console block with the output that stands below it."""
    lines = block.text.replace("\\\n", " ").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")] + [len(lines)]
    for start, end in pairwise(starts):
        yield lines[start][2:], lines[start + 1 : end]


def pattern(shown):
    """What is shown as a pattern: numbers may differ, blanks too; `…` alone is any lines, at a line's end its rest."""
    parts = []
    for line in shown:
        if line.strip() == "…":
            parts.append(r"(?:.*\n)*?")
            continue
        pieces = [re.escape(piece) for piece in re.sub(r"\d+(?:\.\d+)?", "#", " ".join(line.split())).split("…")]
        parts.append(".*".join(pieces) + r"\n")
    return "".join(parts)


def matches(shown, output):
    plain = "".join(re.sub(r"\d+(?:\.\d+)?", "#", " ".join(line.split())) + "\n" for line in output.splitlines())
    return re.fullmatch(pattern(shown), plain) is not None


def test_outputs_may_differ_in_numbers_and_in_nothing_else():
    assert matches(["a 1.5", "…", "end …"], "a  2\nb\nc\nend of it\n")
    assert matches(["…", "x"], "x\n")
    assert not matches(["a 1", "b"], "a 1\nc\n")
    assert not matches(["a"], "a\nb\n")


@pytest.mark.rehearsal
@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_what_a_page_shows_is_what_comes_out(page, tmp_path):
    checkout = copy_to(tmp_path / "repo")
    env = environment(tmp_path) | {"PYTHONPATH": "", "COLUMNS": "120"}
    for block in (block for block in blocks(page) if block.runs):
        for command, shown in shown_outputs(block):
            # A file and no pipe: what a command leaves running must not hold us up.
            with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
                subprocess.run(
                    ("bash", "-c", command),
                    cwd=checkout,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=240,
                    check=False,
                )
                output.seek(0)
                said = output.read()
            assert matches(shown, said), f"$ {command}\n{said}"
