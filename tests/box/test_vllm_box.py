"""A real vLLM (CPU build) as a unit of the real box, measured by our own command line over ssh, without root.

Two variants boot cold twice; then, from the caches that are there (`as-is`), production's own and one with a single
draft token boot once. It takes half an hour, and needs a folder with a vLLM: see tests/vllm/README.md.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from nspawn import Box, NoBox, base_tree, free_port

from orchestrator.box.services import make_service
from orchestrator.box.ssh import SshTransport
from orchestrator.box.sshconfig import hop
from orchestrator.matrix import load_matrix

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(4 * 3600)]

ROOT = Path(__file__).parents[2]
UNIT = "vllm-tiny.service"
PORT = free_port()
# What the engine compiles with, and what it links against.
PACKAGES = ("libnuma1", "g++", "openssl")
DRAFTS = {"plain": 0, "ngram-1": 1, "ngram-3": 3}
LEVELS = (1, 2)
BOOT_S = 1800.0
CAMPAIGN_S = 7200.0

UNIT_TEXT = """[Unit]
Description=production

[Service]
Type=simple
User=alex
Group=alex
Environment=HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1
ExecStart={python} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name tiny \\
  --load-format dummy --max-model-len 2048 --max-num-seqs 16 --host 127.0.0.1 --port {port}
Restart=on-failure
"""
MATRIX = """experiment: {experiment}
cache: {cache}
boxes:
  real:
    transport: ssh
    host: {alias}
    ssh_config: {ssh_config}
    unit: {unit}
load: {{input_tokens: 128, output_tokens: 128, window_s: 30, warmup_s: 3, max_warmup_s: 120, sanity_tokens: 16,
        headroom_tokens: 8}}
deadlines: {{ready_s: 1800, clean_slate_s: 300, stop_s: 120}}
concurrency: {levels}
variants:
  plain: {{}}
  ngram-3: {{spec-method: ngram, spec-tokens: 3, speculative-config: {{prompt_lookup_max: 4}}}}
  ngram-1: {{spec-method: ngram, spec-tokens: 1, speculative-config: {{prompt_lookup_max: 4}}}}
"""


@dataclass(frozen=True)
class Installed:
    """A vLLM and a model, where they really lie."""

    venv: Path
    model: Path

    @property
    def binds(self) -> tuple[Path, ...]:
        """What the box must see, the venv's own Python included."""
        return (self.venv, self.model, Path(self.venv / "bin/python").resolve().parents[1])


@pytest.fixture(scope="module")
def installed() -> Installed:
    named = os.environ.get("COLDBOOT_VLLM")
    if not named:
        pytest.skip("no vLLM to test with: COLDBOOT_VLLM names no folder with venv/ and model/ (tests/vllm/README.md)")
    found = Installed((Path(named) / "venv").resolve(), (Path(named) / "model").resolve())
    missing = [str(path) for path in (found.venv / "bin/python", found.model / "config.json") if not path.exists()]
    assert not missing, f"COLDBOOT_VLLM={named} has no {' and no '.join(missing)}"
    return found


@pytest.fixture(scope="module")
def vllm_box(installed) -> Iterator[Box]:
    """The box, with production that generates."""
    try:
        running = Box(base_tree(PACKAGES), installed.binds)
    except NoBox as why:
        pytest.skip(str(why))
    with running as box:
        box.write_unit(UNIT, UNIT_TEXT.format(python=installed.venv / "bin/python", model=installed.model, port=PORT))
        box.sh(("systemctl", "start", UNIT))
        await_true(generates, BOOT_S, "production")
        yield box


