"""The commands, as Invoke tasks: parse, call one function, print, exit code.

`tasks.py` in a checkout and the `coldboot` program outside of one offer these alike. Progress goes to stderr,
results to stdout.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from invoke.collection import Collection
from invoke.context import Context
from invoke.tasks import task
from rich.console import Console

from orchestrator import journal, kept, on_end, report, verdict
from orchestrator import options as option
from orchestrator.adopt import adopt as make_adoption
from orchestrator.adopt import unset_of
from orchestrator.closing import again, campaign_end, given, program, spoken
from orchestrator.errors import BOX, OK, USAGE, ColdbootError, UsageError
from orchestrator.gate import gate as judge_gate
from orchestrator.later import Later
from orchestrator.ledger import BOOTS, read
from orchestrator.live import make_listener
from orchestrator.matrix import find_experiment, load_matrix, parse_boots, select
from orchestrator.options import DEFAULT_MATRIX, DEFAULT_OUT, NEWEST, all_problems
from orchestrator.options import told as option_help
from orchestrator.outermost import command, say, show, width
from orchestrator.plan import PLAN_FILE, read_plan
from orchestrator.progress import Listener, PlainListener, folded
from orchestrator.records import Series, Verdicts
from orchestrator.report import compare as side_by_side
from orchestrator.series import read_series

if TYPE_CHECKING:
    from orchestrator import campaign, doctor, noise, outlook, simulate, sketch, survey, twins
    from orchestrator.report import formats
else:
    campaign, doctor, noise = (Later(f"orchestrator.{name}") for name in ("campaign", "doctor", "noise"))
    outlook, simulate, sketch = (Later(f"orchestrator.{name}") for name in ("outlook", "simulate", "sketch"))
    survey, twins = (Later(f"orchestrator.{name}") for name in ("survey", "twins"))
    formats = Later("orchestrator.report.formats")


def _print_verdicts(series: Series, *, stderr: bool = False) -> Verdicts:
    verdicts = verdict.judge(series)
    Console(highlight=False, stderr=stderr).print(report.table(verdicts, report.lost_words(verdicts, series)))
    return verdicts


def _on_end(listener: Listener) -> campaign.AtEnd:
    """The user's own command at a campaign's end; what goes wrong with it is only a warning."""

    def at_end(design: survey.Design, ending: on_end.Ending) -> None:
        words = design.matrix.on_end
        if words is None:
            return
        try:
            verdicts = kept.judged(design.folder)
        except ColdbootError as error:
            listener.warn(f"on_end: there is no verdict to tell: {error.what}")
            verdicts = None
        told = on_end.environment(ending, verdicts)
        wrong = on_end.run(words, told, timeout_s=design.matrix.effective_deadlines().on_end_s)
        if wrong is not None:
            listener.warn(wrong)

    return at_end


@task(
    auto_shortflags=False,
    help=option_help(
        "boots",
        "plan",
        "box",
        "only",
        "cache",
        "seed",
        "out",
        "experiment",
        "drain",
        "yes",
        "matrix",
        budget="start no boot that would end after this time, as 3h",
        new="begin afresh beside an experiment that cannot go on",
        dry_run="print boots and commands, change nothing",
        quiet="say only warnings and the end",
        json_lines="each record as a JSON line on standard output, and nothing else there",
    ),
)
@command(unexpected=BOX)
def matrix(
    _context: Context,
    boots: str | None = None,
    plan: str | None = None,
    box: str | None = None,
    only: str | None = None,
    cache: str | None = None,
    budget: str | None = None,
    seed: str | None = None,
    out: str = DEFAULT_OUT,
    experiment: str | None = None,
    drain: str | None = None,
    yes: bool = False,
    new: bool = False,
    dry_run: bool = False,
    matrix: str = DEFAULT_MATRIX,
    quiet: bool = False,
    json_lines: bool = False,
) -> int:
    """Boot every variant cold, N times, and measure: plan, boots, ledger."""
    with all_problems() as check:
        options = survey.Options(
            matrix=check(option.file, "matrix", matrix),
            out=check(option.folder, "out", out),
            boots=None if boots is None else check(parse_boots, boots),
            plan=check(option.plan_name, plan),
            box=box,
            only=check(option.names, "only", only),
            cache=check(option.cache_states, cache),
            seed=check(option.number, "seed", seed),
            experiment=experiment,
            budget_s=check(option.seconds, "budget", budget),
            drain_s=check(option.seconds, "drain", drain),
            yes=yes,
            new=new,
        )
    if dry_run:
        print(outlook.show(options, kept.judged, width=width(sys.stdout)))
        return OK
    with make_listener(quiet=quiet, json_lines=json_lines) as listener:
        ended = campaign.run(options, listener, verdict.next_boots, _on_end(listener))
    tell = say if json_lines else show
    if ended.outcome == "was_complete":
        report_again = f"{program()} report --experiment {ended.folder.name}{kept.out_again(out)}"
        tell(f"{ended.folder} is complete; `{report_again}` says what it means, more --boots adds to it")
        return OK
    records, series = kept.records_of(ended.folder)
    verdicts = _print_verdicts(series, stderr=json_lines)
    same = given(boots=boots, only=only, cache=cache, budget=budget, drain=drain, yes=yes)
    how = again(kept.out_again(out), "" if matrix == DEFAULT_MATRIX else given(matrix=matrix), same)
    where = sys.stderr if json_lines else sys.stdout
    left, wide = ended.boots_left, width(where)
    for line in campaign_end(verdicts, ended.folder, how, records=records, boots_left=left, width=wide):
        print(line, file=where)
    return ended.exit_code


@task(
    auto_shortflags=False,
    help=option_help(
        "out",
        experiment=NEWEST,
        explain="print the whole derivation of one variant's verdict",
        compare="two variants side by side, or two experiments, as spec-1,no-spec",
    ),
)
@command(unexpected=USAGE)
def report_(
    _context: Context,
    experiment: str | None = None,
    out: str = DEFAULT_OUT,
    explain: str | None = None,
    compare: str | None = None,
) -> int:
    """Ledger to verdicts and report, in every format; needs no box."""
    if compare is not None and explain is not None:
        raise UsageError("--compare and --explain at once", hint="one of the two; each prints a text of its own")
    folder = find_experiment(Path(out), experiment)
    if compare is not None:
        first = kept.experiment(folder, tell=experiment is not None)
        pairs = side_by_side.pairs(compare, first, lambda name: kept.other(Path(out), name))
        show("\n\n".join(side_by_side.render(side_by_side.compare(a, b)) for a, b in pairs))
        return OK
    records, series = kept.records_of(folder)
    kept.tell_which(folder, series, named=experiment is not None)
    if explain is not None:
        show(verdict.explain(series, explain))
        return OK
    verdicts = verdict.judge(series)
    how = again(kept.out_again(out), kept.matrix_again(folder))
    steps = tuple(report.next_steps(verdicts, folder.name, how, records=records))
    view = report.build_view(records, series, verdicts, folder / BOOTS, steps)
    written = formats.write(view, folder / "report")
    Console(highlight=False).print(report.reasons(verdicts))
    print()
    for path in written:
        if path.suffix in (".html", ".md", ".json"):
            print(path)
    return OK


@task(
    auto_shortflags=False,
    iterable=["claim"],
    help=option_help(
        "out",
        experiment=NEWEST,
        baseline="the folder of an experiment that was good: no regression against its boots",
        claim="as 'spec-1 >= 1.5x no-spec at 1'; may be given several times, and the worst answer counts",
    ),
)
@command(unexpected=USAGE)
def gate(
    _context: Context,
    experiment: str | None = None,
    out: str = DEFAULT_OUT,
    baseline: str | None = None,
    claim: Sequence[str] | None = None,  # of another default than None Invoke takes the type, and reads text by letters
) -> int:
    """For CI: 0 pass, 5 fail, 2 undecided. Production and the matrix's claims, or claims, or against a baseline."""
    folder = find_experiment(Path(out), experiment)
    series = kept.series_of(folder)
    kept.tell_which(folder, series, named=experiment is not None)
    before = None if baseline is None else kept.series_of(kept.ledger_folder(option.folder("baseline", baseline)))
    code, sentence = judge_gate(series, baseline=before, claims=tuple(claim or ()))
    show(sentence)
    return code


