"""`invoke doctor`: every precondition of a campaign on a box, each with its number and what mends it.

Nothing is changed on either side. The checks are data (`checks`: a command and a pure judge; `probes`: what is no
single command); this module asks them in their order. What cannot be asked because something before it failed is
named, and is no finding.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace

from orchestrator.box import caches, lock
from orchestrator.box.engines import ENGINES, is_rehearsal
from orchestrator.box.process import ProcessService
from orchestrator.box.services import Service, UnitFacts, make_service
from orchestrator.box.systemd import SystemdService
from orchestrator.box.transports import Transport, connect
from orchestrator.doctor import probes
from orchestrator.doctor.checks import CHECKS, Known, batch, missing, unbatch
from orchestrator.doctor.findings import Diagnosis, Finding
from orchestrator.doctor.root import helper_script, judge_clear, judge_root, own_caches
from orchestrator.doctor.show import mends, plain, table
from orchestrator.errors import BoxError, ColdbootError, Unreachable, UsageError
from orchestrator.matrix import BoxSpec, Matrix, Variant, load_matrix, select
from orchestrator.plan import experiment_folder
from orchestrator.survey import Options, compose

__all__ = ["Diagnosis", "Finding", "examine", "helper_script", "mends", "plain", "table"]

ASK_S = 120.0
ORDER = (
    *("reach", "ssh", "known_host", "login", "tools", "root", "sudo"),
    *("unit", "starts", "active", "exec", "variants", "engine"),
    *("port", "metrics", "gpu", "gpu_processes", "gpu_clocks", "caches", "disk", "journal", "journald", "linger"),
    *("clock", "leftovers"),
)
"""How the findings stand below each other: from the way in to what an earlier campaign left."""


def examine(options: Options) -> Diagnosis:
    """Ask a box everything that a campaign on it will need.

    Raises:
        MatrixError: matrix.yaml is not usable, so that nobody knows which box.
    """
    matrix = select(load_matrix(options.matrix, box=options.box), box=options.box, experiment=options.experiment)
    box = matrix.target
    try:
        transport = connect(box)
    except BoxError as error:
        every = [check for check in ORDER if check != "reach"]
        found = probes.judge_unreachable(error)
        told = {finding.check for finding in found}
        return Diagnosis(box.name, found, {each: "as there is no way in" for each in every if each not in told})
    try:
        return _Examination(matrix, box, transport, options).all()
    finally:
        transport.close()


class _Examination:
    """One box, asked once."""

    def __init__(self, matrix: Matrix, box: BoxSpec, transport: Transport, options: Options) -> None:
        self.matrix = matrix
        self.box = box
        self.transport = transport
        state = experiment_folder(options.out, matrix).resolve() / "box"
        self.service: Service = make_service(transport, box, state)
        self.findings: list[Finding] = []
        self.not_asked: dict[str, str] = {}

    def all(self) -> Diagnosis:
        found = probes.clock(self.transport)
        self.findings += probes.judge_way(
            self.box,
            self.transport.user,
            is_root=self.transport.is_root,
            round_trip_s=2 * found[1] if found else 0.0,
        )
        self.findings.append(probes.judge_clock(found))
        known = self.know()
        self.ask_commands(known)
        self.ask_rest(known)
        ordered = sorted(self.findings, key=lambda finding: ORDER.index(finding.check))
        others = (name for name, other in self.matrix.boxes.items() if self.box.rehearsal and not other.rehearsal)
        return Diagnosis(self.box.name, tuple(ordered), self.not_asked, self.box.rehearsal, tuple(others))

    def know(self) -> Known:
        """Reads the unit, as far as it can be read."""
        engine = ENGINES[self.box.engine]
        known = Known(
            box=self.box,
            login=self.transport.user,
            is_root=self.transport.is_root,
            rehearsal=engine.rehearsal,
            ready_s=self.matrix.effective_deadlines().ready_s,
            name=self.service.name,
            clears="clear" in self.matrix.cache,
        )
        try:
            unit = self.service.look()
        except ColdbootError as error:
            hint = error.hint or "mend the unit, or name another in the box's `unit:`"
            self.findings.append(Finding("unit", "fail", error.what, mend=hint))
            return replace(known, leftovers=self.campaign_paths(), holder=self.holder())
        where = "read from " + str(self.box.unit_file) if self.box.unit_file else f"runs as {unit.user}"
        drop_ins = f", {len(unit.drop_ins)} drop-ins" if unit.drop_ins else ""
        self.findings.append(Finding("unit", "ok", f"{unit.name}, {where}{drop_ins}"))
        own = engine.compose(unit.argv, Variant(name="production"), host=None, port=None)
        return replace(
            known,
            name=self.service.name,
            unit=unit,
            own=replace(own, port=self.box.port) if not isinstance(own, tuple) and self.box.port else own,
            rehearsal=engine.rehearsal or is_rehearsal(unit.argv),
            pids=self.pids(),
            leftovers=self.campaign_paths(),
            holder=self.holder(),
            cache_place=self.cache_place(unit),
        )

    def cache_place(self, unit: UnitFacts) -> str | None:
        try:
            return caches.cache_place(unit, self.box.cache_root)
        except UsageError as error:
            self.findings.append(Finding("disk", "fail", error.what, mend=error.hint or "mend `cache_root:`"))
            return None

    def pids(self) -> tuple[int, ...]:
        try:
            return self.service.pids()
        except BoxError:
            return ()

    def holder(self) -> str | None:
        return lock.holder(self.transport, self.service.lock_name)

    def campaign_paths(self) -> tuple[str, ...]:
        """Paths that only a campaign makes."""
        if isinstance(self.service, ProcessService):
            return (self.service.guard_folder,)
        if not isinstance(self.service, SystemdService):
            return ()
        dead = self.service.dead_man
        return (*dead.ours, *dead.unit_paths, dead.run, dead.put_back[1])

    def ask_commands(self, known: Known) -> None:
        """The table, in one round trip."""
        asked = []
        for check in CHECKS:
            argv = check.argv(known)
            if argv is None and not (check.needs and known.systemd and known.unit is None):
                continue
            why = missing(check, known)
            if why is not None:
                self.not_asked[check.name] = why
            elif argv is not None and not (check.name == "disk" and known.cache_place is None):
                asked.append((check, argv))
        argvs = list(dict.fromkeys(argv for _, argv in asked))
        said = self.transport.run(batch(argvs, shlex.join), timeout_s=ASK_S, check=False).stdout
        answers = unbatch(argvs, said)
        self.findings += [check.judge(answers[argv], known) for check, argv in asked]

    def ask_rest(self, known: Known) -> None:
        """What is no single command."""
        self.attempt("gpu", lambda: probes.gpus(self.transport, known))
        if known.unit is None:
            self.not_asked |= dict.fromkeys(
                ("root", "sudo", "variants", "engine", "metrics"), "as the unit could not be read"
            )
            return
        self.ask_root(known, known.unit)
        self.ask_caches(known, known.unit)
        if isinstance(known.own, tuple):
            self.not_asked |= dict.fromkeys(("variants", "engine", "metrics"), "as the command could not be read")
            return
        self.findings.append(probes.judge_variants(self.composed(known), str(self.matrix.path)))
        self.attempt("engine", lambda: (probes.engine(self.transport, known),))
        if known.unit.active:
            self.attempt("metrics", lambda: (probes.metrics(self.transport, known),))
        elif known.systemd:
            self.not_asked["metrics"] = "as the unit does not run"

    def ask_root(self, known: Known, unit: UnitFacts) -> None:
        """Who does what only root may."""
        if not isinstance(self.service, SystemdService) or self.box.service != "systemd":
            return
        if not self.transport.is_root:
            granted, file = self.service.granted, str(self.matrix.path)
            clears = own_caches(self.matrix, unit) if known.clears else ()
            self.findings.append(judge_root(self.box, self.transport.user, granted, unit, file, clears=clears))
        if self.box.sudo is not False and (self.box.root != "helper" or unit.helper):
            self.attempt("sudo", lambda: (probes.sudo(self.transport, self.service.sudo_needs(), known),))

    def refuse_linked(self, unit: UnitFacts) -> Sequence[Finding]:
        caches.refuse_linked(self.transport, unit, root=self.box.cache_root)
        return ()

    def ask_caches(self, known: Known, unit: UnitFacts) -> None:
        """Whether cold caches may be made, and the unit's own set aside where the matrix wants it; if we may ask."""
        service = self.service
        barred = any(each.check in ("root", "sudo") and each.level == "fail" for each in self.findings)
        if unit.helper and not barred:
            self.attempt("caches", lambda: self.refuse_linked(unit))
        if known.clears and isinstance(service, SystemdService) and not barred:
            self.attempt("caches", lambda: judge_clear(self.matrix, unit, service.own_caches))

    def attempt(self, check: str, ask: Callable[[], Sequence[Finding]]) -> None:
        """One question that fails, or hangs to its deadline, is a finding, and ends nothing else."""
        try:
            self.findings += ask()
        except Unreachable:
            raise
        except BoxError as error:
            self.findings.append(Finding(check, "fail", error.what, mend=error.hint or "run it on the box by hand"))

    def composed(self, known: Known) -> dict[str, list[str]]:
        assert known.unit is not None
        found: dict[str, list[str]] = {}
        for variant in self.matrix.all_variants:
            launch = compose(self.box, known.unit.argv, variant, 1)
            found[variant.name] = [problem.what for problem in launch] if isinstance(launch, tuple) else []
        return found
