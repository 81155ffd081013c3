import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.costs import cache
from lowtide.costs.cache import CostCache, clear
from lowtide.costs.op_signature import OpCost
from lowtide.environment import cache_dir
from lowtide.errors import LowtideWarning

COST = OpCost(0.25, 1024)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "deep" / "cache"


def test_what_is_added_is_found_by_the_next_process():
    CostCache("here").add({"aten.mm": COST})
    assert CostCache("here").get("aten.mm") == COST
    assert CostCache("here").get("aten.bmm") is None


def test_environments_are_kept_apart():
    CostCache("2 threads").add({"aten.mm": COST})
    assert CostCache("4 threads").get("aten.mm") is None


def test_entries_can_be_read_by_people(folder):
    store = CostCache("here")
    store.add({"aten.mm(float32[2,3]{3,1})": COST})
    content = json.loads(store.path.read_text())
    assert content["environment"] == "here"
    assert [entry["op"] for entry in content["ops"].values()] == ["aten.mm(float32[2,3]{3,1})"]


def test_two_processes_do_not_lose_each_others_entries():
    first, second = CostCache("here"), CostCache("here")
    first.add({"a": COST})
    second.add({"b": OpCost(1.0, 0)})
    both = CostCache("here")
    assert both.get("a") == COST
    assert both.get("b") == OpCost(1.0, 0)


def test_nothing_to_add_writes_nothing(folder):
    CostCache("here").add({})
    assert not folder.exists()


def test_no_temporary_files_stay(folder):
    CostCache("here").add({"a": COST})
    assert [file.suffix for file in folder.iterdir()] == [".json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"environment": "here"}', '{"environment": "here", "ops": 3}']
)
def test_a_corrupt_file_is_reported_once_and_replaced(content):
    store = CostCache("here")
    store.add({"a": COST})
    store.path.write_text(content)
    with pytest.warns(LowtideWarning, match="cannot be read"):
        again = CostCache("here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again.get("a") is None
        again.add({"b": COST})
    assert CostCache("here").get("b") == COST


def test_bad_entries_are_left_out():
    store = CostCache("here")
    store.add({"good": COST, "bad": COST, "worse": COST})
    content = json.loads(store.path.read_text())
    for entry in content["ops"].values():
        if entry["op"] == "bad":
            entry["seconds"] = -1
        if entry["op"] == "worse":
            entry["workspace_bytes"] = 1.5
    store.path.write_text(json.dumps(content))
    again = CostCache("here")
    assert (again.get("good"), again.get("bad"), again.get("worse")) == (COST, None, None)


def test_an_unwritable_folder_is_reported_once_and_survived(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    with pytest.warns(LowtideWarning):
        store = CostCache("here")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.add({"a": COST})
        store.add({"b": COST})
    assert store.get("a") == COST


def test_the_oldest_entries_go_first(monkeypatch):
    monkeypatch.setattr(cache, "LIMITS", replace(cache.LIMITS, ops=3))
    for name in "abcd":
        CostCache("here").add({name: COST})
    store = CostCache("here")
    assert [store.get(name) for name in "abcd"] == [None, COST, COST, COST]


def test_the_oldest_files_go_first(monkeypatch, folder):
    monkeypatch.setattr(cache, "LIMITS", replace(cache.LIMITS, files=2))
    for age, name in enumerate("abc"):
        store = CostCache(name)
        store.add({"op": COST})
        if store.path.exists():
            os.utime(store.path, (1000 + age, 1000 + age))
    assert CostCache("a").get("op") is None
    assert len(list(folder.iterdir())) == 2


def test_clear_removes_only_cache_files(folder):
    CostCache("a").add({"op": COST})
    CostCache("b").add({"op": COST})
    (folder / "mine.txt").write_text("kept")
    assert clear() == 2
    assert [file.name for file in folder.iterdir()] == ["mine.txt"]
    assert CostCache("a").get("op") is None


def test_clear_without_a_cache_is_fine():
    assert clear() == 0


def test_the_folder_is_the_users_unless_chosen(monkeypatch):
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/lowtide")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "lowtide"
