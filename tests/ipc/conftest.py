"""Channels for the tests of luceasync.ipc."""

from collections.abc import Iterator

import pytest

from tests.ipc.ends import Ends, make_ends


@pytest.fixture(params=["shared", "stream"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = make_ends(request.param)
    yield made
    made.close()


@pytest.fixture
def shared_ends() -> Iterator[Ends]:
    made = make_ends("shared")
    yield made
    made.close()


@pytest.fixture
def stream_ends() -> Iterator[Ends]:
    made = make_ends("stream")
    yield made
    made.close()