@dataclass
class Campaign:
    """What one experiment left: the tool's end, the ledger, the raw files, and what was in caches meanwhile.

    `cached` are the files in a boot's own caches; `kernels` the compiled ones in production's, as it began and ended.
    """

    folder: Path
    cache: str
    caches: Path
    done: subprocess.CompletedProcess[str] | None = None
    records: list[dict] = field(default_factory=list)
    cached: dict[str, set[str]] = field(default_factory=dict)
    kernels: dict[str, list[dict[str, int]]] = field(default_factory=dict)

    def of(self, kind: str) -> list[dict]:
        return [record for record in self.records if record["kind"] == kind]

    def step(self, boot: str, name: str) -> dict:
        return next(r for r in self.of("step") if r["boot"] == boot and r["name"] == name)

    def raw(self, trial: dict, kind: str) -> list[dict]:
        key = ("boot", "concurrency")
        again = [one for one in self.of("trial") if all(one[name] == trial[name] for name in key)].index(trial)
        name = f"{kind}-c{trial['concurrency']}" + (f".r{again}" if again else "")
        lines = (self.folder / "boots" / trial["boot"] / f"{name}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def messages(self, boot: str) -> list[tuple[float, str]]:
        lines = (self.folder / "boots" / boot / "journal.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        return [(int(e["__REALTIME_TIMESTAMP"]) / 1e6, e["MESSAGE"] or "") for e in entries]

    def look(self) -> None:
        """Note the files in each boot's own caches, so that what is removed later was seen."""
        path = self.folder / "records.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self.records = [json.loads(line) for line in lines if line.endswith("}")]
        for boot in [record["boot"] for record in self.of("boot_started")][-1:]:
            self.cached.setdefault(boot, set()).update(files(self.caches, "b-*"))
            found = {str(path): path.stat().st_mtime_ns for path in (self.caches.parent / "vllm").rglob("*.so")}
            self.kernels[boot] = [*self.kernels.get(boot, [])[:1], found]


def run(box: Box, folder: Path, *words: str, cache: str) -> Campaign:
    """One experiment by the command line, as a user has it."""
    name = f"real-{cache}"
    matrix = folder / f"{name}.yaml"
    matrix.write_text(
        MATRIX.format(
            experiment=name,
            cache=cache,
            alias=box.alias,
            ssh_config=box.ssh_config,
            unit=UNIT,
            levels=list(LEVELS),
        )
    )
    transport = SshTransport(hop(box.alias, config=box.ssh_config))
    box.write_sudoers(make_service(transport, load_matrix(matrix).target, folder / "state").sudo_lines())
    transport.close()
    out = folder / "artifacts"
    campaign = Campaign(out / name, cache, box.root / "home/alex/.cache/coldboot")
    argv = (sys.executable, "-m", "invoke", "matrix", "--matrix", str(matrix), "--out", str(out), "--yes", *words)
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            end = time.monotonic() + CAMPAIGN_S
            while process.poll() is None:
                assert time.monotonic() < end, "the campaign did not end"
                campaign.look()
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(300)
        log.seek(0)
        campaign.done = subprocess.CompletedProcess(argv, process.returncode, log.read(), "")
    campaign.look()
    return campaign


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def cold(vllm_box, place) -> Campaign:
    return run(vllm_box, place, "--boots", "2", "--only", "plain,ngram-3", cache="cold")


@pytest.fixture(scope="module")
def as_is(vllm_box, place) -> Campaign:
    return run(vllm_box, place, "--boots", "1", "--only", "plain,ngram-1", cache="as-is")


@pytest.fixture(params=["cold", "as_is"])
def any_campaign(request) -> Campaign:
    return request.getfixturevalue(request.param)


# --- helpers ---------------------------------------------------------------------------------------------------------


def await_true(what: Callable[[], bool], seconds: float, name: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"{name} did not come within {seconds:g} s"
        time.sleep(0.5)


def generates() -> bool:
    body = {"model": "tiny", "prompt": "The baker", "max_tokens": 1}
    try:
        answer = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json=body, timeout=60, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 1


def files(folder: Path, below: str) -> set[str]:
    """Files now below the folders of that name; what vanishes meanwhile is passed over."""
    found = set()
    for top in folder.glob(f"*/{below}"):
        for path, _, names in os.walk(top):
            found.update(str(Path(path, name).relative_to(folder)) for name in names)
    return found


def command(box: Box) -> list[str]:
    pid = box.sh(("systemctl", "show", "-p", "MainPID", "--value", UNIT)).stdout.strip()
    return box.sh(("cat", f"/proc/{pid}/cmdline")).stdout.rstrip("\0").split("\0")


# --- what must be true -----------------------------------------------------------------------------------------------


def test_four_cold_boots_and_two_from_the_caches_that_are_there_complete(cold, as_is):
    for campaign, boots in ((cold, 4), (as_is, 2)):
        assert campaign.done.returncode == 0, campaign.done.stdout[-4000:]
        ended = campaign.of("boot_ended")
        assert [one["boot_outcome"] for one in ended] == ["completed"] * boots, ended
        measured = [(one["boot"], one["concurrency"]) for one in campaign.of("trial") if one["tokens_per_s"]]
        assert len(measured) == boots * len(LEVELS) == len(set(measured))
        assert campaign.records[0]["rehearsal"] is False
        assert campaign.records[0]["production_variant"] == "plain"
        ready = campaign.step(ended[0]["boot"], "ready")["facts"]
        assert campaign.records[0]["fingerprint"]["engine_version"] == ready["timeline"]["engine_version"]


def test_a_cold_boot_begins_with_empty_caches_and_compiles_into_them(cold):
    for ended in cold.of("boot_ended"):
        boot = ended["boot"]
        assert cold.step(boot, "cold")["facts"]["empty"] is True
        assert ended["cache_proof"] == "compiled"
        said = [text for _, text in cold.messages(boot)]
        assert any("saved AOT compiled function" in text for text in said)
        assert not any("Directly load" in text or "Compiling model again" in text for text in said)
        kernels = [path for path in cold.cached[boot] if "/vllm/torch_compile_cache/" in path and path.endswith(".so")]
        assert len(kernels) >= 5, sorted(cold.cached[boot])[:20]
    assert files(cold.caches, "*") == set(), "caches of ours are left"


def test_a_boot_from_productions_own_caches_finds_them_and_compiles_no_kernel_again(as_is):
    (ended,) = (one for one in as_is.of("boot_ended") if one["variant"] == "plain")
    before, after = as_is.kernels[ended["boot"]]
    assert len(before) >= 5
    assert after == before, "a kernel was compiled, or compiled again"
    assert as_is.cached[ended["boot"]] == set(), "as-is has no caches of ours"
    # The CPU build of 0.32.0 finds what it saved and cannot load it: it traces the model again, over kernels that are
    # there. Its log says both, so it is neither a cold boot nor quite a warm one.
    said = [text for _, text in as_is.messages(ended["boot"])]
    again = any("Compiling model again due to a load failure" in text for text in said)
    assert ended["cache_proof"] == ("mixed" if again else "loaded")


def test_what_clients_got_is_what_the_server_counted_to_the_token_and_to_the_request(any_campaign):
    for trial in any_campaign.of("trial"):
        # On a busy machine our own client may be late; then the window is measured again, and the books agree no less.
        assert all(reason.startswith("client_") for reason in trial["invalid_reasons"]), trial["invalid_reasons"]
        assert trial["failed"] is False, trial["errors"]
        whole = trial["whole"]
        assert whole["generation_tokens"] == trial["client_tokens"]
        assert sum(whole["requests_by_reason"].values()) == trial["requests_ok"] == trial["requests_sent"]
        told = [request["completion_tokens"] for request in any_campaign.raw(trial, "requests")]
        assert sum(told) == trial["client_tokens"]
        assert whole["prompt_tokens"] == sum(r["prompt_tokens"] for r in any_campaign.raw(trial, "requests"))
        # On a busy machine a read of the counter takes long; the trial says by how much its window is uncertain then.
        unsure = [float(share) for text in trial["warnings"] for share in re.findall(r"uncertain by ([\d.]+)%", text)]
        within = 0.01 + sum(unsure) / 100
        assert trial["rulers"]["usage"] == pytest.approx(trial["rulers"]["counter"], rel=within)
        assert trial["tokens_per_s"] == (trial["rulers"]["counter"] if trial["valid"] else None)


def test_only_ngram_variants_draft_and_they_say_how_much_was_accepted_at_each_position(any_campaign):
    for trial in any_campaign.of("trial"):
        whole, length = trial["whole"], DRAFTS[trial["variant"]]
        if not length:
            assert whole["spec_drafts"] is None
            continue
        drafts, drafted, accepted = (whole[f"spec_{name}"] for name in ("drafts", "draft_tokens", "accepted_tokens"))
        assert 0 < accepted <= drafted <= length * drafts
        positions = whole["spec_accepted_per_position"]
        assert len(positions) == length
        assert sum(positions) == accepted
        assert sorted(positions, reverse=True) == positions
        # Each step ends with a token of the model's own, unless the answer was full before it.
        assert whole["generation_tokens"] >= accepted + drafts - trial["requests_ok"]


_EMITTED = re.compile(r"Avg generation throughput: ([\d.]+) tokens/s")
_DRAFTS = re.compile(r"Accepted: (\d+) tokens, Drafted: (\d+) tokens")


@dataclass(frozen=True)
class Interval:
    """One interval of the log line that lies wholly inside a trial's load."""

    seconds: float
    logged: float
    recounted: float
    accepted: int
    drafted: int


def intervals(campaign: Campaign, trial: dict) -> list[Interval]:
    """The log's own intervals inside one trial, recounted by our answers' usage."""
    reads = campaign.raw(trial, "metrics")
    epoch = reads[1]["at_s"] - reads[1]["t_s"]
    requests = campaign.raw(trial, "requests")
    first, last = (epoch + end for end in (reads[0]["t_s"], reads[-1]["t_s"]))
    said = campaign.messages(trial["boot"])
    lines = [(at, float(found[1])) for at, text in said if (found := _EMITTED.search(text))]
    drafts = [(at, *map(int, found.groups())) for at, text in said if (found := _DRAFTS.search(text))]
    found = []
    for (begin, _), (end, rate) in itertools.pairwise(lines):
        if first <= begin and end <= last:
            tokens = sum(
                request["completion_tokens"]
                * sum(begin < epoch + at <= end for at in request["chunk_at_s"])
                / len(request["chunk_at_s"])
                for request in requests
            )
            beside = [(accepted, drafted) for at, accepted, drafted in drafts if abs(at - end) < 0.5]
            accepted, drafted = beside[0] if beside else (0, 0)
            found.append(Interval(end - begin, rate * (end - begin), tokens, accepted, drafted))
    return found


def test_over_its_own_intervals_the_log_line_counts_what_was_emitted(any_campaign):
    for trial in any_campaign.of("trial"):
        found = intervals(any_campaign, trial)
        assert len(found) >= 2
        # Chunks that wait in a busy server fall into the next interval: the sum is compared.
        assert sum(one.logged for one in found) == pytest.approx(sum(one.recounted for one in found), rel=0.05), found


def test_drafted_plus_accepted_is_near_what_was_emitted_with_one_draft_token_and_far_above_with_three(cold, as_is):
    ratios: dict[str, list[float]] = {"ngram-1": [], "ngram-3": []}
    for trial in (*cold.of("trial"), *as_is.of("trial")):
        whole = trial["whole"]
        if trial["variant"] in ratios:
            both = whole["spec_draft_tokens"] + whole["spec_accepted_tokens"]
            ratios[trial["variant"]].append(both / whole["generation_tokens"])
    assert len(ratios["ngram-1"]) >= 2
    assert len(ratios["ngram-3"]) >= 4
    assert all(0.85 < ratio <= 1.0 for ratio in ratios["ngram-1"]), ratios
    assert all(ratio > 1.25 for ratio in ratios["ngram-3"]), ratios


def test_there_are_verdicts_and_they_name_no_rejection_by_death_or_error(cold):
    report = subprocess.run(
        (sys.executable, "-m", "invoke", "report", "--out", str(cold.folder.parent), "--experiment", cold.folder.name),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert report.returncode == 0, report.stderr
    verdicts = json.loads((cold.folder / "report/verdicts.json").read_text())
    found = {one["name"]: one for one in verdicts["variants"]}
    assert {"plain", "ngram-3"} <= set(found)
    for one in found.values():
        assert one["verdict"] in ("WINNER", "CONTENDER", "DOMINATED", "REJECTED", "UNDECIDED")
        assert not {"cold_boot_fatal", "errors_under_load"} & set(one["reasons"]), one


def test_production_is_back_with_its_own_flags_and_generates_and_nothing_of_ours_is_left(vllm_box, cold, as_is):
    for campaign in (cold, as_is):
        assert campaign.records[-1]["restored"] is True
    assert generates()
    runs = command(vllm_box)
    assert runs[-2:] == ["--port", str(PORT)]
    assert not any("spec" in word for word in runs)
    found = vllm_box.sh(
        ("sh", "-c", "find /run -name '*coldboot*'; systemctl list-timers --all | grep -i coldboot"), check=False
    )
    left = [line for line in found.stdout.splitlines() if line != "/run/coldboot" and "/lock" not in line]
    assert left == []
    assert files(cold.caches, "*") == set()