@task(
    auto_shortflags=False,
    help=option_help(
        series="hand-recorded boots (YAML, JSON, CSV), or a folder of another tool's results", json="verdicts as JSON"
    ),
)
@command(unexpected=USAGE)
def judge(_context: Context, series: str | None = None, json: bool = False) -> int:
    """Verdicts on hand-recorded boots, by the same code as a campaign."""
    if series is None:
        raise UsageError("judge needs --series FILE", hint="examples/seed-series.yaml is one")
    boots = read_series(option.file("series", series))
    if json:
        sys.stdout.write(verdict.to_json(verdict.judge(boots)))
        return OK
    _print_verdicts(boots)
    return OK


@task(
    auto_shortflags=False,
    help=option_help(
        journal="journalctl -o json, export or short, or a plain log; - is standard input",
        json="the answer as JSON",
        invocation="answer this start, by its InvocationID",
        all="answer every start, as a list",
        matrix="use the rules of this matrix.yaml, too",
    ),
)
@command(unexpected=USAGE)
def classify(
    _context: Context,
    journal_: str | None = None,
    json: bool = False,
    invocation: str | None = None,
    all: bool = False,
    matrix: str | None = None,
) -> int:
    """What ended (or did not end) this start: outcome, phase, cause, evidence."""
    if journal_ is None:
        raise UsageError("classify needs --journal FILE")
    rules = (
        journal.DEFAULT
        if matrix is None
        else journal.DEFAULT.extended(load_matrix(option.file("matrix", matrix)).rules)
    )
    said = journal.main_answer(str(option.file("journal", journal_)), invocation=invocation, every=all, rules=rules)
    if json:
        sys.stdout.buffer.write(orjson.dumps(said.value, option=orjson.OPT_APPEND_NEWLINE))
    else:
        show(said.text)
    return OK


