from __future__ import annotations

import pytest

from tests.publish.runs import FORMATS


@pytest.fixture(params=FORMATS)
def table_format(request):
    return request.param
