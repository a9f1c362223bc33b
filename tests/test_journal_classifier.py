"""The classifier live: alarms, marks, chains of starts, kernel evidence, lost entries, the timeline, the command."""

import io
import json
import random

import pytest
from journal_support import INVOCATION, cases, entries_of, kernel, said, systemd

from orchestrator.errors import JournalError
from orchestrator.journal import DEFAULT, Classifier, main_answer
from orchestrator.journal.command import as_text
from orchestrator.journal.reading import Reader
from orchestrator.records import JournalEntry

READY = "(APIServer pid=10) INFO:     Application startup complete."
OK = '(APIServer pid=10) INFO:     10.0.0.8:55755 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
CORE = "(EngineCore pid=88) ERROR 07-18 00:24:44 [core.py:1240] "
FATAL = f"{CORE}EngineCore encountered a fatal error."
OOM = f"{CORE}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB."
DEAD = "(APIServer pid=10) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
FAILED = "(EngineCore pid=88) ERROR 07-18 00:24:44 [core.py:1330] EngineCore failed to start."
LOADING = "(EngineCore pid=88) INFO 07-18 00:24:44 [gpu_model_runner.py:1] Starting to load model /m..."


def fed(*entries, **options):
    classifier = Classifier(**options)
    for entry in entries:
        classifier.feed(entry)
    return classifier


def short(answer):
    return answer.outcome, answer.phase, answer.cause


def test_the_alarm_rings_with_the_very_entry_and_not_before():
    classifier = fed(said(READY, 0), said(OK, 1))
    assert classifier.alarm is None
    classifier.feed(said(FATAL, 2))
    assert (classifier.alarm.entry, classifier.alarm.rule) == (2, "EngineFatal")


@pytest.mark.parametrize(
    "entry",
    [
        said(FAILED),
        said(FATAL),
        said(DEAD),
        systemd("vllm.service: Main process exited, code=exited, status=1/FAILURE"),
        systemd("vllm.service: Deactivated successfully."),
        systemd("vllm.service: A process of this unit has been killed by the OOM killer."),
        systemd("vllm.service: Failed at step EXEC spawning /x: No such file or directory"),
    ],
    ids=lambda entry: entry.message[-40:],
)
def test_each_sign_of_a_start_that_cannot_succeed_rings(entry):
    assert fed(entry).alarm is not None


def test_nothing_rings_after_a_stop_was_asked_for_by_the_orchestrator_or_by_systemd():
    after = [said(DEAD, 1), systemd("vllm.service: Main process exited, code=killed, status=9/KILL", 2)]
    asked = Classifier()
    asked.mark("ready")
    asked.mark("served")
    asked.mark("stop_requested")
    for entry in after:
        asked.feed(entry)
    assert asked.alarm is None
    assert short(asked.answer()) == ("benign", "shutdown", "benign_shutdown_slow")
    assert fed(said(READY), systemd("Stopping vllm.service - x...", 1), *after).alarm is None


def test_a_death_before_the_stop_stays_a_death():
    answer = fed(
        said(READY), said(OK, 1), said(FATAL, 2), said(OOM, 3), systemd("Stopping vllm.service...", 4)
    ).answer()
    assert short(answer) == ("fatal", "first_request", "cuda_oom_torch")


def test_what_the_orchestrator_knows_counts_as_serving():
    classifier = Classifier()
    for event in ("ready", "served", "served"):
        classifier.mark(event)
    for index, text in enumerate((FATAL, OOM)):
        classifier.feed(said(text, index))
    assert short(classifier.answer()) == ("fatal", "load", "cuda_oom_torch")


def test_status_0_without_a_request_is_a_crash_and_with_one_is_a_stop():
    end = systemd("vllm.service: Deactivated successfully.", 9)
    crash = fed(said(READY), said(OK, 1), said(OK, 2), said("INFO:     Shutting down", 3), end).answer()
    stop = fed(
        said(READY), said(OK, 1), systemd("Stopping vllm.service...", 2), said("INFO:     Shutting down", 3), end
    ).answer()
    assert short(crash) == ("fatal", "load", "engine_dead_no_root")
    assert short(stop) == ("benign", "shutdown", "benign_shutdown")


