from __future__ import annotations

import pytest

from pipelines.catalog.items import open_items
from pipelines.inputs.prepare import prepare_run
from pipelines.inputs.read_ahead import ReadAhead
from pipelines.planning.plan import plan_run
from schemas.config_file import load_config
from schemas.errors import StorageError
from tests.factories import write_config, write_inputs


@pytest.fixture
def run(tmp_path):
    write_inputs(tmp_path)
    plan = plan_run(load_config(str(write_config(tmp_path))))
    return plan, prepare_run(plan), open_items(plan)


@pytest.mark.parametrize("guessed", [None, 1, 2], ids=["nothing", "right", "wrong"])
def test_whatever_was_guessed_the_shard_that_is_wanted_comes(run, guessed):
    plan, shards, catalog = run
    with ReadAhead(plan, catalog) as ahead:
        want = ahead.take(shards[1])
        ahead.guess(None if guessed is None else shards[guessed])
        got = ahead.take(shards[1])
        assert got.user_ids.equals(want.user_ids)
        assert got.counts == want.counts
        assert ahead.take(shards[3]).user_ids.equals(ahead.take(shards[3]).user_ids)


def test_a_shard_that_cannot_be_read_says_so_when_it_is_wanted(run):
    plan, shards, catalog = run
    with open(shards[2].path, "r+b") as file:
        file.truncate(40)
    with ReadAhead(plan, catalog) as ahead:
        ahead.guess(shards[2])
        assert ahead.take(shards[0]).counts.users_in > 0
        ahead.guess(shards[2])
        with pytest.raises(StorageError, match="damaged|cannot be read"):
            ahead.take(shards[2])
