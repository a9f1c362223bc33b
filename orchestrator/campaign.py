"""Walk the plan: ask, take the box, boot by boot append each record, and give the box back.

Nothing on the box is changed before all input was checked (`survey`) and consent was given. From the first change on,
production comes back whatever happens: by `_restored` on every way out of `run`, and by the timer on the box when we
die.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from orchestrator import __version__
from orchestrator.advice import boot_warning
from orchestrator.boot import cycle
from orchestrator.box import caches, lock
from orchestrator.box.services import Service, make_service
from orchestrator.box.transports import Transport, connect
from orchestrator.brakes import braked, out_of_time, storm
from orchestrator.custody import Custody, api_key, drain, holder, prove_back, tell_kept
from orchestrator.errors import (
    BOX,
    INTERRUPTED,
    OK,
    TERMINATED,
    USAGE,
    BoxError,
    ColdbootError,
    Interrupted,
    LedgerError,
    UsageError,
)
from orchestrator.failpoints import reached
from orchestrator.interrupts import Interrupts
from orchestrator.journal import DEFAULT
from orchestrator.ledger import BOOTS, Ledger, private_folder, read, write_private
from orchestrator.life import GpuIdle, Rig, Way
from orchestrator.matrix import Matrix, load_matrix, select
from orchestrator.on_end import Ending
from orchestrator.orphans import end_orphans
from orchestrator.plan import PLAN_FILE, Plan, PlannedBoot, add_block, experiment_folder, experiments_on, write_plan
from orchestrator.progress import Listener, hours, row_of
from orchestrator.records import (
    Answer,
    AnyRecord,
    BootEnded,
    BootRecord,
    BootStarted,
    CampaignEnded,
    CampaignStarted,
    JournalAnswered,
)
from orchestrator.redact import redact_argv, redact_text
from orchestrator.survey import (
    Design,
    Options,
    Site,
    announcement,
    check_fingerprint,
    keep_prompts,
    owes_production,
    own_launch,
    prepare,
    survey,
)

DISTURBED_IN_A_ROW = 3

NextBoots = Callable[[Iterable[AnyRecord], Plan, int | None], tuple[str, ...]]
AtEnd = Callable[[Design, Ending], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a campaign ended."""

    outcome: Literal["complete", "interrupted", "terminated", "budget_spent", "was_complete"]
    folder: Path
    exit_code: int = OK
    boots_left: int = 0


def consent(design: Design, site: Site, listener: Listener, *, yes: bool) -> None:
    """Asks before a production service is taken down; the rehearsal box has none, and is not asked about."""
    if site.rehearsal and not site.has_production:
        return
    listener.say(announcement(design, site))
    if yes:
        return
    answer = listener.confirm("Take it down and go on?" if site.has_production else "Go on?")
    if answer is None:
        raise UsageError("nobody can be asked here", hint="--yes says that the service may be taken down")
    if not answer:
        raise UsageError("not confirmed; nothing was changed")