def test_an_engine_that_failed_while_the_unit_stays_active_is_a_failed_boot_at_once():
    classifier = fed(said(LOADING), said(FAILED, 1))
    assert classifier.alarm is not None
    answer = classifier.answer()
    assert short(answer) == ("startup_failure", "weights", "engine_dead_no_root")
    assert answer.complete is True


def test_a_boot_is_complete_when_it_has_served_or_ended_and_not_before():
    assert fed(said(LOADING)).answer().complete is False
    assert fed(said(LOADING), said(READY, 1)).answer().complete is False
    assert fed(said(LOADING), said(READY, 1), said(OK, 2)).answer().complete is True
    assert fed(said(LOADING), systemd("Stopping vllm.service...", 1)).answer().complete is True


def chain(first, second):
    again = systemd("vllm.service: Scheduled restart job, restart counter is at 1.", 5, invocation=first)
    return [
        systemd("Started vllm.service.", 0, invocation=first),
        said(FAILED, 1, invocation=first),
        said(OOM, 2, invocation=first),
        systemd("vllm.service: Main process exited, code=exited, status=1/FAILURE", 3, invocation=first),
        again,
        systemd("Started vllm.service.", 6, invocation=second),
        said("OSError: [Errno 98] Address already in use", 7, invocation=second),
        systemd("vllm.service: Main process exited, code=exited, status=1/FAILURE", 8, invocation=second),
    ]


@pytest.mark.parametrize("second", [INVOCATION, "b" * 32], ids=["one invocation", "two invocations"])
def test_a_restart_loop_is_answered_by_its_first_death_not_by_the_port_that_the_second_found_in_use(second):
    classifier = fed(*chain(INVOCATION, second))
    assert classifier.answer().cause == "cuda_oom_torch"
    assert len(classifier.all_answers()) == 1


def test_of_several_chains_the_last_is_answered_one_may_be_asked_for_and_all_are_listed():
    other = [said(READY, 9, invocation="c" * 32), said(OK, 10, invocation="c" * 32)]
    entries = [*chain(INVOCATION, INVOCATION), *other]
    assert fed(*entries).answer().cause == "healthy"
    assert [answer.cause for _, answer in fed(*entries).all_answers()] == ["cuda_oom_torch", "healthy"]
    assert fed(*entries, invocation=INVOCATION).answer().cause == "cuda_oom_torch"


def test_late_lines_of_the_start_before_do_not_count_against_the_new_one():
    late = said(OOM, 20, invocation=INVOCATION)
    classifier = fed(*chain(INVOCATION, "b" * 32)[:6], late, said(READY, 21, invocation="b" * 32))
    assert classifier.answer().cause == "cuda_oom_torch"
    assert classifier._chain.current.faults == []


def test_another_units_death_is_not_ours():
    other = systemd("cron.service: Main process exited, code=killed, status=9/KILL", 2, unit="cron.service")
    classifier = fed(said(READY), said(OK, 1), other, unit="vllm.service")
    assert classifier.alarm is None
    assert classifier.answer().cause == "healthy"


KILLED = "Memory cgroup out of memory: Killed process {} ({}) total-vm:1kB, anon-rss:1kB"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (KILLED.format(88, "python3"), "host_oom_kill"),
        (KILLED.format(4711, "VLLM::EngineCor"), "host_oom_kill"),
        (KILLED.format(4711, "chrome"), "engine_dead_no_root"),
        (KILLED.format(4711, "python3"), "engine_dead_no_root"),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/system.slice/vllm.service,task=python3,pid=4711,uid=0",
            "host_oom_kill",
        ),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/system.slice/cron.service,task=python3,pid=4711,uid=0",
            "engine_dead_no_root",
        ),
        ("NVRM: Xid (PCI:0000:65:00): 31, pid=88, name=python3, MMU Fault", "illegal_memory_access"),
        ("NVRM: Xid (PCI:0000:65:00): 31, pid=4711, name=Xorg, MMU Fault", "engine_dead_no_root"),
        ("NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "gpu_lost"),
    ],
)
def test_kernel_evidence_counts_by_pid_name_and_cgroup(text, cause):
    assert fed(said(READY), said(OK, 1), said(FATAL, 2), kernel(text, 3), said(DEAD, 4)).answer().cause == cause


