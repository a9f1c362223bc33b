"""The unit's own caches set aside and put back, by real shells on real directories; systemctl only makes the links."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import survey
from orchestrator.box import unitfile
from orchestrator.box.aside import Aside, directories
from orchestrator.box.engines import ENGINES, OwnCache
from orchestrator.box.owncaches import OwnCaches, precious_of, stores_of
from orchestrator.box.transports import connect
from orchestrator.box.unit import UnitFacts
from orchestrator.errors import BoxError, MatrixError
from orchestrator.matrix import BoxSpec

SYSTEMCTL = """#!/bin/sh
for link in {links}; do mkdir -p "${{link%/*}}" && ln -sf {path} "$link" || exit 1; done
"""


class Stage:
    """A service's user with caches, and the unit that puts them back, in a directory."""

    def __init__(self, tmp_path: Path) -> None:
        self.home = tmp_path / "home"
        self.cache = self.home / ".cache" / "vllm"
        (self.cache / "modelinfos").mkdir(parents=True)
        (self.cache / "modelinfos" / "llama.json").write_text("{}")
        (self.cache / "graph").write_text("compiled")
        (self.cache / "link").symlink_to("graph")
        (self.cache / "link to nowhere").symlink_to("/nowhere")
        (self.cache / "graph").chmod(0o640)
        self.cache.chmod(0o2751)
        for path in (self.cache / "graph", self.cache):
            os.utime(path, ns=(10**18, 10**18 + 5))
        self.transport = connect(BoxSpec(name="here", transport="local", service="process"))
        names = Aside("v-é.service", getpass.getuser(), str(tmp_path / "units"), str(tmp_path / "drop-in"))
        self.names = names
        tool = tmp_path / "systemctl"
        tool.write_text(SYSTEMCTL.format(links=" ".join(names.links), path=names.path))
        tool.chmod(0o755)
        (tmp_path / "units").mkdir()
        self.door = OwnCaches(self.transport, names, None, (str(tool),))
        self.own = (OwnCache(str(self.cache), ("modelinfos",)), OwnCache(str(self.home / ".nv" / "ComputeCache")))
        self.before = everything(self.home)

    @property
    def unit(self) -> UnitFacts:
        return UnitFacts(
            name=self.names.unit,
            exists=True,
            argv=("/opt/vllm",),
            env={},
            user=getpass.getuser(),
            home=str(self.home),
            active=False,
            enabled=None,
        )

    def empty(self) -> tuple[str, ...]:
        return self.door.empty(self.unit, self.own, (), None)

    def resolve(self, *paths: Path, precious: tuple[str, ...] = ()) -> tuple[str, ...]:
        return self.door.resolve(self.unit, [OwnCache(str(path)) for path in paths], precious, None)[1]

    def put_back(self) -> subprocess.CompletedProcess[str]:
        argv = unitfile.exec_argv(unitfile.parse(Path(self.names.path).read_text()), {})
        return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=20)