@task(
    auto_shortflags=False,
    help=option_help(
        "box", "matrix", "out", "experiment", break_lock="also when a campaign seems to be alive on the box"
    ),
)
@command(unexpected=BOX)
def restore(
    _context: Context,
    box: str | None = None,
    matrix: str = DEFAULT_MATRIX,
    out: str = DEFAULT_OUT,
    experiment: str | None = None,
    break_lock: bool = False,
) -> int:
    """Production back now: our drop-in away, the service as it was before the campaign."""
    options = survey.Options(
        matrix=option.file("matrix", matrix), out=option.folder("out", out), box=box, experiment=experiment
    )
    with PlainListener() as listener:
        show(campaign.bring_back(options, listener, break_lock=break_lock))
    return OK


@task(
    auto_shortflags=False,
    help=option_help("box", "matrix", "out", "experiment", json="findings as JSON"),
)
@command(unexpected=BOX)
def doctor_(
    _context: Context,
    box: str | None = None,
    matrix: str = DEFAULT_MATRIX,
    out: str = DEFAULT_OUT,
    experiment: str | None = None,
    json: bool = False,
) -> int:
    """Every precondition of a campaign on a box, with its number and what mends it; changes nothing."""
    found = doctor.examine(
        survey.Options(
            matrix=option.file("matrix", matrix), out=option.folder("out", out), box=box, experiment=experiment
        )
    )
    if json:
        sys.stdout.buffer.write(orjson.dumps(found.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    elif sys.stdout.isatty():
        Console(highlight=False).print(doctor.table(found))
        print(spoken(doctor.mends(found)))
    else:
        print(spoken(doctor.plain(found)))
    return found.exit_code


@task(
    auto_shortflags=False,
    help=option_help("box", "matrix"),
)
@command(unexpected=BOX)
def box_helper(_context: Context, box: str | None = None, matrix: str = DEFAULT_MATRIX) -> int:
    """Print the script that installs coldboot-box, root's own helper, on a box; changes nothing by itself."""
    options = survey.Options(matrix=option.file("matrix", matrix), out=Path(DEFAULT_OUT), box=box)
    sys.stdout.write(doctor.helper_script(options))
    return OK


@task(
    auto_shortflags=False,
    positional=["variant"],
    help=option_help(
        "out",
        variant="which one",
        experiment=NEWEST,
        print="print the difference and the drop-in; nothing is ever written",
        force="also for a variant that is rejected, or that has no boot that counts",
    ),
)
@command(unexpected=USAGE)
def adopt(
    _context: Context,
    variant: str | None = None,
    experiment: str | None = None,
    out: str = DEFAULT_OUT,
    print_: bool = False,
    force: bool = False,
) -> int:
    """The drop-in that makes a variant production, as a difference to the unit's command; writes nothing."""
    if variant is None or not print_:
        raise UsageError("adopt needs a variant, and only prints", hint=f"`{program()} adopt spec-1 --print`")
    folder = find_experiment(Path(out), experiment)
    records, series = kept.records_of(folder)
    kept.tell_which(folder, series, named=experiment is not None)
    verdicts = verdict.judge(series)
    made = make_adoption(records, verdicts, variant, unset_env=unset_of(folder, variant), force=force)
    for warning in made.warnings:
        say(f"WARNING {warning}")
    print(f"{made.diff}\n\n# {made.path}\n{made.text}", end="")
    return OK


@task(
    auto_shortflags=False,
    help=option_help(
        "boots",
        "plan",
        "box",
        "only",
        "cache",
        "seed",
        "out",
        "experiment",
        "matrix",
        budget="say what this time buys, as 3h",
        commands="every variant's own commands in whole, as a dry run prints them",
        new="as if beginning afresh",
    ),
)
@command(unexpected=BOX)
def plan_(
    _context: Context,
    boots: str | None = None,
    plan: str | None = None,
    box: str | None = None,
    only: str | None = None,
    cache: str | None = None,
    budget: str | None = None,
    seed: str | None = None,
    out: str = DEFAULT_OUT,
    experiment: str | None = None,
    new: bool = False,
    commands: bool = False,
    matrix: str = DEFAULT_MATRIX,
) -> int:
    """What each variant changes, the steps and the order of boots, what a budget buys, the hours; changes nothing."""
    with all_problems() as check:
        options = survey.Options(
            matrix=check(option.file, "matrix", matrix),
            out=check(option.folder, "out", out),
            boots=None if boots is None else check(parse_boots, boots),
            plan=check(option.plan_name, plan),
            box=box,
            only=check(option.names, "only", only),
            cache=check(option.cache_states, cache),
            seed=check(option.number, "seed", seed),
            experiment=experiment,
            budget_s=check(option.seconds, "budget", budget),
            new=new,
        )
    print(outlook.show(options, kept.judged, every=commands, width=width(sys.stdout)))
    return OK


@task(
    auto_shortflags=False,
    help=option_help(
        box_host="read the unit of this box: an alias of the ssh config (default: this machine)",
        unit="the installed unit",
        user="it is a unit of the login's own manager",
        unit_file="read a unit file on this side instead",
        ssh_config="another ssh config file than ~/.ssh/config",
        experiment="its name (default: the unit's)",
        matrix="the file to write",
        force="replace a file that is there",
    ),
)
@command(unexpected=BOX)
def init(
    _context: Context,
    box_host: str | None = None,
    unit: str | None = None,
    user: bool = False,
    unit_file: str | None = None,
    ssh_config: str | None = None,
    experiment: str | None = None,
    matrix: str = DEFAULT_MATRIX,
    force: bool = False,
) -> int:
    """A first matrix.yaml from a running box's unit, or from a unit file."""
    path = option.file("matrix", matrix)
    if (unit is None) == (unit_file is None):
        raise UsageError(
            "init reads one unit",
            hint=f"`{program()} init --box-host ALIAS --unit vllm.service`, or `--unit-file FILE`",
        )
    if unit_file is not None:
        source = sketch.from_file(option.file("unit-file", unit_file), path)
    else:
        assert unit is not None
        source = sketch.from_box(unit, host=box_host, ssh_config=ssh_config, user=user)
    text = sketch.matrix_text(source, experiment=experiment, schema=(path.parent / sketch.SCHEMA).exists())
    made = sketch.write(path, text, force=force)
    file = "" if matrix == DEFAULT_MATRIX else f" --matrix {shlex.quote(matrix)}"
    print(f"{path}: {len(made.variants)} variants, from {source.unit}")
    for line in sketch.next_lines(made, source, path, tool=program(), options=file):
        print(line if line.startswith(" ") else folded(line, width(sys.stdout)))
    return OK


@task(
    auto_shortflags=False,
    help=option_help(
        plan="adaptive plans, separated by commas (default: nightly,pull-request)",
        trials="campaigns for each cell of the table (default 1000, several minutes)",
        seed="of the boots (default 1)",
        cells="of each variant, as levels make them, independent of each other (default 1)",
        write="a page to write the table into, as docs/error-rates.md",
    ),
)
@command(unexpected=USAGE)
def simulate_(
    _context: Context,
    plan: str = "nightly,pull-request",
    trials: str | None = None,
    seed: str | None = None,
    cells: str | None = None,
    write: str | None = None,
) -> int:
    """Error rates and boots of the plans, by the real planner and verdicts on boots whose truth is known."""
    page = None if write is None else option.file("write", write)
    before = "" if page is None else _page(page)  # before minutes of work, not after
    chosen = [name for one in option.names("plan", plan) if (name := option.plan_name(one)) is not None]
    count, begin = option.number("trials", trials), option.number("seed", seed)
    lines = []
    many = option.number("cells", cells)
    rates = simulate.table(
        chosen, simulate.TRIALS if count is None else count, begin or simulate.SEED, cells=1 if many is None else many
    )
    for line in rates:
        print(line, flush=True)
        lines.append(line)
    if page is not None:
        page.write_text(simulate.rewritten(before, lines), encoding="utf-8")
    return OK


def _page(page: Path) -> str:
    """A page whose table can be written anew."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--write: {page}: {why}", hint="a page that has a table, as docs/error-rates.md") from error
    simulate.rewritten(text, [])
    return text


@task(
    auto_shortflags=False,
    help=option_help(
        "box",
        "out",
        "drain",
        "yes",
        "matrix",
        variant="which one is doubled (default: the first of the file)",
        boots="boots of each twin (default 3)",
        windows="windows of each level in one boot (default 2)",
        new="begin afresh beside an earlier one",
    ),
)
@command(unexpected=BOX)
def aa(
    _context: Context,
    variant: str | None = None,
    boots: str = "3",
    windows: str = "2",
    box: str | None = None,
    out: str = DEFAULT_OUT,
    drain: str | None = None,
    yes: bool = False,
    new: bool = False,
    matrix: str = DEFAULT_MATRIX,
) -> int:
    """The rig's own noise: one configuration under two names, which nothing should tell apart."""
    whole = load_matrix(option.file("matrix", matrix), box=box)
    chosen = select(whole, box=box)
    count = option.number("windows", windows) or 1
    text = twins.twin_matrix(chosen, variant or chosen.all_variants[0].name, windows=count)
    with tempfile.TemporaryDirectory(prefix="coldboot-aa-") as folder, make_listener() as listener:
        file = Path(folder) / "twins.yaml"
        file.write_text(text, encoding="utf-8")
        with all_problems() as check:
            options = survey.Options(
                matrix=file,
                out=check(option.folder, "out", out),
                boots=check(parse_boots, boots),
                drain_s=check(option.seconds, "drain", drain),
                yes=yes,
                new=new,
            )
        ended = campaign.run(options, listener, verdict.next_boots)
    found = noise.measure(read(ended.folder), read_plan(ended.folder / PLAN_FILE))
    if kept.series_of(ended.folder).rehearsal:
        print("REHEARSAL: the noise of the stand-in engine, not of a GPU.")
    show(noise.report(found))
    return ended.exit_code


NAMESPACE = Collection()
NAMESPACE.add_task(matrix)
NAMESPACE.add_task(report_, name="report")
NAMESPACE.add_task(gate)
NAMESPACE.add_task(judge)
NAMESPACE.add_task(classify)
NAMESPACE.add_task(restore)
NAMESPACE.add_task(doctor_, name="doctor")
NAMESPACE.add_task(box_helper)
NAMESPACE.add_task(adopt)
NAMESPACE.add_task(plan_, name="plan")
NAMESPACE.add_task(init)
NAMESPACE.add_task(simulate_, name="simulate")
NAMESPACE.add_task(aa)
