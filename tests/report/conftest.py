from __future__ import annotations

import pytest

from tests.report.runs import KINDS, make


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The run of a kind, made when it is first asked for."""
    runs = {}

    def get(kind):
        if kind not in runs:
            runs[kind] = make(kind, tmp_path_factory.mktemp(kind))
        return runs[kind]

    return get


@pytest.fixture(params=list(KINDS))
def any_run(request, made):
    return made(request.param)
