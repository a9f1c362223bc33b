"""Cold caches: what is made, what is carried over, what is refused, and that nothing else is touched."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import pytest

from orchestrator.box.caches import cache_place, prepare, sudo_needs, sweep
from orchestrator.box.engines import ENGINES
from orchestrator.box.transports import connect
from orchestrator.box.unit import UnitFacts
from orchestrator.errors import BoxError, UsageError
from orchestrator.matrix import BoxSpec

ENGINE = ENGINES["rehearsal"]


@pytest.fixture
def transport():
    door = connect(BoxSpec(name="here", transport="local", service="process"))
    yield door
    door.close()


@pytest.fixture
def home(tmp_path):
    production = tmp_path / "home" / ".cache" / "vllm"
    for name in ("modelinfos/llama.json", "torch_compile_cache/abc/rank_0_0/model"):
        (production / name).parent.mkdir(parents=True)
        (production / name).write_text("production's")
    return tmp_path / "home"


def unit(home: Path, **changes) -> UnitFacts:
    fields = {"name": "v.service", "exists": True, "argv": ("e",), "env": {}, "active": False, "enabled": None}
    return UnitFacts(**(fields | {"user": getpass.getuser(), "home": str(home)} | changes))


def make(transport, home, *, boot="b01-x", state="cold", variant="x", root=None, engine=ENGINE, **changes):
    return prepare(
        transport, unit(home, **changes), engine, experiment="e", boot=boot, variant=variant, state=state, root=root
    )


def files(path: Path | str) -> set[str]:
    return {str(each.relative_to(path)) for each in Path(path).rglob("*") if not each.is_dir()}


def test_a_cold_boot_has_empty_directories_of_its_own_for_every_store(transport, home):
    roots = make(transport, home)
    assert roots.empty is True
    assert Path(roots.root).parent == home / ".cache" / "coldboot" / "v"
    assert len(roots.env) == 12
    assert all(Path(path).is_dir() and path.startswith(roots.root) for path in roots.env.values())
    assert files(roots.root) == {"vllm/modelinfos/llama.json"}


def test_what_was_compiled_is_gone_afterwards_and_productions_own_is_untouched(transport, home):
    before = files(home)
    roots = make(transport, home)
    (Path(roots.env["TRITON_CACHE_DIR"]) / "kernel").write_text("x")
    (Path(roots.env["TMPDIR"]) / "deep" / "er").mkdir(parents=True)
    roots.remove()
    roots.remove()
    assert not Path(roots.root).exists()
    left = files(home) - before
    assert left == {".cache/coldboot/v/.coldboot", ".cache/coldboot/v/carried/vllm/modelinfos/llama.json"}
    assert before <= files(home)


def test_what_is_no_compile_cache_is_carried_from_boot_to_boot(transport, home):
    first = make(transport, home)
    (Path(first.env["VLLM_CACHE_ROOT"]) / "modelinfos" / "mtp.json").write_text("new")
    first.remove()
    second = make(transport, home, boot="b02-x")
    assert files(second.root) == {"vllm/modelinfos/llama.json", "vllm/modelinfos/mtp.json"}


@pytest.mark.parametrize(("name", "below"), [("VLLM_CACHE_ROOT", ""), ("XDG_CACHE_HOME", "vllm/")])
def test_production_says_itself_where_its_caches_are(transport, home, tmp_path, name, below):
    other = tmp_path / "other" / below / "modelinfos"
    other.mkdir(parents=True)
    (other / "own.json").write_text("x")
    roots = make(transport, home, env={name: str(tmp_path / "other")})
    assert files(roots.root) == {"vllm/modelinfos/own.json"}


def test_what_a_killed_campaign_left_is_removed_by_the_next_boot(transport, home):
    left = make(transport, home, boot="b01-x")
    locked = Path(left.root) / "vllm" / "locked"
    locked.mkdir()
    locked.chmod(0o500)
    again = make(transport, home, boot="b01-x")
    assert again.root == left.root
    assert files(again.root) == {"vllm/modelinfos/llama.json"}
    other = make(transport, home, boot="b02-x")
    assert not Path(left.root).exists()
    assert Path(other.root).exists()


def test_warm_boots_of_a_variant_share_their_caches_and_others_do_not(transport, home):
    first = make(transport, home, boot="b01-x@warm", state="warm")
    (Path(first.env["TRITON_CACHE_DIR"]) / "kernel").write_text("x")
    first.remove()
    make(transport, home, boot="b01-y", variant="y").remove()
    second = make(transport, home, boot="b02-x@warm", state="warm")
    assert second.root == first.root
    assert "triton/kernel" in files(second.root)
    assert second.empty is None
    assert make(transport, home, boot="b02-y@warm", variant="y", state="warm").root != first.root


def test_as_is_touches_nothing_and_clear_is_the_units_own_matter(transport, home):
    before = files(home)
    roots = make(transport, home, state="as-is")
    roots.remove()
    assert (roots.root, roots.empty, roots.env) == (None, None, {})
    assert files(home) == before
    with pytest.raises(UsageError, match=r"needs a unit of systemd.*\n.*cache: cold"):
        make(transport, home, state="clear")
    roots = prepare(
        transport,
        unit(home),
        ENGINE,
        experiment="e",
        boot="b01-x@clear",
        variant="x",
        state="clear",
        clear=lambda: ("/a", "/b"),
    )
    roots.remove()
    assert (roots.root, roots.empty, roots.env) == ("/a /b", True, {})
    assert files(home) == before


def test_a_sweep_leaves_nothing_of_ours(transport, home):
    before = files(home)
    make(transport, home)
    make(transport, home, state="warm")
    sweep(transport, unit(home))
    sweep(transport, unit(home))
    assert files(home) == before
    assert not (home / ".cache" / "coldboot" / "v").exists()


def test_a_sweep_does_not_follow_a_link_out(transport, home, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    roots = make(transport, home)
    (Path(roots.root) / "vllm" / "out").symlink_to(precious)
    (Path(roots.root).parent / "b-link").symlink_to(precious)
    sweep(transport, unit(home))
    assert (precious / "file").read_text() == "x"


def test_a_directory_that_is_not_ours_is_refused_and_left_as_it_is(transport, home, tmp_path):
    theirs = tmp_path / "data" / "v"
    theirs.mkdir(parents=True)
    (theirs / "b-important").write_text("x")
    with pytest.raises(BoxError, match="is not empty and not ours"):
        make(transport, home, root=str(tmp_path / "data"))
    sweep(transport, unit(home), root=str(tmp_path / "data"))
    assert files(theirs) == {"b-important"}


def test_an_empty_directory_is_taken(transport, home, tmp_path):
    (tmp_path / "data" / "v").mkdir(parents=True)
    assert make(transport, home, root=str(tmp_path / "data")).empty


def test_a_link_to_a_home_or_to_a_system_directory_is_refused(transport, home, tmp_path):
    for name, target in (("a", home), ("c", Path("/tmp"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "v").symlink_to(target)
        with pytest.raises(BoxError, match=r"is a home directory|is no place for caches"):
            make(transport, home, root=str(tmp_path / name))


def test_a_root_through_a_link_is_used_by_its_real_name(transport, home, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    roots = make(transport, home, root=str(tmp_path / "alias"))
    assert roots.root.startswith(str(tmp_path / "real" / "v"))


@pytest.mark.parametrize("root", ["relative/x", "/", "/x", "/a/../b"])
def test_a_root_that_cannot_be_one_is_refused_before_anything_is_done(home, root):
    with pytest.raises(UsageError, match="cannot be used"):
        cache_place(unit(home), root)


def test_a_root_too_long_for_the_engines_sockets_is_refused(transport, home, tmp_path):
    deep = tmp_path / ("d" * 70)
    with pytest.raises(UsageError, match="may have 70 bytes"):
        make(transport, home, root=str(deep), engine=ENGINES["vllm"])
    assert make(transport, home, root=str(deep)).empty


def test_where_the_root_cannot_be_made_it_is_said(transport, home, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BoxError, match="cannot make"):
        make(transport, home, root=str(tmp_path / "file" / "x"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become the service's user without sudo")
def test_the_directories_belong_to_the_services_user(transport, tmp_path):
    home = tmp_path / "nobody"
    home.mkdir()
    for path in (home, *list(home.parents)[:3]):
        path.chmod(0o755)
    os.chown(home, 65534, 65534)
    roots = make(transport, home, user="nobody")
    assert {Path(path).stat().st_uid for path in roots.env.values()} == {65534}
    roots.remove()
    assert not Path(roots.root).exists()


def test_what_sudo_must_allow(home):
    assert sudo_needs(unit(home, user="vllm"), "alex") == (("vllm", ("sh", "-s")),)
    assert sudo_needs(unit(home, user="alex"), "alex") == ()
