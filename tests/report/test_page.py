"""The page of a run, however it ended: its numbers are the manifest's, its texts are texts."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest

from tests.factories import write_config, write_inputs
from tests.report.runs import HOSTILE_TITLES, HOSTILE_USERS, run

VOID = {"meta", "link", "input", "br", "img", "path", "use"}


class Page(HTMLParser):
    """What a test wants of a page: `<data>` with its text, ids, tags, JSON blocks, all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.data: list[tuple[dict[str, str], str]] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.blocks: dict[str, object] = {}
        self.text = ""
        self.open: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        if tag not in VOID:
            self.open.append((tag, found))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        tag, attrs = self.open[-1] if self.open else ("", {})
        if tag == "data":
            self.data.append((attrs, data))
        if tag == "script" and attrs.get("type") == "application/json":
            self.blocks[attrs["id"]] = json.loads(data)
        elif tag not in ("script", "style"):
            self.text += data


def page_of(made) -> Page:
    return Page(made.page.read_text())


def shown(text: str) -> tuple[float, float]:
    """A rendered number, and how far it may be from the exact one."""
    percent = text.endswith(" %")
    digits = text.removesuffix(" %").replace(",", "")
    places = len(digits.partition(".")[2])
    scale = 0.01 if percent else 1.0
    return float(digits) * scale, 0.5 * 10**-places * scale * 1.001


def test_every_run_leaves_a_page_that_its_manifest_names(any_run):
    assert any_run.manifest["report"] == str(any_run.page)
    assert any_run.manifest["status"] == {
        "refused": "refused", "failed": "failed", "nothing": "failed"
    }.get(any_run.kind, "published")  # fmt: skip
    page = page_of(any_run)
    assert page.tags.count("h1") == page.tags.count("main") == page.tags.count("title") == 1
    assert len(set(page.ids)) == len(page.ids)
    assert any_run.manifest["plan"]["run_id"] in page.text
    word = {"published": "Published", "refused": "Refused", "failed": "Failed"}
    assert word[any_run.manifest["status"]] in page.text
    assert len(any_run.page.read_bytes()) < 1_000_000
    for hash_ in filter(None, any_run.manifest["plan"]["hashes"].values()):
        assert hash_ in page.text


def test_rendered_numbers_are_those_of_the_manifest(any_run):
    page, want = page_of(any_run), any_run.numbers
    compared = set()
    for attrs, text in page.data:
        value = json.loads(attrs["value"])
        if "data-key" not in attrs:
            continue
        key = attrs["data-key"]
        if key in want:
            assert value == want[key], key
            compared.add(key)
        if value is not None:
            number, within = shown(text)
            assert abs(number - value) <= within, (key, text, value)
    assert {"users_in", "users_quarantined", "rows_published", "prompt_tokens"} <= compared
    kept = page.blocks["numbers"]
    assert {key: kept[key] for key in want} == json.loads(json.dumps(want))


def test_gates_are_those_of_the_audit(any_run):
    page, audit = page_of(any_run), any_run.manifest["audit"]
    gates = {gate["gate"]: gate["value"] for gate in audit["gates"]} if audit else {}
    found = {a["data-gate"]: json.loads(a["value"]) for a, _ in page.data if "data-gate" in a}
    assert found == {name: value for name, value in gates.items() if value is not None}


def test_the_quarantine_by_rule_is_that_of_the_table(made):
    run_ = made("everything")
    rows = pl.read_parquet(list(run_.run_dir.glob("staged/*-quarantine.parquet")))
    counted = rows.group_by("table", "rule").len().rows()
    found = {a["data-rule"]: int(a["value"]) for a, _ in page_of(run_).data if "data-rule" in a}
    assert found == {f"{table}/{rule}": count for table, rule, count in counted}
    assert found["users/vector_not_finite"] == found["users/vector_length"] == 1
    assert found["candidates/unknown_item"] == 2


def test_funnels_add_up(any_run):
    c = any_run.numbers
    page = page_of(any_run)
    data = {a["data-key"]: int(a["value"]) for a, _ in page.data
            if a.get("data-key", "").startswith(("users_in", "users_q", "users_w", "users_rec",
                                                 "users_emb", "candidates_"))}  # fmt: skip
    parts = ("users_recommended", "users_embedded", "users_quarantined", "users_without_eligible")
    assert data["users_in"] == sum(data.get(part, 0) for part in parts) == c["users_in"]
    if any_run.manifest["plan"]["config"]["task"]["score"] is not None:
        rest = [n for key, n in data.items() if key.startswith("candidates_")]
        assert 2 * data["candidates_in"] == sum(rest)
        assert data["candidates_in"] == c["candidates_in"]