# --- the walk --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Walk:
    """One campaign while it runs."""

    design: Design
    custody: Custody
    ledger: Ledger
    listener: Listener
    interrupts: Interrupts
    budget_s: float | None
    next_boots: NextBoots
    begun: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    idle: GpuIdle = field(default_factory=GpuIdle)
    way: Way = field(default_factory=Way)
    left_alone: set[str] = field(default_factory=set)

    @property
    def site(self) -> Site:
        """The box as it is reached now."""
        return self.custody.site

    def boots(self) -> Literal["complete", "interrupted", "budget_spent"]:
        """Boot after boot, until nothing is left, the budget is spent, or we are asked to stop."""
        disturbed: list[str] = []
        while todo := self.todo():
            self.listener.left([row_of(boot.variant, boot.cache) for boot in todo])
            if self.interrupts.reason is not None:
                return "interrupted"
            spent = time.monotonic() - self.begun
            if self.budget_s is not None and spent + self.longest_s > self.budget_s:
                return "budget_spent"
            if self.out_of_time(spent):
                return "budget_spent"
            self.custody.sure()
            self.refuse_full_disks()
            end = self.boot(todo[0])
            reached("between")
            self.refuse_storm(end)
            disturbed = [*disturbed, end.why] if end.boot_outcome == "disturbed" else []
            if len(disturbed) >= DISTURBED_IN_A_ROW:
                raise BoxError(
                    f"{len(disturbed)} boots in a row were disturbed; the last: {disturbed[-1]}",
                    hint="the variants are not to blame: mend the box, then run the same command again",
                )
        self.listener.left(())
        return "complete"

    def todo(self) -> tuple[PlannedBoot, ...]:
        """What is still wanted; an adaptive plan is asked for its next block when the last one is done."""
        todo = self.not_braked(self.design.todo(self.ledger.outline))
        if todo or self.design.plan.plan_name == "fixed":
            return todo
        wanted = self.next_boots(read(self.ledger.folder), self.design.plan, self.affordable())
        wanted = tuple(name for name in wanted if name not in self.left_alone)
        if wanted:
            self.design = replace(self.design, plan=add_block(self.design.plan, wanted))
            write_plan(self.ledger.folder / PLAN_FILE, self.design.plan)
        return self.not_braked(self.design.todo(self.ledger.outline))

    # --- brakes: see `limits:` ---------------------------------------------------------------------------------------

    def not_braked(self, todo: tuple[PlannedBoot, ...]) -> tuple[PlannedBoot, ...]:
        """Without the boots of variants that only die."""
        found = braked(self.ledger.outline, self.design.matrix.limits)
        for name in sorted(set(found) - self.left_alone):
            skipped = sum(boot.variant == name for boot in todo)
            if skipped:
                self.listener.warn(
                    f"{name} died or was not ready in {found[name]} boots in a row: its {skipped} boots left are not "
                    "begun\n        limits.fatal_boots_variant in matrix.yaml says after how many"
                )
        self.left_alone = set(found)
        return tuple(boot for boot in todo if boot.variant not in found)

    def out_of_time(self, spent_s: float) -> bool:
        """Whether the next boot would end too late; says so."""
        now = datetime.now().astimezone()
        why = out_of_time(self.design.matrix.limits, now, spent_s=spent_s, boot_s=self.longest_s)
        if why is not None:
            self.listener.warn(why)
        return why is not None

    def refuse_storm(self, end: BootEnded) -> None:
        """Ends a session in which one boot after the other dies."""
        row = storm(self.ledger.outline, self.design.matrix.limits)
        if row is not None:
            raise BoxError(
                f"{row} boots in a row died or were not ready, whatever the variant; the last: {end.why}",
                hint="is production itself well? limits.fatal_boots in matrix.yaml says after how many it ends",
            )

    def refuse_full_disks(self) -> None:
        """No boot on a full disk: its death would say nothing about its variant."""
        wanted = self.design.matrix.limits.free_disk_mib
        ours = shutil.disk_usage(self.ledger.folder).free // 2**20
        place, root = "its caches", self.design.box.cache_root
        cold = caches.free_mib(self.site.transport, self.site.unit, root=root)
        theirs = [*self.site.room(), *([] if cold is None else [(cold, place)])]
        hint = "make room, or lower the limit; then the same command goes on"
        less = f"less than limits.free_disk_mib: {wanted}"
        if ours < wanted:
            # As when a record cannot be kept: the box is well, it is our own side that has no room.
            raise LedgerError(f"{ours} MiB are free on this machine ({self.ledger.folder}), {less}", hint=hint)
        if theirs and min(theirs)[0] < wanted:
            free, where = min(theirs)
            raise BoxError(f"{free} MiB are free on the box, for {where}, {less}", hint=hint)

    def affordable(self) -> int | None:
        """Boots that the budget still pays for, by the longest so far; None without a budget, or before a boot."""
        if self.budget_s is None or not self.longest_s:
            return None
        return max(0, int((self.budget_s - (time.monotonic() - self.begun)) / self.longest_s))

    def boot(self, planned: PlannedBoot) -> BootEnded:
        """One boot; each record is in the ledger before the next step begins."""
        end: BootEnded | None = None
        answer: Answer | None = None
        try:
            for record in cycle(planned, self.site.launches[planned.variant], self.rig()):
                self.ledger.append(record)
                self.listener.record(record)
                if isinstance(record, JournalAnswered):
                    answer = record.answer
                if isinstance(record, BootEnded):
                    end = record
        except BoxError as error:
            # The boot has its end; what could not be stopped is the next one's to find, when the box is ours again.
            self.listener.warn(f"{planned.boot} was not stopped: {error.what}")
        assert end is not None
        self.longest_s = max(self.longest_s, end.seconds or 0.0)
        self.warn_of(end, answer)
        return end

    def end(self, record: CampaignEnded) -> None:
        """The campaign's last record. That production did not come back is worse than a record that cannot be kept."""
        try:
            self.ledger.append(record)
        except LedgerError as error:
            if record.restored:
                raise
            self.listener.warn(error.what)
        self.listener.record(record)

    def warn_of(self, end: BootEnded, answer: Answer | None) -> None:
        if end.boot_outcome in ("crashed", "not_ready", "disturbed"):
            journal = self.ledger.folder / BOOTS / end.boot / "journal.jsonl"
            said = boot_warning(
                end,
                self.ledger.outline,
                answer,
                matrix=self.design.matrix,
                unit_argv=self.site.unit.argv,
                journal=journal,
            )
            self.listener.warn(said)

    def rig(self) -> Rig:
        matrix, box, site = self.design.matrix, self.design.box, self.site
        return Rig(
            transport=site.transport,
            service=site.service,
            engine=site.engine,
            unit=site.unit,
            experiment=matrix.experiment,
            load=matrix.effective_load(),
            deadlines=matrix.effective_deadlines(),
            concurrency=matrix.concurrency,
            headroom=matrix.headroom,
            seed=self.design.plan.seed,
            boot_folder=self.ledger.boot_folder,
            interrupts=self.interrupts,
            cache_root=box.cache_root,
            clear=lambda: site.clear(box.cache_root),
            room=site.room,
            api_key=api_key(),
            temperature_c=matrix.limits.temperature_c,
            idle=self.idle,
            way=self.way,
            rules=DEFAULT.extended(matrix.rules),
            prompts=matrix.own_prompts(),
        )