def everything(folder: Path) -> dict[str, tuple[object, ...]]:
    """Each path below with its owner, group, mode, time of change (ns) and contents."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        held = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        # The time of a directory above a cache changes with each rename in it.
        time = None if path.name == ".cache" else info.st_mtime_ns
        found[str(path.relative_to(folder))] = (info.st_uid, info.st_gid, info.st_mode, time, held)
    return found


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.transport.close()


def test_a_boot_begins_with_empty_directories_of_the_same_owner_and_mode_and_what_is_no_compile_cache(stage):
    assert stage.empty() == tuple(one.path for one in stage.own)
    info = stage.cache.stat()
    assert (info.st_mode & 0o7777, info.st_uid) == (0o2751, os.geteuid())
    assert sorted(everything(stage.cache)) == ["modelinfos", "modelinfos/llama.json"]
    assert list(Path(stage.own[1].path).iterdir()) == []
    assert (stage.home / ".cache" / "vllm.coldboot-aside" / "graph").read_text() == "compiled"


def test_they_come_back_byte_for_byte_with_owner_mode_times_and_links_and_nothing_of_ours_is_left(stage):
    stage.empty()
    (stage.cache / "torch_compile_cache").mkdir()
    (stage.cache / "torch_compile_cache" / "a variant's").write_text("x")
    (Path(stage.own[1].path) / "kernel").write_text("x")
    done = stage.put_back()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{stage.cache} is back\n", "")
    assert everything(stage.home) == stage.before
    assert not (stage.home / ".nv").exists()
    assert stage.put_back().returncode == 0
    assert everything(stage.home) == stage.before
    assert stage.door.left(stage.unit, [one.path for one in stage.own]) == ()


def test_the_next_boot_begins_empty_too_but_knows_the_model_infos_of_the_last_one(stage):
    stage.empty()
    (stage.cache / "modelinfos" / "mtp.json").write_text("{}")
    (stage.cache / "graph").write_text("a variant's")
    stage.empty()
    assert sorted(everything(stage.cache)) == ["modelinfos", "modelinfos/llama.json", "modelinfos/mtp.json"]
    assert not (stage.home / ".cache" / "vllm.coldboot-spent").exists()
    stage.put_back()
    assert everything(stage.home) == stage.before


def test_the_unit_stands_and_is_enabled_before_anything_is_set_aside(stage, tmp_path):
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(BoxError):
        stage.empty()
    assert everything(stage.home) == stage.before
    (tmp_path / "systemctl").write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(BoxError, match="No such file or directory"):
        stage.empty()
    assert everything(stage.home) == stage.before


def test_where_the_unit_has_removed_itself_meanwhile_it_is_made_again(stage):
    stage.empty()
    stage.put_back()
    for path in (stage.names.path, *stage.names.links):
        Path(path).unlink()
    stage.empty()
    assert directories(Path(stage.names.path).read_text()) == tuple(one.path for one in stage.own)


def test_a_cache_that_a_killed_campaign_has_set_aside_within_another_one_comes_back_with_it(stage):
    inner = stage.cache / "deep_gemm"
    (inner / "kernel").mkdir(parents=True)
    before = everything(stage.home)
    stage.door.empty(stage.unit, (OwnCache(str(inner)),), (), None)
    assert list(inner.iterdir()) == []
    # The next campaign clears the whole.
    stage.empty()
    assert directories(Path(stage.names.path).read_text())[:2] == (str(stage.cache), str(inner))
    assert stage.put_back().returncode == 0
    # The time of a directory above a cache changes with each rename in it.
    after = everything(stage.home)
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} == {".cache/vllm"}
    assert [each[4] for each in after.values()] == [each[4] for each in before.values()]


def test_what_another_user_of_the_service_has_to_put_back_is_left_to_that_user(stage):
    text = replace(stage.names, owner="bob").text([str(stage.cache)])
    Path(stage.names.path).write_text(text)
    with pytest.raises(BoxError, match=r"caches of bob, as whom v-é\.service ran") as told:
        stage.empty()
    assert "invoke restore" in str(told.value.hint)
    assert everything(stage.home) == stage.before
    assert Path(stage.names.path).read_text() == text


@pytest.mark.parametrize(
    "torn",
    [
        "before the note is whole",
        "before the rename",
        "before the empty directory",
        "while it is put back: the empty one is away",
        "while it is put back: the note is still there",
    ],
)
def test_a_power_cut_at_any_instant_is_put_right(stage, torn):
    stage.empty()
    aside, note = (stage.cache.with_name(f"vllm.coldboot-{word}") for word in ("aside", "note"))
    spent = stage.cache.with_name("vllm.coldboot-spent")
    stage.cache.rename(spent)
    if torn in ("before the rename", "before the note is whole"):
        aside.rename(stage.cache)
        subprocess.run(("rm", "-r", str(spent)), check=True)
    elif torn == "before the empty directory":
        subprocess.run(("rm", "-r", str(spent)), check=True)
    elif "note" in torn:
        aside.rename(stage.cache)
    assert note.exists()
    if torn == "before the note is whole":
        note.rename(f"{note}.new")
    assert stage.put_back().returncode == 0
    assert everything(stage.home) == stage.before


@pytest.mark.parametrize("torn", ["before the rename", "before the empty directory"])
def test_and_the_same_command_goes_on_from_there(stage, torn):
    stage.empty()
    subprocess.run(("rm", "-r", str(stage.cache)), check=True)
    if torn == "before the rename":
        stage.cache.with_name("vllm.coldboot-aside").rename(stage.cache)
    stage.empty()
    assert sorted(everything(stage.cache)) == ["modelinfos", "modelinfos/llama.json"]
    stage.put_back()
    assert everything(stage.home) == stage.before


def test_what_production_has_written_after_a_reboot_is_kept_beside_the_original(stage):
    stage.empty()
    note = stage.cache.with_name("vllm.coldboot-note")
    # A note of another boot of the machine, and a file that is younger than this one.
    note.write_text(note.read_text().replace(Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "another"))
    (stage.cache / "production's").write_text("x")
    done = stage.put_back()
    assert done.returncode == 0
    kept = [path for path in stage.cache.parent.iterdir() if ".coldboot-kept-" in path.name]
    assert len(kept) == 1
    assert (kept[0] / "production's").read_text() == "x"
    assert f"is kept in {kept[0]}" in done.stdout
    assert stage.door.left(stage.unit, [str(stage.cache)]) == ()
    assert stage.door.kept == [str(kept[0])]
    subprocess.run(("rm", "-r", str(kept[0])), check=True)
    assert everything(stage.home) == stage.before


@pytest.mark.parametrize("became", ["a link out", "a file", "nothing", "another directory"])
def test_whatever_a_variant_makes_of_its_directory_the_original_comes_back_and_nothing_else_is_touched(stage, became):
    elsewhere = stage.home / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    before = everything(stage.home)
    stage.empty()
    shutil.rmtree(stage.cache)
    if became == "a link out":
        stage.cache.symlink_to(elsewhere)
    elif became == "a file":
        stage.cache.write_text("x")
    elif became == "another directory":
        (stage.cache / "deep").mkdir(parents=True)
        (stage.cache / "deep").chmod(0o500)
    assert stage.put_back().returncode == 0
    assert everything(stage.home) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file immutable")
def test_an_immutable_directory_is_refused_at_once_and_an_immutable_file_in_one_does_no_harm(stage):
    def chattr(how: str, path: Path) -> None:
        subprocess.run(("chattr", how, str(path)), check=True)

    chattr("+i", stage.cache)
    try:
        assert f"{stage.cache} cannot be read and written" in stage.resolve(stage.cache)[0]
        with pytest.raises(BoxError, match="cannot be read and written"):
            stage.empty()
        assert stage.put_back().returncode == 0
        assert everything(stage.home) == stage.before
    finally:
        chattr("-i", stage.cache)
    chattr("+i", stage.cache / "graph")
    try:
        stage.empty()
        assert [path.name for path in stage.cache.iterdir()] == ["modelinfos"]
        assert stage.put_back().returncode == 0
        assert everything(stage.home) == stage.before
    finally:
        chattr("-i", stage.cache / "graph")


def test_an_original_whose_note_is_lost_is_put_back_and_what_stands_in_its_place_is_kept(stage):
    stage.empty()
    stage.cache.with_name("vllm.coldboot-note").unlink()
    assert stage.put_back().returncode == 0
    assert (stage.cache / "graph").read_text() == "compiled"
    assert any(".coldboot-kept-" in path.name for path in stage.cache.parent.iterdir())


def test_what_cannot_be_put_back_is_named_and_the_rest_comes_back(stage):
    stage.empty()
    other = OwnCache(str(stage.home / ".triton" / "cache"))
    Path(other.path).mkdir(parents=True)
    stage.own = (*stage.own, other)
    stage.empty()
    aside = stage.cache.with_name("vllm.coldboot-aside")
    blocked = stage.cache.with_name("vllm.coldboot-note")
    blocked.unlink()
    (blocked / "in the way").mkdir(parents=True)
    done = stage.put_back()
    assert done.returncode == 1
    assert f"{stage.cache} could not be put back" in done.stdout
    assert not aside.exists()
    assert Path(other.path).is_dir()
    assert not Path(f"{other.path}.coldboot-aside").exists()


# --- what is left alone ----------------------------------------------------------------------------------------------


def test_all_that_must_be_left_alone_is_said_at_once_and_nothing_is_touched(stage, tmp_path):
    home = stage.home
    (home / "linked").symlink_to(stage.cache)
    (home / "file").write_text("x")
    (home / "weights" / "hf").mkdir(parents=True)
    before = everything(tmp_path)
    refused = {
        Path("/"): "is no absolute path below a directory",
        home: f"holds {home}, which is no compile cache",
        home / ".cache": f"holds {home}/.cache, which is no compile cache",
        home / "linked": f"is a symbolic link, to {stage.cache}: have the unit name the directory itself",
        home / "file": "is no directory",
        home / "weights": f"holds {home}/weights/hf/model, which is no compile cache",
        Path("/etc/ssl"): "is /etc/ssl, which lies below none of",
        home / "a" / ".." / "b": "is no plain path",
    }
    said = stage.resolve(*refused, precious=(f"{home}/weights/hf/model",))
    assert len(said) == len(refused)
    for line, (path, why) in zip(said, refused.items(), strict=True):
        assert line.startswith(f"{path} ")
        assert why in line
    assert everything(tmp_path) == before


def test_a_relative_path_and_one_with_a_newline_are_refused(stage):
    assert "is no absolute path" in stage.resolve(Path("cache/vllm"))[0]
    assert "is no plain path" in stage.resolve(stage.home / "a\nb")[0]


def test_a_link_out_of_the_allowed_places_is_refused_and_one_within_them_is_taken_by_its_real_name(stage, tmp_path):
    outside = Path("/usr/share")
    (stage.home / "out").symlink_to(outside)
    (stage.home / "in").symlink_to(stage.home / ".cache")
    own = [OwnCache(str(stage.home / "out" / "doc")), OwnCache(str(stage.home / "in" / "vllm"), ("modelinfos",))]
    found, problems = stage.door.resolve(stage.unit, own, (), None)
    assert "/usr/share/doc" in problems[0]
    assert found == (OwnCache(str(stage.cache), ("modelinfos",)),)


def test_what_lies_in_another_cache_is_set_aside_with_it(stage):
    own = [OwnCache(str(stage.cache)), OwnCache(str(stage.cache / "deep_gemm"))]
    assert stage.door.resolve(stage.unit, own, (), None) == ((OwnCache(str(stage.cache)),), ())


def test_a_cache_root_of_the_box_is_one_more_allowed_place(stage, tmp_path):
    unit = replace(stage.unit, home="/nonexistent")
    own = [OwnCache("/srv/caches/vllm")]
    assert "lies below none of" in stage.door.resolve(unit, own, (), None)[1][0]
    assert stage.door.resolve(unit, own, (), "/srv") == (tuple(own), ())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_mount_point_and_what_holds_one_are_refused(stage):
    inner = stage.cache / "graph.d"
    inner.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(inner)), check=True)
    try:
        assert "is or holds a mount point" in stage.resolve(stage.cache)[0]
        assert "is or holds a mount point" in stage.resolve(inner)[0]
    finally:
        subprocess.run(("umount", str(inner)), check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_a_directory_of_somebody_else_is_refused(stage):
    os.chown(stage.cache, 65534, 65534)
    assert "does not belong to" in stage.resolve(stage.cache)[0]


def test_a_box_of_plain_processes_is_told_so_with_file_and_line_before_anything_is_asked(tmp_path):
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(
        "experiment: e\nboxes:\n  here: {transport: local, service: process, program: [/opt/vllm, serve, m]}\n"
        "cache: clear\nvariants:\n  a: {}\n"
    )
    with pytest.raises(MatrixError) as refused:
        survey.prepare(survey.Options(matrix=matrix, out=tmp_path / "out"))
    said = str(refused.value)
    assert f"{matrix}:4: cache: clear sets a unit's own caches aside, and on box here (`service: process`)" in said
    assert "accepted: cold, which boots from empty caches of its own" in said
    assert not (tmp_path / "out").exists()


def test_the_room_on_each_disk_is_told_also_where_a_cache_is_not_there_yet(stage):
    absent = f"/absent-{secrets.token_hex(8)}/at/all"
    rows = stage.door.free_mib(stage.unit, (*stage.own, OwnCache(absent)))
    assert [at for _, at in rows] == [str(stage.cache), str(stage.home), "/"]
    assert abs(rows[0][0] - shutil.disk_usage(stage.home).free // 2**20) < 1024
    assert stage.door.free_mib(stage.unit, ()) == ()


# --- which directories -----------------------------------------------------------------------------------------------


def test_the_stores_are_those_of_the_units_environment_user_and_home():
    found = ENGINES["vllm"].own_caches({}, home="/home/svc", user="svc")
    assert [one.path for one in found] == [
        "/home/svc/.cache/vllm",
        "/tmp/torchinductor_svc",
        "/home/svc/.cache/torch_extensions",
        "/home/svc/.triton/cache",
        "/home/svc/.cache/flashinfer",
        "/home/svc/.tilelang/cache",
        "/tmp/svc/cutlass_python_cache",
        "/home/svc/.nv/ComputeCache",
    ]
    told = {
        "HOME": "/srv/svc",
        "XDG_CACHE_HOME": "/srv/xdg",
        "TMPDIR": "/srv/tmp",
        "TRITON_HOME": "/srv/triton",
        "FLASHINFER_WORKSPACE_BASE": "/srv/fi",
        "DG_JIT_CACHE_DIR": "/srv/dg/",
        "CUDA_CACHE_PATH": "~/nv",
    }
    assert [one.path for one in ENGINES["vllm"].own_caches(told, home="/home/svc", user="svc")] == [
        "/srv/xdg/vllm",
        "/srv/tmp/torchinductor_svc",
        "/srv/xdg/torch_extensions",
        "/srv/triton/.triton/cache",
        "/srv/fi/.cache/flashinfer",
        "/srv/dg",
        "/srv/svc/.tilelang/cache",
        "/srv/tmp/svc/cutlass_python_cache",
        "/srv/svc/nv",
    ]


def test_a_variants_own_cache_is_among_them(stage):
    found = stores_of(ENGINES["vllm"], stage.unit, [{}, {"TRITON_CACHE_DIR": "/var/cache/t"}])
    assert [one.path for one in found if "triton" in one.path or "/t" in one.path[-2:]] == [
        f"{stage.home}/.triton/cache",
        "/var/cache/t",
    ]


def test_programs_and_weights_in_a_command_are_precious():
    argv = ("/opt/v/bin/vllm", "serve", "/data/qwen/", "--spec-model=/data/mtp", "--port", "8000", "--x={/a}")
    assert precious_of(argv) == ("/opt/v/bin/vllm", "/data/qwen", "/data/mtp")


def test_the_units_text_gives_its_directories_back_and_anything_else_gives_none(stage):
    odd = ("/a b/c", '/q"%h/$x', "/tmp/é")
    assert directories(stage.names.text(odd)) == odd
    assert directories("") == ()
    assert directories("[Service]\nExecStart=/bin/true\n") == ()