@pytest.mark.parametrize("user", HOSTILE_USERS)
def test_nothing_from_a_table_is_markup(made, user):
    run_ = made("everything")
    html = run_.page.read_text()
    assert html.count("<script") == 3  # numbers, examples, the page's own
    for text in (*HOSTILE_TITLES[:4], user, "<b>bold</b>", "<u>no item</u>", "<img src=x"):
        if re.search(r"[<>\"]", text):
            assert text not in html
    page = Page(html)
    assert "img" not in page.tags
    examples = page.blocks["examples"]
    ids = {one["id"] for one in examples["users"]}
    if len(user) > 200:  # this one is quarantined
        assert user[:79] + "…" in page.text
        assert user[:80] not in page.text
    else:
        assert user in ids
    titles = {title for _, title in examples["items"]}
    assert set(HOSTILE_TITLES[:4]) & titles
    assert all(len(title) <= 100 for title in titles if title)


def test_a_page_of_users_shows_their_history_and_what_they_got(made):
    run_ = made("everything")
    examples = page_of(run_).blocks["examples"]
    rows = pl.read_parquet(list(run_.run_dir.glob("staged/*-recommendations.parquet")))
    users = pl.read_parquet(run_.folder / "users.parquet")
    names = dict(pl.read_parquet(run_.folder / "catalog.parquet").select("item_id", "title").rows())
    cards = [one for one in examples["users"] if one["status"] == "recommended"]
    assert len(cards) == run_.numbers["users_recommended"]
    for card in cards:
        if len(card["id"]) == 200:
            continue
        mine = rows.filter(pl.col("user_id") == card["id"]).sort("rank")
        got = [examples["items"][place] for place, *_ in card["items"]]
        assert [item for item, _ in got] == mine["item_id"].to_list()
        assert [x[1] for x in card["items"]] == pytest.approx(mine["score"].to_list(), abs=1e-4)
        assert [x[2] for x in card["items"]] == mine["source"].to_list()
        history = users.filter(pl.col("user_id") == card["id"])["history"][0].to_list()
        seen = [examples["items"][place][0] for place in card["history"]]
        assert seen == history[::-1][:20]
        for item, title in got:
            assert title == (names[item] if len(names[item]) <= 100 else names[item][:99] + "…")
    assert any(x[3] for card in cards for x in card["items"])  # new since the run before


def test_an_item_is_new_when_the_run_before_did_not_list_it(made):
    run_ = made("everything")
    (before,) = (p for p in run_.folder.glob("runs/2026-11-27*"))
    then = pl.read_parquet(list(before.glob("staged/*-recommendations.parquet")))
    pairs = set(then.select("user_id", "item_id").rows())
    examples = page_of(run_).blocks["examples"]
    checked = 0
    for card in examples["users"]:
        if (card["id"],) not in set(then.select("user_id").unique().rows()):
            continue
        for place, _, _, new, *_ in card.get("items", []):
            assert new is ((card["id"], examples["items"][place][0]) not in pairs)
            checked += 1
    assert checked > 50