def run(options: Options, listener: Listener, next_boots: NextBoots, at_end: AtEnd | None = None) -> Ended:
    """The whole of `invoke matrix`.

    Args:
        options: The command line.
        listener: Who is told.
        next_boots: What an adaptive plan asks which variants deserve another block.
        at_end: Is told how it ended or failed, after the box was given back.

    Raises:
        ColdbootError: bad input (4), a box that cannot be used or was lost (3).
    """
    design = prepare(options)
    for note in design.matrix.notes:
        listener.warn(note)
    if not design.todo() and not _more(design, next_boots) and not owes_production(design.records):
        return Ended("was_complete", design.folder)
    if options.budget_s is not None and design.longest_s > options.budget_s and not owes_production(design.records):
        # Not even one boot: nothing is taken down for it.
        longest = f"the longest boot so far took {hours(design.longest_s)}"
        listener.warn(f"a budget of {hours(options.budget_s)} pays for no boot: {longest}; nothing was begun")
        return Ended("budget_spent", design.folder, boots_left=len(design.todo()))
    with _told(design, at_end) as ended:
        transport = connect(design.box)
        try:
            site = survey(design, transport)
            check_fingerprint(design.records, site)
            consent(design, site, listener, yes=options.yes)
            ended.append(_campaign(design, site, listener, options, next_boots))
        finally:
            transport.close()
    return ended[0]


@contextmanager
def _told(design: Design, at_end: AtEnd | None) -> Iterator[list[Ended]]:
    """Says how the campaign ended, on every way out."""
    ended: list[Ended] = []
    outcome, code, why = "failed", BOX, None
    try:
        yield ended
        outcome, code = ended[0].outcome, ended[0].exit_code
    except ColdbootError as error:
        code, why = error.exit_code, redact_text(error.what)
        outcome = {INTERRUPTED: "interrupted", TERMINATED: "terminated", USAGE: "refused"}.get(code, "failed")
        raise
    finally:
        if at_end is not None:
            left = ended[0].boots_left if ended else None
            name = design.matrix.experiment
            at_end(design, Ending(outcome, name, design.box.name, design.folder, code, why, left))