def test_the_alarm_rings_for_an_oom_kill_of_our_pid_and_not_for_another():
    ours = fed(said(LOADING), kernel(KILLED.format(88, "python3"), 1))
    assert (ours.alarm.rule, ours.alarm.entry) == ("KernelOomKill", 1)
    assert fed(said(LOADING), kernel(KILLED.format(4711, "chrome"), 1)).alarm is None


def test_suppressed_messages_make_the_answer_say_that_evidence_may_be_missing():
    lost = systemd("Suppressed 4711 messages from vllm.service", 1)
    assert fed(said(READY), lost).answer().evidence_may_be_missing is True
    assert fed(said(READY)).answer().evidence_may_be_missing is False


def test_when_nothing_names_a_root_ten_telling_entries_are_shown():
    lines = [
        said(f"(EngineCore pid=88) ERROR 07-18 00:24:44 [x.py:{n}] strange thing {n} failed", n) for n in range(40)
    ]
    answer = fed(*lines, said(FATAL, 40)).answer()
    assert answer.cause == "engine_dead_no_root"
    assert len(answer.evidence) == 10
    assert "EngineFatal" in {item.rule for item in answer.evidence}


def test_a_flood_of_a_million_lines_keeps_little():
    classifier = Classifier()
    for index in range(3000):
        classifier.feed(said(OOM, index))
        classifier.feed(said(f"(EngineCore pid=88) ERROR 07-18 00:24:44 [x.py:1] other {index} failed", index))
    start = classifier._chain.current
    assert len(start.faults) == 1
    assert len(start.first_errors) + len(start.last_errors) == 10


@pytest.mark.parametrize("name", ["real_gpu.jsonl.gz", "journal.jsonl", "composed.jsonl", "unseen.jsonl"])
def test_messages_taken_early_from_a_file_and_entries_fed_give_the_same_answers(name):
    for case in cases(name):
        data = "".join(json.dumps(entry) + "\n" for entry in case["entries"]).encode()
        early, whole = Classifier(), Classifier()
        early.feed_file(io.BytesIO(data))
        for entry in entries_of(case):
            whole.feed(entry)
        assert early.answer() == whole.answer()
        assert (early.seen, early.own_entries) == (len(case["entries"]), whole.own_entries)


def test_what_is_known_of_repeated_messages_gives_the_same_answers_as_reading_each_anew():
    for case in [*cases("journal.jsonl"), *cases("real_gpu.jsonl.gz")]:
        known, anew = Classifier(), Classifier()
        for entry in [*entries_of(case), *entries_of(case)]:
            known.feed(entry)
            anew._reader = Reader(DEFAULT)
            anew.feed(entry)
        assert known.answer() == anew.answer(), case["id"]


def h200(name):
    return next(case for case in cases("real_gpu.jsonl.gz") if case["id"] == name)


def test_the_timeline_of_a_real_cold_boot():
    got = fed(*entries_of(h200("h200-E3_h300_s3_cold"))).timeline()
    assert got.engine_version == "0.26.0"
    assert (got.weights_s, got.weights_gib) == (2.432626, 3.33)
    assert (got.compile_s, got.profiling_s, got.compile_state) == (21.9, 0.24, "compiled")
    assert (got.kv_tokens, got.kv_gib) == (2_374_912, 131.36)
    assert (got.graph_capture_s, got.graph_capture_gib) == (7.0, 0.63)
    assert got.num_batched_tokens == 8192