def test_other_kinds_say_what_they_are(made):
    labels = page_of(made("label")).blocks["examples"]["users"][0]["items"][0][4]
    assert re.fullmatch(r"y -?\d+\.\d+, n -?\d+\.\d+", labels)
    embedded = page_of(made("embed")).blocks["examples"]["users"][0]
    assert len(embedded["embedding"]) == 8
    empty = page_of(made("empty"))
    assert "nobody" not in empty.text
    assert "An empty partition" in empty.text
    assert empty.blocks["numbers"]["gini"] is None
    reasons = {user["reason"] for user in empty.blocks["examples"]["users"]}
    assert reasons == {"no_eligible_candidate"}
    assert "3 finished shards of 4" in page_of(made("failed")).text
    assert "cannot bear" in page_of(made("failed")).text
    assert "exact_share is" in page_of(made("refused")).text
    assert "examples" not in page_of(made("nothing")).blocks
    assert page_of(made("wide")).blocks["examples"]["users"][0]["id"].isdigit()


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_the_page_again_with_users_of_your_choice(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    write_config(tmp_path)
    config = write_config(tmp_path, report={"examples": 2})
    summary = nightshelf("run", config, "--output", "json").json
    html = (tmp_path / "runs" / summary["run_id"] / "report.html").read_text()
    few = {one["id"] for one in Page(html).blocks["examples"]["users"]}
    assert len(few) == 2
    other = next(u for u in tables["users"]["user_id"].to_pylist() if u not in few)
    users = ("--user", other, "--user", "stranger")
    done = nightshelf("report", summary["run_dir"], *users, "--output", "json").json
    assert done == {"run_id": summary["run_id"], "status": "published",
                    "report": summary["report"]}  # fmt: skip
    cards = Page(Path(done["report"]).read_text()).blocks["examples"]["users"]
    assert [one["id"] for one in cards[:2]] == [other, "stranger"]
    assert cards[0]["items"]
    assert cards[1]["status"] == "not in the run"
    assert {one["id"] for one in cards[2:]} == few
    plain = nightshelf("report", config, "--run-id", summary["run_id"]).out
    assert plain.strip() == done["report"]


def test_a_quarantined_user_that_is_asked_for_says_why(made):
    run_ = made("everything")
    run("report", run_.run_dir, "--user", "u039", "--user", HOSTILE_USERS[0])
    cards = page_of(run_).blocks["examples"]["users"]
    assert cards[0]["id"] == "u039"
    assert cards[0]["status"] == "quarantined"
    assert "vector_not_finite" in cards[0]["reason"]


def test_report_settings_make_no_other_run_and_name_items(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path, report={"title_column": "sid"})
    first = nightshelf("run", config, "--output", "json").json
    items = Page(Path(first["report"]).read_text()).blocks["examples"]["items"]
    assert all(re.fullmatch(r"\[\d, \d, \d\]", title) for _, title in items)
    second = nightshelf("run", config, "--set", "report.examples=0", "--output", "json").json
    assert second["run_id"] == first["run_id"]
    page = Page(Path(second["report"]).read_text())
    assert "examples" not in page.blocks
    assert "u001" not in page.text
    err = nightshelf("run", config, "--set", "report.title_column=name", check=3).err
    assert "column 'name' is missing" in err


def test_ids_stand_for_titles_where_there_are_none(nightshelf, tmp_path):
    tables = write_inputs(tmp_path)
    pl.from_arrow(tables["catalog"]).drop("title").write_parquet(tmp_path / "catalog.parquet")
    summary = nightshelf("run", write_config(tmp_path), "--output", "json").json
    items = Page(Path(summary["report"]).read_text()).blocks["examples"]["items"]
    assert items
    assert all(title is None for _, title in items)


def test_a_page_that_cannot_be_written_changes_nothing_else(nightshelf, tmp_path, monkeypatch):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    plan = nightshelf("plan", config, "--output", "json").json
    (tmp_path / "runs" / plan["run_id"] / "report.html").mkdir(parents=True)
    done = nightshelf("run", config, "--output", "json")
    assert done.json["status"] == "published"
    assert done.json["report"] is None
    assert "the report could not be written" in done.err
    assert done.json["rows_published"] > 0
    assert "not written" in nightshelf("run", config).out


def test_a_run_without_its_staged_files_keeps_its_page(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    first = nightshelf("run", config, "--output", "json").json
    nightshelf("run", config, "--set", "task.k=3")
    nightshelf("gc", config, "--keep", "0", "--older-than-days", "0")
    before = Path(first["report"]).read_text()
    err = nightshelf("report", first["run_dir"], check=4).err
    assert "staged files of the run are gone" in err
    assert Path(first["report"]).read_text() == before


def test_a_run_that_has_not_ended_has_no_page(nightshelf, tmp_path):
    write_inputs(tmp_path)
    config = write_config(tmp_path)
    prepared = nightshelf("prepare", config, "--output", "json").json
    assert "has not ended yet" in nightshelf("report", prepared["run_dir"], check=4).err
    nightshelf("score", prepared["run_dir"])
    nightshelf("audit", prepared["run_dir"])
    assert nightshelf("publish", prepared["run_dir"], "--output", "json").json["report"]
    done = nightshelf("report", prepared["run_dir"], "--output", "json").json
    assert done["status"] == "published"


def test_a_user_of_another_type_is_refused(made):
    out = run("report", made("wide").run_dir, "--user", "abc", "--output", "json", check=2)
    assert "--user must be a number" in out