def _more(design: Design, next_boots: NextBoots) -> bool:
    return design.plan.plan_name != "fixed" and bool(next_boots(design.records, design.plan, None))


def _campaign(design: Design, site: Site, listener: Listener, options: Options, next_boots: NextBoots) -> Ended:
    private_folder(design.folder)
    with (
        Interrupts(lambda reason: listener.say(f"{reason}: ending this boot, then restoring")) as interrupts,
        Ledger(design.folder) as ledger,
        Custody(design, site, listener, interrupts, drain_s=options.drain_s) as custody,
    ):
        if ledger.set_aside is not None:
            listener.warn(f"the ledger's last line was torn; it is kept in {ledger.set_aside}")
        if site.has_production:
            drain(site, interrupts, options.drain_s)
        write_private(design.folder / "matrix.yaml", design.matrix.kept.encode())
        keep_prompts(design.folder, design.matrix)
        write_plan(design.folder / "plan.json", design.plan)
        listener.planned(_rows(design), design.plan.blocks, design.records)
        opening: tuple[AnyRecord, ...] = (*_cut_off(design.records), _started(design, site))
        for record in opening:
            ledger.append(record)
            listener.record(record)
        for name in _orphans(site.transport, site.service, design.folder, options, design.matrix):
            listener.warn(f"an engine that a killed campaign had left was ended: {name}")
        walk = _Walk(
            design, custody, ledger, listener, interrupts, options.budget_s, next_boots, longest_s=design.longest_s
        )
        with _restored(walk) as ended:
            ended.outcome = walk.boots()
        left = len(walk.design.todo(ledger.outline))
    if ended.outcome == "interrupted":
        reason = interrupts.reason or "interrupted"
        raise Interrupted(
            f"{reason}; {'production is restored' if site.has_production else 'nothing of ours runs any more'}, "
            f"{'1 boot is' if left == 1 else f'{left} boots are'} left",
            exit_code=interrupts.exit_code,
            hint="the same command, without --new, goes on" if options.new else "the same command goes on",
        )
    return Ended(ended.outcome, design.folder, boots_left=left)


def _rows(design: Design) -> tuple[str, ...]:
    """The rows of the display, in file order: what this session boots, and what others did."""
    plan = design.plan
    order = {name: place for place, name in enumerate(plan.variants)}
    begun = {record.variant for record in design.records if isinstance(record, BootStarted)}
    boots = sorted(plan.boots_planned, key=lambda boot: (order[boot.variant], plan.cache.index(boot.cache)))
    boots = [boot for boot in boots if not design.only or boot.variant in begun.union(design.only)]
    return tuple(dict.fromkeys(row_of(boot.variant, boot.cache) for boot in boots))


@dataclass(slots=True)
class _Outcome:
    outcome: Literal["complete", "interrupted", "budget_spent", "failed"] = "failed"


@contextmanager
def _restored(walk: _Walk) -> Iterator[_Outcome]:
    """Arms the restore on the box, and restores and disarms it on every way out."""
    ended = _Outcome()
    why: str | None = None
    walk.custody.arm()
    try:
        yield ended
    except ColdbootError as error:
        why = redact_text(error.what)
        raise
    finally:
        restored = False
        try:
            walk.custody.restore()
            restored = True
        finally:
            outcome: Any = ended.outcome
            if outcome == "interrupted":
                outcome = "interrupted" if walk.interrupts.exit_code == 130 else "terminated"
            elif outcome == "failed":
                outcome = "box_lost" if not restored else "failed"
            walk.end(CampaignEnded(outcome=outcome, restored=restored, why=why))


