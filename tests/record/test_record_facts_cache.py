"""The cache of facts: bounded, private, and never in the way of a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.record import facts_cache
from pipeworker.record.facts_cache import FactsCache, default_folder

FACTS = LayerFacts("Linear", 10, 40, 40, 80, 1e-3, 2e-3, 1e-3, passes_gradient=False)


def test_facts_are_read_as_they_were_added(tmp_path: Path) -> None:
    cache = FactsCache(tmp_path / "a" / "pipeworker")
    assert cache.read() == {}
    cache.add({"one": FACTS})
    cache.add({"two": LayerFacts("ReLU"), "one": FACTS})
    assert cache.read() == {"one": FACTS, "two": LayerFacts("ReLU")}
    assert list(cache.read()) == ["two", "one"]  # the newest last
    file = tmp_path / "a" / "pipeworker" / "layers.json"
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert list(file.parent.iterdir()) == [file]


def test_a_umask_of_private_groups_leaves_the_file_readable(tmp_path: Path) -> None:
    cache = FactsCache(tmp_path / "private")
    before = os.umask(0o002)
    try:
        cache.add({"one": FACTS})
    finally:
        os.umask(before)
    assert cache.read() == {"one": FACTS}


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "file").touch()
    cache = FactsCache(tmp_path / "file" / "pipeworker")
    cache.add({"one": FACTS})
    assert cache.read() == {}
    begin = "the facts of layers are not kept for later jobs: "
    assert any(message.startswith(begin) for message in logged)


def test_the_oldest_facts_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_cache, "MOST_ENTRIES", 3)
    cache = FactsCache(tmp_path)
    tmp_path.chmod(0o700)
    for number in range(5):
        cache.add({str(number): FACTS})
    assert list(cache.read()) == ["2", "3", "4"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2}',
        b'{"version": 2, "facts": {"one": []}}',
        b'{"version": 2, "facts": {"one": {"kind": 3}}}',
        b'{"version": 1, "facts": {}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_written_anew(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "private"
    cache = FactsCache(folder)
    cache.add({"one": FACTS})
    (folder / "layers.json").write_bytes(damage)
    assert cache.read() == {}
    cache.add({"two": FACTS})
    assert cache.read() == {"two": FACTS}


@pytest.mark.parametrize("seconds", [-1.0, 1e308, float("nan")])
def test_impossible_facts_are_left_out(tmp_path: Path, seconds: float) -> None:
    folder = tmp_path / "private"
    cache = FactsCache(folder)
    cache.add({"one": FACTS, "two": FACTS})
    file = folder / "layers.json"
    content = json.loads(file.read_text())
    content["facts"]["one"]["forward"] = seconds
    file.write_text(json.dumps(content))
    assert cache.read() == {"two": FACTS}


def test_files_that_others_may_write_are_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    cache = FactsCache(folder)
    cache.add({"one": FACTS})
    file = folder / "layers.json"
    for path, mode in ((file, 0o666), (folder, 0o777)):
        before = path.stat().st_mode
        path.chmod(mode)
        assert cache.read() == {}
        path.chmod(before)
    assert cache.read() == {"one": FACTS}
    folder.chmod(0o777)
    cache.add({"two": FACTS})
    folder.chmod(0o700)
    assert cache.read() == {"one": FACTS}


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder, other = tmp_path / "private", tmp_path / "other"
    FactsCache(other).add({"one": FACTS})
    folder.mkdir(mode=0o700)
    (folder / "layers.json").symlink_to(other / "layers.json")
    assert FactsCache(folder).read() == {}
    link = tmp_path / "link"
    link.symlink_to(other)
    assert FactsCache(link).read() == {}


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache in (FactsCache(None), FactsCache(tmp_path / "file" / "pipeworker")):
        cache.add({"one": FACTS})
        assert cache.read() == {}


def test_the_folder_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "pipeworker"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "pipeworker"