def test_the_timeline_of_a_boot_that_found_its_compile_cache():
    got = fed(*entries_of(h200("h200-G1_D"))).timeline()
    assert got.compile_state == "loaded"


def test_seconds_between_milestones_come_from_the_journal_clock():
    steps = [
        (0.0, systemd("Started vllm.service.", at_s=0.0)),
        (9.7, said("(A pid=1) INFO 11-30 14:51:53 [api_utils.py:273] non-default args: {}", at_s=9.7)),
        (20.2, said("(E pid=2) INFO 11-30 14:51:53 [model_runner.py:284] Loading model from scratch...", at_s=20.2)),
        (
            33.2,
            said("(E pid=2) INFO 11-30 14:51:53 [gpu_worker.py:560] Available KV cache memory: 65.69 GiB", at_s=33.2),
        ),
        (33.5, said("(E pid=2) INFO 11-30 14:51:53 [k.py:1] GPU KV cache size: 1,187,504 tokens", at_s=33.5)),
        (
            34.8,
            said(
                "(E pid=2) INFO 11-30 14:51:53 [m.py:1] Graph capturing finished in 1 secs, took -0.48 GiB", at_s=34.8
            ),
        ),
        (
            54.5,
            said(
                "INFO 11-30 14:51:53 [core.py:3] init engine (profile, create kv cache, warmup model) took 30 s",
                at_s=54.5,
            ),
        ),
        (55.5, said("(A pid=1) INFO:     Application startup complete.", at_s=55.5)),
    ]
    got = fed(*(entry for _, entry in steps)).timeline()
    assert (got.imports_s, got.config_s, got.ready_s) == (pytest.approx(9.7), pytest.approx(10.5), pytest.approx(55.5))
    assert (got.warmup_s, got.kv_cache_s) == (pytest.approx(19.7), pytest.approx(0.3))
    assert got.graph_capture_gib == -0.48
    assert got.compile_s is None


CPU_BOOT = (
    (81.1, "(W pid=5) INFO 11-30 19:34:10 [cpu_model_runner.py:87] Warming up model for the compilation..."),
    (129.9, "(W pid=5) INFO 11-30 19:34:59 [decorators.py:743] [backbone] saved AOT compiled function to /x/model"),
    (131.5, "(W pid=5) INFO 11-30 19:35:01 [monitor.py:91] [backbone] Initial profiling/warmup run took 1.59 s"),
    (132.3, "(W pid=5) INFO 11-30 19:35:01 [cpu_model_runner.py:91] Warming up done."),
)


def test_the_compiler_of_the_cpu_build_took_from_the_beginning_to_the_end_of_its_warm_up():
    got = fed(*(said(line, at_s=at) for at, line in CPU_BOOT)).timeline()
    assert (got.compile_s, got.profiling_s, got.compile_state) == (pytest.approx(51.2), 1.59, "compiled")


def test_what_was_found_and_could_not_be_loaded_was_neither_cold_nor_warm():
    again = (
        "(W pid=5) WARNING 11-30 20:04:41 [decorators.py:333] [backbone] Compiling model again due to a load failure"
    )
    got = fed(said(f"{again} from /x/model, reason: no attribute"), *(said(line) for _, line in CPU_BOOT)).timeline()
    assert got.compile_state == "mixed"


def test_a_clock_that_jumped_back_gives_none_and_no_negative_seconds():
    got = fed(
        systemd("Started vllm.service.", at_s=100.0),
        said("(A pid=1) INFO:     Application startup complete.", at_s=40.0),
    )
    assert got.timeline().ready_s is None


def test_an_eager_boot_says_that_nothing_was_compiled():
    eager = fed(
        said("(A pid=1) INFO 11-30 14:51:53 [api_utils.py:273] non-default args: {'enforce_eager': True}"),
        said("(E pid=2) INFO 11-30 14:51:53 [k.py:1] GPU KV cache size: 1,187,504 tokens"),
    )
    assert eager.timeline().compile_state == "no_compile"


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text(
        "".join(json.dumps(entry) + "\n" for entry in h200("h200-X2_kv_small")["entries"]), encoding="utf-8"
    )
    return path