def bring_back(options: Options, listener: Listener, *, break_lock: bool = False) -> str:
    """`invoke restore`: production as it was before a campaign that could not restore it; says what stands there now.

    From any machine: what was there before is read from the box itself. A second call changes nothing.

    Raises:
        BoxBusy: a campaign is alive on the box.
        RestoreFailed: production did not come back.
    """
    whole = load_matrix(options.matrix, box=options.box, prompts=False)
    matrix = select(whole, box=options.box, experiment=options.experiment)
    box = matrix.target
    transport = connect(box)
    try:
        folder = experiment_folder(options.out, matrix)
        service = make_service(transport, box, folder.resolve() / "box")
        with lock.hold(transport, service.lock_name, holder("restore"), break_lock=break_lock):
            was = service.production()
            for name in _orphans(transport, service, folder, options, matrix, experiment=matrix.experiment):
                listener.say(f"an engine that a killed campaign had left was ended: {name}")
            try:
                service.restore(was)
            finally:
                tell_kept(service, listener)
            if was.active:
                listener.say(f"waiting until {service.name} serves again")
                prove_back(service, was, own_launch(box, service.describe()), transport, matrix.effective_deadlines())
            service.disarm()
            caches.sweep(transport, service.describe(), root=box.cache_root)
    finally:
        transport.close()
    if box.service == "process" and not was.active:
        return f"{box.name}: nothing of ours runs any more"
    return f"{service.name} on {box.name} is {'serving' if was.active else 'stopped'}, as it was before"


def _orphans(
    transport: Transport, own: Service, folder: Path, options: Options, matrix: Matrix, *, experiment: str | None = None
) -> tuple[str, ...]:
    """Ends engines of other folders on the same box, of one experiment or of all; says whose."""
    others = [each for each in experiments_on(options.out, matrix.box, experiment) if each != folder]
    stop_s = matrix.effective_deadlines().stop_s
    return end_orphans(transport, matrix.target, others, own, holder=holder("restore"), stop_s=stop_s)


def _cut_off(records: tuple[AnyRecord, ...]) -> tuple[BootEnded, ...]:
    """The ends of boots that a killed campaign left without one."""
    begun = {record.boot: record for record in records if isinstance(record, BootStarted)}
    for record in records:
        if isinstance(record, BootEnded):
            begun.pop(record.boot, None)
    return tuple(
        BootEnded(
            **record.model_dump(include=set(BootRecord.model_fields) - {"v", "at"}),
            boot_outcome="aborted",
            why="the campaign was killed during this boot",
        )
        for record in begun.values()
    )


def _started(design: Design, site: Site) -> CampaignStarted:
    matrix = design.matrix
    return CampaignStarted(
        experiment=matrix.experiment,
        box=design.box.name,
        rehearsal=site.rehearsal,
        seed=design.plan.seed,
        boots_planned=design.plan.boots if isinstance(design.plan.boots, int) else None,
        fingerprint=site.fingerprint,
        versions={"coldboot": __version__},
        production=site.production.model_copy(update={"command": redact_argv(site.production.command)}),
        resumed=any(isinstance(record, CampaignStarted) for record in design.records),
        variants=design.plan.variants,
        concurrency=matrix.concurrency,
        tolerance=matrix.tolerance,
        production_variant=site.production_variant,
        changes=site.changes,
        commands={name: redact_argv(launch.argv) for name, launch in site.launches.items()},
        base_command=redact_argv(site.unit.argv),
        load=_load_of(matrix),
        headroom=matrix.headroom,
        objective=matrix.objective,
        constraints=matrix.constraints,
        claims=matrix.claims,
        memory_bandwidth_gb_s=design.box.memory_bandwidth_gb_s,
        weights_gib=design.box.weights_gib,
        checkpoint_gib=site.checkpoint_gib,
    )


def _load_of(matrix: Matrix) -> dict[str, Any]:
    """The load; where prompts are the user's own, which those are, in place of a length that they do not have."""
    told, own = matrix.effective_load().model_dump(mode="json"), matrix.own_prompts()
    if own is not None:
        del told["input_tokens"]
        told |= {"prompts_sha256": own.digest, "prompts_in_file": len(own.prompts)}
    return told