def test_the_answer_has_the_keys_of_the_interface_in_their_order(journal):
    value = main_answer(journal).value
    assert list(value)[:6] == ["outcome", "phase", "cause", "complete", "evidence_may_be_missing", "evidence"]
    assert list(value["evidence"][0]) == ["entry", "rule", "text"]
    assert value["cause"] == "max_len_exceeds_kv"
    json.dumps(value, allow_nan=False)


def test_a_person_reads_the_cause_its_proof_and_what_to_do(journal):
    text = main_answer(journal).text
    assert text.startswith("startup_failure in phase kv_cache: max_len_exceeds_kv: The KV cache is smaller than one")
    assert "KvTooSmall" in text
    assert "--max-model-len" in text


def test_all_gives_a_list_with_the_invocations(journal):
    listed = main_answer(journal, every=True).value
    assert [item["cause"] for item in listed] == ["max_len_exceeds_kv"]
    assert len(listed[0]["invocations"][0]) == 32


def test_standard_input_is_read_for_a_dash(journal, monkeypatch):
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": io.BufferedReader(io.BytesIO(journal.read_bytes()))}))
    assert main_answer("-").value["cause"] == "max_len_exceeds_kv"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("CUDA out of memory".encode("utf-16"), "UTF-16 text"),
        (b"\0" * 9000, "no text"),
        (random.Random(1).randbytes(9000), "no text"),
    ],
)
def test_what_is_no_text_is_no_healthy_boot(tmp_path, data, said):
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(JournalError, match=said) as refused:
        main_answer(tmp_path / "log")
    assert refused.value.exit_code == 4


def test_strange_letters_here_and_there_are_text(tmp_path):
    (tmp_path / "log").write_bytes("Größe, Länge: 5 µs\n".encode("latin-1") * 300 + b"\0" * 500)
    assert main_answer(tmp_path / "log").value["outcome"] == "benign"


def test_an_empty_missing_or_foreign_file_is_refused_with_exit_4(tmp_path, journal):
    empty = tmp_path / "empty"
    empty.touch()
    for path, options in ((empty, {}), (tmp_path / "none", {}), (tmp_path, {}), (journal, {"invocation": "f" * 32})):
        with pytest.raises(JournalError) as refused:
            main_answer(path, **options)
        assert refused.value.exit_code == 4


def test_a_benign_answer_gives_no_advice_to_a_person():
    assert "→" not in as_text(fed(said(READY), said(OK, 1)).answer())


def test_what_we_ended_ourselves_is_no_cause_of_the_death_before_it():
    def said(index, message, identifier="vllm", transport="stdout"):
        return JournalEntry(
            index=index,
            message=message,
            at_us=1796000000000000 + index * 1_000_000,
            unit="vllm.service",
            identifier=identifier,
            transport=transport,
            invocation_id="a" * 32,
        )

    classifier = Classifier(unit="vllm.service")
    lines = (
        "INFO:     Application startup complete.",
        'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
        "(APIServer pid=2) WARNING 11-30 10:00:00 [c.py:702] [shutdown] MPClient: engine core exited unexpectedly",
    )
    for index, line in enumerate(lines):
        classifier.feed(said(index, line))
    before = classifier.answer()
    classifier.mark("stop_requested", 1796000010000000)
    classifier.feed(said(11, "vllm.service: Main process exited, code=killed, status=9/KILL", "systemd", "journal"))
    after = classifier.answer()
    assert (before.outcome, before.phase, before.cause) == ("fatal", "load", "engine_dead_no_root")
    assert (after.outcome, after.phase, after.cause) == ("fatal", "load", "engine_dead_no_root")
    assert [one.rule for one in after.evidence] == ["EngineFatal"]
